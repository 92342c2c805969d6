"""The states of experiments and trials, and which may follow each other, as pure functions."""

from enum import Enum
from typing import TypeVar

from paceline._errors import PicklableError
from paceline.messages.states import ExperimentState, TrialState
from paceline.search import ExitReason as SearchExit

_E, _T = ExperimentState, TrialState

_STOPPING_EXPERIMENT = {
    _E.STOPPING_COMPLETED,
    _E.STOPPING_CANCELED,
    _E.STOPPING_KILLED,
    _E.STOPPING_ERROR,
}
EXPERIMENT_TRANSITIONS: dict[ExperimentState, set[ExperimentState]] = {
    _E.ACTIVE: {_E.PAUSED} | _STOPPING_EXPERIMENT,
    _E.PAUSED: {_E.ACTIVE} | _STOPPING_EXPERIMENT,
    # A stopping state may be replaced by a harsher one only.
    _E.STOPPING_COMPLETED: {
        _E.COMPLETED, _E.STOPPING_CANCELED, _E.STOPPING_KILLED, _E.STOPPING_ERROR
    },
    _E.STOPPING_CANCELED: {_E.CANCELED, _E.STOPPING_KILLED, _E.STOPPING_ERROR},
    _E.STOPPING_KILLED: {_E.CANCELED, _E.STOPPING_ERROR},
    _E.STOPPING_ERROR: {_E.ERROR},
    # Only continuing an ended experiment leads back.
    _E.COMPLETED: {_E.ACTIVE},
    _E.CANCELED: {_E.ACTIVE},
    _E.ERROR: {_E.ACTIVE},
}  # fmt: skip

_STOPPING_TRIAL = {
    _T.STOPPING_COMPLETED,
    _T.STOPPING_CANCELED,
    _T.STOPPING_KILLED,
    _T.STOPPING_ERROR,
}
_TERMINAL_TRIAL = {_T.COMPLETED, _T.CANCELED, _T.ERROR}
TRIAL_TRANSITIONS: dict[TrialState, set[TrialState]] = {
    _T.ACTIVE: _STOPPING_TRIAL | _TERMINAL_TRIAL,
    _T.STOPPING_COMPLETED: {
        _T.STOPPING_CANCELED, _T.STOPPING_KILLED, _T.STOPPING_ERROR, _T.COMPLETED, _T.ERROR
    },
    _T.STOPPING_CANCELED: {_T.STOPPING_KILLED, _T.STOPPING_ERROR, _T.CANCELED, _T.ERROR},
    _T.STOPPING_KILLED: {_T.STOPPING_ERROR, _T.CANCELED, _T.ERROR},
    _T.STOPPING_ERROR: {_T.ERROR},
    _T.COMPLETED: {_T.ACTIVE},
    _T.CANCELED: {_T.ACTIVE},
    _T.ERROR: {_T.ACTIVE},
}  # fmt: skip

_END_OF_EXPERIMENT = {
    _E.STOPPING_COMPLETED: _E.COMPLETED,
    _E.STOPPING_CANCELED: _E.CANCELED,
    _E.STOPPING_KILLED: _E.CANCELED,
    _E.STOPPING_ERROR: _E.ERROR,
}
_END_OF_TRIAL = {
    _T.STOPPING_COMPLETED: _T.COMPLETED,
    _T.STOPPING_CANCELED: _T.CANCELED,
    _T.STOPPING_KILLED: _T.CANCELED,
    _T.STOPPING_ERROR: _T.ERROR,
}
_SEARCH_EXIT = {
    _T.COMPLETED: SearchExit.COMPLETED,
    _T.CANCELED: SearchExit.CANCELED,
    _T.ERROR: SearchExit.ERROR,
}

# The reason of a trial's stop by `InvalidHP`.
INVALID_HP = "invalid_hp"
# That of an end by a training loss that was not finite.
DIVERGED = "diverged"

State = TypeVar("State", ExperimentState, TrialState)


class RefusedError(PicklableError, ValueError):
    """Raised when a request makes sense but cannot be carried out; `code` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransitionError(RuntimeError):
    """Raised when a state may not follow the present one."""


class NotFoundError(LookupError):
    """Raised when something that a request names does not exist."""


class SearchEnd(str, Enum):
    """End of a search; REOPENED leaves the outcome to the trials that were continued.

    UNMEASURED is that of a search in which no trial has reported a finite value of its metric.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    UNMEASURED = "unmeasured"
    REOPENED = "reopened"


def check_transition(
    present: State, wanted: State, transitions: dict[State, set[State]], what: str
) -> State:
    """Return `wanted` if it may follow `present`.

    Raises:
        TransitionError: It may not; the message names both.
    """
    if wanted not in transitions[present]:
        raise TransitionError(f"{what} must not go from {present.value} to {wanted.value}.")
    return wanted


def end_of_experiment(stopping: ExperimentState) -> ExperimentState:
    """Return the terminal state that a stopping state leads to."""
    return _END_OF_EXPERIMENT[stopping]


def stopping_state(end: SearchEnd, trial_states: set[TrialState]) -> ExperimentState:
    """Return where an experiment goes whose search and trials have ended.

    Args:
        end: How the search ended.
        trial_states: The states of the trials, without those that refused their hyperparameters.
    """
    if end is SearchEnd.REOPENED:
        if trial_states <= {TrialState.ERROR}:
            end = SearchEnd.FAILED
        elif trial_states == {TrialState.CANCELED}:
            end = SearchEnd.CANCELED
    return {
        SearchEnd.FAILED: ExperimentState.STOPPING_ERROR,
        SearchEnd.UNMEASURED: ExperimentState.STOPPING_ERROR,
        SearchEnd.CANCELED: ExperimentState.STOPPING_CANCELED,
    }.get(end, ExperimentState.STOPPING_COMPLETED)


def end_of_trial(stopping: TrialState) -> TrialState:
    """Return the terminal state that a stopping state leads to."""
    return _END_OF_TRIAL[stopping]


def search_exit(state: TrialState) -> SearchExit:
    """Return what the search is told about a trial in a terminal state."""
    return _SEARCH_EXIT[state]
