"""States in the words of people: what the stored ones mean for whoever watches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.messages.resources import Experiment as ExperimentData
    from paceline.messages.resources import Trial as TrialData
    from paceline.messages.states import ExperimentState, TrialState

# The words of an experiment, and the stored states behind each.
EXPERIMENT_WORDS: dict[str, tuple[str, ...]] = {
    "QUEUED": ("ACTIVE",),
    "RUNNING": ("ACTIVE",),
    "PAUSED": ("PAUSED",),
    "STOPPING": (
        "STOPPING_COMPLETED",
        "STOPPING_CANCELED",
        "STOPPING_KILLED",
        "STOPPING_ERROR",
    ),
    "COMPLETED": ("COMPLETED",),
    "CANCELED": ("CANCELED",),
    "ERROR": ("ERROR",),
}
_STOPPED_BY_SEARCH = "stopped by the search"
_FAILED, _INCOMPLETE = 1, 3


def experiment_word(data: "ExperimentData") -> str:
    """Return where an experiment stands: an active one is RUNNING, or QUEUED without slots."""
    if data.state.value == "ACTIVE":
        return "RUNNING" if data.num_running else "QUEUED"
    return "STOPPING" if data.state.is_stopping else data.state.value


def trial_word(
    state: "TrialState",
    is_running: bool,
    stop_reason: str | None,
    experiment_state: "ExperimentState",
) -> str:
    """Return where a trial stands; STOPPED is an end that the search chose before the full length.

    Args:
        state: The stored state.
        is_running: Whether an attempt runs.
        stop_reason: Why it was told to stop, if it was.
        experiment_state: The stored state of its experiment.
    """
    if state.is_terminal:
        is_stopped = state.value == "COMPLETED" and stop_reason == _STOPPED_BY_SEARCH
        return "STOPPED" if is_stopped else state.value
    is_paused = experiment_state.value == "PAUSED"
    if state.is_stopping or experiment_state.is_stopping:
        return "STOPPING"
    if is_running:
        return "STOPPING" if is_paused else "RUNNING"
    return "PAUSED" if is_paused else "QUEUED"


def word_of(trial: "TrialData", experiment_state: "ExperimentState") -> str:
    """Return where a trial of an experiment stands."""
    return trial_word(trial.state, trial.is_running, trial.stop_reason, experiment_state)


def progress_text(data: "ExperimentData") -> str:
    """Return the progress; a dash while nothing was reported of it."""
    return "-" if data.progress == 0.0 and not data.state.is_terminal else f"{data.progress:.0%}"


def num_trials_text(num_trials: int) -> str:
    """Return a number of trials, such as `1 trial`."""
    return "1 trial" if num_trials == 1 else f"{num_trials} trials"


def lost_text(num_records: int) -> str:
    """Return how many records are lost, such as `1 record is lost`."""
    return "1 record is lost" if num_records == 1 else f"{num_records} records are lost"


def exit_code(data: "ExperimentData") -> int:
    """Return the exit code of a command that waited for an experiment's end."""
    if data.state.value != "COMPLETED":
        return _FAILED
    return _INCOMPLETE if data.num_records_lost else 0
