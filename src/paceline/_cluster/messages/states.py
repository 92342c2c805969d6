"""The states of experiments, trials, attempts and checkpoints."""

from enum import Enum

STOPPED_BY_SEARCH = "stopped by the search"
"""The reason of a trial's stop that the search chose before the full length."""
FULLY_TRAINED = "reached the search's full length"
"""The reason of a trial's stop that the search chose at the full length."""


class _StoredState(str, Enum):
    """State of an experiment or trial, as the master stores it."""

    @property
    def is_terminal(self) -> bool:
        """Whether nothing will run any more unless the experiment is continued."""
        return self.value in ("COMPLETED", "CANCELED", "ERROR")

    @property
    def is_stopping(self) -> bool:
        """Whether it only waits for running attempts to end."""
        return str(self.value).startswith("STOPPING_")


class ExperimentState(_StoredState):
    """Where an experiment stands; the STOPPING states wait for running attempts to end."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"


class TrialState(_StoredState):
    """Where a trial stands; an ACTIVE trial runs, waits for slots or is paused."""

    ACTIVE = "ACTIVE"
    STOPPING_COMPLETED = "STOPPING_COMPLETED"
    STOPPING_CANCELED = "STOPPING_CANCELED"
    STOPPING_KILLED = "STOPPING_KILLED"
    STOPPING_ERROR = "STOPPING_ERROR"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"


class ShownState(str, Enum):
    """Where an experiment or a trial stands, in the words of the command line, SDK and web UI.

    QUEUED waits for slots, STOPPING for running attempts to end. A trial is STOPPED if the search
    ended it before the full length; only trials are.
    """

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    COMPLETED = "COMPLETED"
    CANCELED = "CANCELED"
    ERROR = "ERROR"

    @property
    def is_terminal(self) -> bool:
        """Whether the experiment or trial has ended."""
        return self in (self.STOPPED, self.COMPLETED, self.CANCELED, self.ERROR)


def told_state(state: str) -> str:
    """Return a stored state as text of a message, in the words that users see elsewhere."""
    if state == ExperimentState.ACTIVE.value:
        return "QUEUED or RUNNING"
    return "STOPPING" if state.startswith("STOPPING_") else state


def shown_experiment_state(state: ExperimentState, num_running: int) -> ShownState:
    """Return the shown state: an active experiment is RUNNING, or QUEUED without slots."""
    if state is ExperimentState.ACTIVE:
        return ShownState.RUNNING if num_running else ShownState.QUEUED
    return ShownState.STOPPING if state.is_stopping else ShownState(state.value)


def shown_trial_state(
    state: TrialState,
    is_running: bool,
    stop_reason: str | None,
    experiment_state: ExperimentState,
) -> ShownState:
    """Return where a trial stands.

    Args:
        state: The stored state.
        is_running: Whether an attempt runs.
        stop_reason: The reason of the order to stop, if any.
        experiment_state: The stored state of its experiment.
    """
    if state.is_terminal:
        is_stopped = state is TrialState.COMPLETED and stop_reason == STOPPED_BY_SEARCH
        return ShownState.STOPPED if is_stopped else ShownState(state.value)
    is_paused = experiment_state is ExperimentState.PAUSED
    if state.is_stopping or experiment_state.is_stopping:
        return ShownState.STOPPING
    if is_running:
        return ShownState.STOPPING if is_paused else ShownState.RUNNING
    return ShownState.PAUSED if is_paused else ShownState.QUEUED


class AttemptState(str, Enum):
    """Where an attempt stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"


# Stored values of states that have not ended, for queries: few rows match them.
LIVE_TRIALS = tuple(state.value for state in TrialState if not state.is_terminal)
LIVE_ATTEMPTS = tuple(state.value for state in AttemptState if state is not AttemptState.ENDED)


class CheckpointState(str, Enum):
    """Whether a checkpoint's files are there; PARTIALLY_DELETED has lost some on purpose."""

    COMPLETED = "COMPLETED"
    PARTIALLY_DELETED = "PARTIALLY_DELETED"
    DELETED = "DELETED"


class ExitReason(str, Enum):
    """Reason for the end of an attempt as seen by its runner.

    SHORTAGE says that the machine lacked something for a start: disk space, inodes, open files,
    processes or memory. NOT_FORMED says that the nodes of an attempt did not come together.
    """

    EXITED = "exited"
    KILLED = "killed"
    PREEMPTION_TIMEOUT = "preemption_timeout"
    START_FAILED = "start_failed"
    SHORTAGE = "shortage"
    RUNNER_LOST = "runner_lost"
    NOT_FORMED = "not_formed"


class ErrorKind(str, Enum):
    """Kind of an error by its remedy: wait, fix the code, or repair the installation.

    TRANSIENT: it may pass, such as a full disk, a file server that does not answer, or a runner
    that was killed. The trial is tried again after a pause, which `max_restarts` does not count.
    USER: it is in the code or in the configuration. Code that fails is restarted `max_restarts`
    times.
    MEMORY: it needs more memory than there is, of a GPU or of the machine. The trial is tried again
    only from a checkpoint that the attempt has stored, as the same would happen again.
    PERMANENT: files of the home are damaged, or the installation is. Neither time nor the user's
    code can change that.
    """

    TRANSIENT = "transient"
    USER = "user"
    MEMORY = "memory"
    PERMANENT = "permanent"


_KINDS = {
    ExitReason.START_FAILED: ErrorKind.PERMANENT,
    ExitReason.SHORTAGE: ErrorKind.TRANSIENT,
    ExitReason.RUNNER_LOST: ErrorKind.TRANSIENT,
    ExitReason.NOT_FORMED: ErrorKind.TRANSIENT,
}


def end_kind(reason: ExitReason, is_success: bool) -> ErrorKind | None:
    """Return the error kind for an end stored without a kind; None if there is no error.

    Attempts that the master ends have none.
    """
    if reason is ExitReason.EXITED:
        return None if is_success else ErrorKind.USER
    return _KINDS.get(reason)
