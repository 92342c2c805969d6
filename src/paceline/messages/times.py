"""Models of the REST API on what the time of a trial went to."""

from paceline.messages.resources import Message


class TrialTime(Message):
    """What a trial's time went to until `until`, in seconds; the shares add up to `total_s`.

    `training_s` is what was trained and kept. `data_wait_s`: the devices were idle, as they waited
    for data. `checkpoint_s`: training stood still for checkpoints. `lost_s`: work after the last
    checkpoint before a stop. `start_s`: from the launch of a process to its first step, restarts
    included. `other_s`: what scripts do between and after trainings. `undivided_s`: attempts that
    do not tell what they do. `waiting_s`: there was no process. `goodput` is `training_s` as a
    fraction of all but `waiting_s`; None if that is not known.
    """

    training_s: float
    data_wait_s: float
    validation_s: float
    checkpoint_s: float
    lost_s: float
    start_s: float
    other_s: float
    undivided_s: float
    waiting_s: float
    total_s: float
    goodput: float | None
    until: float
