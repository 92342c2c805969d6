"""What the master wants of a running attempt."""

from sqlalchemy import Connection

from paceline.journal import encode_float
from paceline.master.experiments._attempt_rows import check_not_over, read_attempt
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import config_of, read_members
from paceline.messages.attempts import AttemptControl
from paceline.messages.states import TrialState

_KILLED = (TrialState.STOPPING_KILLED.value, TrialState.STOPPING_ERROR.value)
_SHUTDOWN_GRACE_S = 5.0


def read_control_of(connection: Connection, attempt_id: int) -> AttemptControl:
    """Return what is wanted of an attempt.

    Raises:
        NotFoundError: There is no such attempt.
        RefusedError: It has ended.
    """
    attempt = read_attempt(connection, attempt_id)
    check_not_over(attempt)
    trial = StateChanges.trial(connection, attempt.trial_id)
    experiment = StateChanges.experiment(connection, attempt.experiment_id)
    config = config_of(experiment)
    timeout_s = config.preemption_timeout
    if trial.state == TrialState.STOPPING_COMPLETED.value:
        timeout_s = config.searcher.stop_timeout
    best = experiment.best_metric
    return AttemptControl(
        version=attempt.control_version,
        should_preempt=attempt.preempt_reason is not None,
        preempt_timeout_s=timeout_s,
        should_kill=attempt.should_kill,
        # A user who kills means now; a master that shuts down wants the trial to go on later.
        kill_grace_s=0.0 if trial.state in _KILLED else _SHUTDOWN_GRACE_S,
        operation_length=trial.target_length,
        operations_closed=trial.operations_closed,
        best_validation=None if best is None else encode_float(best),
        meeting_port=attempt.meeting_port,
        sends_checkpoints=any(one.sends_checkpoints for one in read_members(attempt)),
    )
