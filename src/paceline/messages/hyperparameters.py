"""Models of the REST API on the hyperparameters of an experiment's trials."""

from typing import Any

from paceline.messages.base import Message, Number
from paceline.messages.metrics import MetricName
from paceline.messages.states import TrialState


class HparamRow(Message):
    """A trial in the hyperparameter table; `hparams` are flat, nested names joined by dots."""

    trial_id: int
    state: TrialState
    hparams: dict[str, Any]
    steps_completed: int
    metric: Number | None


class HparamAxis(Message):
    """A hyperparameter: its type in the search space, and whether it differs between trials."""

    name: str
    type: str
    is_log: bool
    is_varied: bool
    minval: float | None = None
    maxval: float | None = None
    vals: list[Any] | None = None


class HparamTable(Message):
    """The hyperparameters of an experiment's trials, with one metric of each.

    `num_trials` counts all of them. If `is_sampled`, half of the rows are the best trials by the
    searched metric, and the others are spread evenly. A master of before tells neither.
    """

    metric: MetricName
    smaller_is_better: bool
    axes: list[HparamAxis]
    rows: list[HparamRow]
    num_trials: int | None = None
    is_sampled: bool = False
