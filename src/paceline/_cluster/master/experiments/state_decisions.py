"""State transitions, decisions after attempts, and ends of unmanaged runs: pure functions."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from paceline._base.exceptions import PicklableError
from paceline._cluster.messages.states import (
    ErrorKind,
    ExitReason,
    ExperimentState,
    TrialState,
    told_state,
)
from paceline.search._search_messages import ExitReason as SearchExit

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
    # Terminal states are left only by continuing an experiment.
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
# Stop reason of a trial ended by a non-finite training loss.
DIVERGED = "diverged"

State = TypeVar("State", ExperimentState, TrialState)


class RefusedError(PicklableError, ValueError):
    """Raised when a request makes sense but cannot be carried out; `code` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TransitionError(RuntimeError):
    """Error raised for a transition not allowed from the present state."""


class NotFoundError(LookupError):
    """Error raised for a nonexistent object named by a request."""


class SearchEnd(str, Enum):
    """End of a search; REOPENED leaves the outcome to the continued trials.

    UNMEASURED stands for a search in which no trial has reported a finite value of its metric.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    UNMEASURED = "unmeasured"
    REOPENED = "reopened"


def check_transition(
    present: State, wanted: State, transitions: dict[State, set[State]], what: str
) -> State:
    """Return `wanted` if allowed as the next state after `present`.

    Raises:
        TransitionError: It may not; the message names both.
    """
    if wanted not in transitions[present]:
        states = f"from {told_state(present.value)} to {told_state(wanted.value)}"
        raise TransitionError(f"{what} must not go {states}.")
    return wanted


def experiment_end(stopping: ExperimentState) -> ExperimentState:
    """Return the terminal state of an experiment for its stopping state."""
    return _END_OF_EXPERIMENT[stopping]


def stopping_state(end: SearchEnd, trial_states: set[TrialState]) -> ExperimentState:
    """Return the stopping state of an experiment with an ended search and ended trials.

    Args:
        end: How the search ended.
        trial_states: The states of the trials, without those that refused their hyperparameters.
    """
    if end is SearchEnd.REOPENED:
        # Empty set included: an experiment without counted trials has failed as well.
        if trial_states <= {TrialState.ERROR}:
            end = SearchEnd.FAILED
        elif trial_states == {TrialState.CANCELED}:
            end = SearchEnd.CANCELED
    return {
        SearchEnd.FAILED: ExperimentState.STOPPING_ERROR,
        SearchEnd.UNMEASURED: ExperimentState.STOPPING_ERROR,
        SearchEnd.CANCELED: ExperimentState.STOPPING_CANCELED,
    }.get(end, ExperimentState.STOPPING_COMPLETED)


def trial_end(stopping: TrialState) -> TrialState:
    """Return the terminal state of a trial for its stopping state."""
    return _END_OF_TRIAL[stopping]


def search_exit(state: TrialState) -> SearchExit:
    """Return the exit reason given to the search for a trial in a terminal state."""
    return _SEARCH_EXIT[state]


# A runner that dies again and again has a cause that another attempt will not cure.
MAX_RUNNERS_LOST = 5
# Nodes that do not come together so often in a row have no network between them, or one hangs.
MAX_NOT_FORMED = 5
# Limit on transient start failures in a row: after about five minutes they are permanent.
MAX_SHORTAGES = 10
# A store that is away for an hour or more will not come back soon: each of these attempts has
# waited for it for two minutes.
MAX_STORE_FAILURES = 30
# The second one is on another node, if there is one.
MAX_FAILED_STARTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFacts:
    """Facts for the decision after the end of an attempt.

    Attributes:
        was_asked_to_stop: The master had asked for preemption or a kill.
        acknowledged: The code was asked to checkpoint and leave, and saw the request.
        kind: The kind of the attempt's error, None if there was none.
        retries: How often a transient error was followed by another attempt.
        num_runners_lost: Attempts in a row, this one the last, whose runner died; those before one
            that stored a checkpoint do not count.
        num_not_formed: Attempts in a row, this one the last, whose nodes did not come together.
        num_shortages: Attempts in a row, this one the last, that could not start for a transient
            reason, such as want of something that the machine may have again.
        store: The storage that the attempt failed by, because it did not answer.
        num_store_failures: Attempts in a row, this one the last, that failed so.
        num_failed_starts: Attempts in a row, this one the last, that could not start for another
            reason.
        has_other_nodes: There are nodes besides the attempt's node, which may be better.
        where: The node of the attempt in words, such as ` on the node 'box'`, if there are several.
        has_stored: The attempt stored a checkpoint.
        is_repeated: The attempt before it failed the same way, and this one stored no checkpoint.
        no_retry: The line of its output after which the config wants no restart.
        is_interactive: It is a notebook or the like, whose state is gone with it.
        detail: What its runner says about its end.
    """

    trial_state: TrialState
    restarts: int
    max_restarts: int
    retries: int
    reason: ExitReason
    kind: ErrorKind | None
    is_success: bool
    was_asked_to_stop: bool
    acknowledged: bool
    early_exit: str | None
    outcome: str | None
    num_runners_lost: int
    num_not_formed: int
    num_shortages: int
    store: str | None = None
    num_store_failures: int = 0
    num_failed_starts: int = 0
    has_other_nodes: bool = False
    where: str = ""
    is_repeated: bool
    has_stored: bool = False
    text: str
    no_retry: str | None = None
    is_interactive: bool = False
    detail: str | None = None

    @property
    def logged_text(self) -> str:
        """Text for the log note: the first line alone if a process printed the rest."""
        return self.text.partition("\n")[0] if self.reason is ExitReason.EXITED else self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitDecision:
    """Decision after the end of an attempt: a terminal state, or another attempt.

    Attributes:
        state: The trial's next state; ACTIVE means that it wants another attempt.
        search_exit: The exit reported to the search, None while the trial continues.
        restarts: The trial's counter of restarts after this.
        retries: The trial's counter of retries after this, None if it does not change.
        stop_reason: Why the trial was stopped, None if that does not change.
        note: A line for the trial's log, None if nothing is worth saying.
        error: Why the trial failed, None if it did not.
        kind: The kind of `error`.
    """

    state: TrialState
    search_exit: SearchExit | None
    restarts: int
    level: str = "INFO"
    note: str | None = None
    error: str | None = None
    kind: ErrorKind | None = None
    retries: int | None = None
    stop_reason: str | None = None


def judge_exit(facts: AttemptFacts) -> ExitDecision:
    """Return the decision after the end of an attempt."""
    if facts.trial_state.is_stopping:
        return _judge_stopping(facts)
    if facts.reason is ExitReason.RUNNER_LOST:
        return _judge_lost_runner(facts)
    if facts.reason is ExitReason.NOT_FORMED:
        return _judge_not_formed(facts)
    if facts.reason in (ExitReason.START_FAILED, ExitReason.SHORTAGE):
        if facts.kind is ErrorKind.TRANSIENT:
            return _judge_shortage(facts)
        if facts.has_other_nodes and facts.num_failed_starts < MAX_FAILED_STARTS:
            return _tried_again(
                facts,
                f"The attempt could not start{facts.where} ({facts.text}); it is tried once more,"
                " on another node if one is large enough (not counted as a restart).",
            )
        return _failed_exit(facts, f"The attempt could not start{facts.where}: {facts.text}")
    # A trial that is to continue is killed only by a master that shuts down and would wait no
    # longer.
    if facts.reason in (ExitReason.PREEMPTION_TIMEOUT, ExitReason.KILLED):
        return ExitDecision(
            state=TrialState.ACTIVE,
            search_exit=None,
            restarts=facts.restarts,
            level="WARNING",
            note="The attempt did not leave in time and was killed; the trial goes on from its"
            " latest checkpoint, or from the beginning without one.",
        )
    if facts.early_exit == INVALID_HP:
        return ExitDecision(
            state=TrialState.COMPLETED,
            search_exit=SearchExit.INVALID_HP,
            restarts=facts.restarts,
            note="The code refused these hyperparameters (InvalidHP).",
        )
    if facts.early_exit == DIVERGED and not facts.is_success:
        error = f"The training has diverged, so no restart follows: {facts.text}"
        return replace(_failed_exit(facts, error), stop_reason=DIVERGED)
    if not facts.is_success:
        return _judge_failure(facts) if facts.store is None else _judge_store_failure(facts)
    was_preempted = facts.acknowledged and (facts.was_asked_to_stop or facts.outcome == "preempted")
    if was_preempted and facts.early_exit is None:
        return ExitDecision(state=TrialState.ACTIVE, search_exit=None, restarts=facts.restarts)
    # Of others, the detail tells of a process that failed after its work.
    detail = facts.detail if facts.is_interactive else None
    return ExitDecision(
        state=TrialState.COMPLETED,
        search_exit=SearchExit.COMPLETED,
        restarts=facts.restarts,
        note=detail and f"The task has ended: {detail}.",
        stop_reason=detail,
    )


def _judge_stopping(facts: AttemptFacts) -> ExitDecision:
    state = trial_end(facts.trial_state)
    error = None
    if facts.reason is ExitReason.EXITED and not facts.is_success:
        error = facts.text
    return ExitDecision(
        state=state,
        search_exit=search_exit(state),
        restarts=facts.restarts,
        level="WARNING",
        note=error and f"The attempt failed while it was being stopped: {facts.logged_text}",
        error=error,
        kind=facts.kind if error else None,
    )


def _judge_lost_runner(facts: AttemptFacts) -> ExitDecision:
    if facts.is_interactive:
        error = f"The task was lost ({facts.text}). It is not started again, as its state is gone."
        return _failed_exit(facts, error)
    return _tried_again(
        facts,
        f"The attempt was lost ({facts.text}); the trial goes on from its latest checkpoint, or"
        " from the beginning without one (not counted as a restart).",
        error=f"The attempt was lost {facts.num_runners_lost} times in a row: {facts.text}.",
        is_last=facts.num_runners_lost > MAX_RUNNERS_LOST,
    )


def _judge_not_formed(facts: AttemptFacts) -> ExitDecision:
    return _tried_again(
        facts,
        f"The attempt gave its slots back ({facts.text}); it is tried again in a while (not counted"
        " as a restart).",
        error=f"The nodes of the attempt did not come together {facts.num_not_formed} times in a"
        f" row: {facts.text}. Hint: see to the nodes and the network between them, then continue"
        " the experiment.",
        is_last=facts.num_not_formed > MAX_NOT_FORMED,
    )


def _judge_shortage(facts: AttemptFacts) -> ExitDecision:
    return _tried_again(
        facts,
        f"The attempt could not start ({facts.text}); it is tried again in a while (not"
        " counted as a restart).",
        error=f"The attempt could not start {facts.num_shortages} times in a row: {facts.text}."
        " Hint: give the machine what it lacks, then continue the experiment.",
        is_last=facts.num_shortages > MAX_SHORTAGES,
    )


def _judge_store_failure(facts: AttemptFacts) -> ExitDecision:
    return _tried_again(
        facts,
        f"The attempt failed, as the store {facts.store} does not answer ({facts.logged_text}); it"
        " is tried again in a while, from the latest checkpoint if there is one (not counted as a"
        " restart).",
        error=f"The store {facts.store} did not answer {facts.num_store_failures} attempts in a"
        f" row: {facts.text}. Hint: see to the store, then continue the experiment.",
        is_last=facts.num_store_failures > MAX_STORE_FAILURES,
    )


def _tried_again(
    facts: AttemptFacts, note: str, *, error: str = "", is_last: bool = False
) -> ExitDecision:
    """Return another attempt with a note, or the failure with `error` after the last one."""
    if is_last:
        return _failed_exit(facts, error)
    return ExitDecision(
        state=TrialState.ACTIVE,
        search_exit=None,
        restarts=facts.restarts,
        retries=facts.retries + 1,
        level="WARNING",
        note=note,
    )


def _judge_failure(facts: AttemptFacts) -> ExitDecision:
    restarts = facts.restarts + 1
    if facts.kind is ErrorKind.MEMORY and not facts.has_stored:
        error = f"The trial ran out of memory, so no restart follows: {facts.text}"
        return _failed_exit(facts, error)
    if facts.no_retry is not None:
        error = f"The output has {facts.no_retry!r}, so no restart follows: {facts.text}"
        return _failed_exit(facts, error)
    if restarts > facts.max_restarts:
        allowed = f"max_restarts is {facts.max_restarts}"
        follows = f"and {allowed}."
    elif facts.is_repeated:
        follows = (
            "the same way as the one before, with no checkpoint in between, so no restart follows"
            f" ({facts.restarts} of {facts.max_restarts} used)."
        )
    else:
        follows = ""
    if follows:
        error = f"The attempt failed ({facts.text}) {follows}"
        return _failed_exit(facts, error, f"The attempt failed ({facts.logged_text}) {follows}")
    return ExitDecision(
        state=TrialState.ACTIVE,
        search_exit=None,
        restarts=restarts,
        level="ERROR",
        note=f"The attempt failed{facts.where} ({facts.logged_text}); restart {restarts} of"
        f" {facts.max_restarts} follows, from the latest checkpoint if there is one.",
    )


def _failed_exit(facts: AttemptFacts, error: str, note: str | None = None) -> ExitDecision:
    return ExitDecision(
        state=TrialState.ERROR,
        search_exit=SearchExit.ERROR,
        restarts=facts.restarts,
        level="ERROR",
        note=note or error,
        error=error,
        kind=facts.kind,
    )


VANISHED = "The process ended without a word: it was killed, or its machine failed."
SILENT = (
    "Nothing was heard of the run for {:.0f} s: it was killed, its machine failed, or the network"
    " does. It goes on here once it is heard again."
)
_NEVER_BEGAN = "The run ended before it recorded anything."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """States of experiment and trial for showing a run."""

    experiment: ExperimentState
    trial: TrialState
    reason: str | None = None
    error: str | None = None


def end_of_run(
    *,
    is_alive: bool,
    has_begun: bool,
    outcome: str | None,
    error: str | None,
    vanished: str = VANISHED,
    left_out: str | None = None,
) -> RunEnd:
    """Decide how a run is shown, from its newest attempt.

    A preempted run waits to be resumed, so it is paused.

    Args:
        is_alive: Whether a process of the run is at work, or more records are to come.
        has_begun: Whether there is an attempt at all.
        outcome: How the newest attempt said that it ended, None if it did not.
        error: The error that it named.
        vanished: The text for an attempt that recorded no end.
        left_out: Why nothing more can be read of the run, so that it cannot be resumed either; None
            if it can.
    """
    if left_out is not None and outcome in (None, "preempted"):
        return RunEnd(experiment=ExperimentState.ERROR, trial=TrialState.ERROR, error=left_out)
    if outcome is None and is_alive:
        return RunEnd(experiment=ExperimentState.ACTIVE, trial=TrialState.ACTIVE)
    if outcome == "preempted":
        return RunEnd(experiment=ExperimentState.PAUSED, trial=TrialState.ACTIVE)
    if outcome == "completed":
        return RunEnd(experiment=ExperimentState.COMPLETED, trial=TrialState.COMPLETED)
    if outcome == INVALID_HP:
        # Same states as for an experiment with a single, refusing trial.
        return RunEnd(
            experiment=ExperimentState.ERROR,
            trial=TrialState.COMPLETED,
            reason=INVALID_HP,
            error=f"The run refused its hyperparameters: {error or 'InvalidHP'}.",
        )
    why = error or (vanished if has_begun else _NEVER_BEGAN)
    return RunEnd(experiment=ExperimentState.ERROR, trial=TrialState.ERROR, error=why)
