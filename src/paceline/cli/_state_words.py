"""States in the words of people: what the stored ones mean for whoever watches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.messages.experiments import Experiment as ExperimentData
    from paceline.messages.states import ExperimentState
    from paceline.messages.trials import Trial as TrialData

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
# What a kind of error says to whoever has to do something about it.
ERROR_KINDS = {
    "transient": "transient (it may pass: continue the experiment once it has)",
    "user": "user (in the code or the configuration)",
    "permanent": "permanent (of the home or the installation)",
}
_FAILED, _INCOMPLETE, _UNMEASURED = 1, 3, 4


def experiment_word(data: "ExperimentData") -> str:
    """Return where an experiment stands."""
    return data.shown_state.value


def word_of(trial: "TrialData", experiment_state: "ExperimentState") -> str:
    """Return where a trial of an experiment stands; masters of before do not tell it."""
    return trial.model_copy(update={"experiment_state": experiment_state}).shown_state.value


def progress_text(data: "ExperimentData") -> str:
    """Return the progress; a dash while nothing was reported of it."""
    return "-" if data.progress == 0.0 and not data.state.is_terminal else f"{data.progress:.0%}"


def num_trials_text(num_trials: int) -> str:
    """Return a number of trials, such as `1 trial`."""
    return "1 trial" if num_trials == 1 else f"{num_trials} trials"


def lost_records_text(num_records: int) -> str:
    """Return how many records are lost, such as `1 record is lost`."""
    return "1 record is lost" if num_records == 1 else f"{num_records} records are lost"


def exit_code(data: "ExperimentData") -> int:
    """Return the exit code of a command that waited for an experiment's end."""
    if data.state.value != "COMPLETED":
        return _UNMEASURED if data.is_unmeasured else _FAILED
    return _INCOMPLETE if data.num_records_lost else 0
