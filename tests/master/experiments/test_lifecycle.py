import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from paceline._cluster.master.experiments.state_decisions import (
    EXPERIMENT_TRANSITIONS,
    MAX_RUNNERS_LOST,
    MAX_SHORTAGES,
    TRIAL_TRANSITIONS,
    AttemptFacts,
    SearchEnd,
    TransitionError,
    check_transition,
    experiment_end,
    judge_exit,
    search_exit,
    stopping_state,
    trial_end,
)
from paceline._cluster.messages.states import (
    ErrorKind,
    ExitReason,
    ExperimentState,
    TrialState,
    end_kind,
    told_state,
)
from paceline.search import ExitReason as SearchExit

E, T = ExperimentState, TrialState

# From, and everything that may follow: S is short for STOPPING.
EXPERIMENT_TABLE = {
    "ACTIVE": "PAUSED S_COMPLETED S_CANCELED S_KILLED S_ERROR",
    "PAUSED": "ACTIVE S_COMPLETED S_CANCELED S_KILLED S_ERROR",
    "S_COMPLETED": "COMPLETED S_CANCELED S_KILLED S_ERROR",
    "S_CANCELED": "CANCELED S_KILLED S_ERROR",
    "S_KILLED": "CANCELED S_ERROR",
    "S_ERROR": "ERROR",
    "COMPLETED": "ACTIVE",
    "CANCELED": "ACTIVE",
    "ERROR": "ACTIVE",
}
TRIAL_TABLE = {
    "ACTIVE": "S_COMPLETED S_CANCELED S_KILLED S_ERROR COMPLETED CANCELED ERROR",
    "S_COMPLETED": "S_CANCELED S_KILLED S_ERROR COMPLETED ERROR",
    "S_CANCELED": "S_KILLED S_ERROR CANCELED ERROR",
    "S_KILLED": "S_ERROR CANCELED ERROR",
    "S_ERROR": "ERROR",
    "COMPLETED": "ACTIVE",
    "CANCELED": "ACTIVE",
    "ERROR": "ACTIVE",
}


def named(states: Any, table: dict[str, str]) -> dict[Any, set[Any]]:
    def state(name: str) -> Any:
        return states(name.replace("S_", "STOPPING_"))

    return {state(name): {state(n) for n in after.split()} for name, after in table.items()}


@pytest.mark.parametrize(
    ("present", "wanted", "transitions", "expected"),
    [
        (present, wanted, transitions, expected)
        for states, transitions, table in (
            (E, EXPERIMENT_TRANSITIONS, EXPERIMENT_TABLE),
            (T, TRIAL_TRANSITIONS, TRIAL_TABLE),
        )
        for expected in [named(states, table)]
        for present, wanted in product(states, states)
    ],
)
def test_a_state_follows_only_where_the_table_says_so(
    present: Any, wanted: Any, transitions: dict[Any, set[Any]], expected: dict[Any, set[Any]]
) -> None:
    if wanted in expected[present]:
        assert check_transition(present, wanted, transitions, "It") is wanted
    else:
        words = f"from {told_state(present.value)} to {told_state(wanted.value)}"
        with pytest.raises(TransitionError, match=words):
            check_transition(present, wanted, transitions, "It")


@pytest.mark.parametrize(
    ("states", "transitions"), [(E, EXPERIMENT_TRANSITIONS), (T, TRIAL_TRANSITIONS)]
)
def test_every_state_has_its_transitions_and_reaches_an_end(
    states: Any, transitions: dict[Any, set[Any]]
) -> None:
    assert set(transitions) == set(states)
    for state in states:
        seen, todo = set(), [state]
        while todo:
            seen.add(one := todo.pop())
            todo += transitions[one] - seen
        assert any(one.is_terminal for one in seen)


@pytest.mark.parametrize("state", [state for state in E if state.is_stopping])
def test_an_experiment_may_enter_the_end_that_its_stopping_state_names(
    state: ExperimentState,
) -> None:
    assert experiment_end(state) in EXPERIMENT_TRANSITIONS[state]
    assert experiment_end(state).is_terminal


@pytest.mark.parametrize("state", [state for state in T if state.is_stopping])
def test_a_trial_may_enter_the_end_that_its_stopping_state_names(state: TrialState) -> None:
    assert trial_end(state) in TRIAL_TRANSITIONS[state]
    assert search_exit(trial_end(state)) in SearchExit


@pytest.mark.parametrize(
    ("end", "trials", "expected"),
    [
        (SearchEnd.COMPLETED, {T.COMPLETED, T.ERROR}, E.STOPPING_COMPLETED),
        (SearchEnd.FAILED, {T.ERROR}, E.STOPPING_ERROR),
        (SearchEnd.CANCELED, {T.CANCELED}, E.STOPPING_CANCELED),
        (SearchEnd.REOPENED, {T.COMPLETED}, E.STOPPING_COMPLETED),
        (SearchEnd.REOPENED, set(), E.STOPPING_ERROR),
        (SearchEnd.REOPENED, {T.COMPLETED, T.ERROR, T.CANCELED}, E.STOPPING_COMPLETED),
        (SearchEnd.REOPENED, {T.ERROR}, E.STOPPING_ERROR),
        (SearchEnd.REOPENED, {T.CANCELED}, E.STOPPING_CANCELED),
        (SearchEnd.REOPENED, {T.ERROR, T.CANCELED}, E.STOPPING_COMPLETED),
    ],
)
def test_the_way_a_search_ended_decides_where_the_experiment_goes(
    end: SearchEnd, trials: set[TrialState], expected: ExperimentState
) -> None:
    assert stopping_state(end, trials) is expected


@pytest.fixture
def facts() -> Callable[..., AttemptFacts]:
    """Return a function that makes facts: an active trial whose code exited with 0."""

    def make(**changed: Any) -> AttemptFacts:
        usual: dict[str, Any] = {
            "trial_state": T.ACTIVE,
            "restarts": 0,
            "max_restarts": 5,
            "reason": ExitReason.EXITED,
            "is_success": True,
            "was_asked_to_stop": False,
            "acknowledged": False,
            "early_exit": None,
            "outcome": None,
            "num_runners_lost": 0,
            "num_shortages": 0,
            "num_not_formed": 0,
            "is_repeated": False,
            "text": "exit code 1: ValueError: too large",
        }
        given = usual | changed
        kind = end_kind(given["reason"], given["is_success"])
        return AttemptFacts(**{"kind": kind, "retries": 0} | given)

    return make


PREEMPTED = {"was_asked_to_stop": True, "acknowledged": True}
FAILED = {"is_success": False}
CANNOT_START = {"reason": ExitReason.START_FAILED, "kind": ErrorKind.TRANSIENT}
STOPPED = {"trial_state": T.STOPPING_COMPLETED, **PREEMPTED}
GOES_ON = (T.ACTIVE, None)


@pytest.mark.parametrize(
    ("given", "state", "told"),
    [
        pytest.param({}, T.COMPLETED, SearchExit.COMPLETED, id="exit 0"),
        pytest.param({"outcome": "completed"}, T.COMPLETED, SearchExit.COMPLETED, id="finished"),
        # In a stopping state, that state decides.
        pytest.param(STOPPED, T.COMPLETED, SearchExit.COMPLETED, id="stopped by the search"),
        pytest.param(
            STOPPED | FAILED, T.COMPLETED, SearchExit.COMPLETED, id="stopped by the search, fails"
        ),
        pytest.param(
            {"trial_state": T.STOPPING_CANCELED, **PREEMPTED},
            T.CANCELED, SearchExit.CANCELED, id="canceled",
        ),
        pytest.param(
            {"trial_state": T.STOPPING_KILLED, "reason": ExitReason.KILLED, **FAILED},
            T.CANCELED, SearchExit.CANCELED, id="killed",
        ),
        pytest.param(
            {"trial_state": T.STOPPING_ERROR}, T.ERROR, SearchExit.ERROR, id="stopping on error"
        ),
        pytest.param(
            {"trial_state": T.STOPPING_CANCELED, "reason": ExitReason.RUNNER_LOST, **FAILED},
            T.CANCELED, SearchExit.CANCELED, id="runner lost while canceled",
        ),
        pytest.param(
            STOPPED | FAILED | {"reason": ExitReason.PREEMPTION_TIMEOUT},
            T.COMPLETED, SearchExit.COMPLETED, id="stopped by the search, had to be killed",
        ),
        # An error of the user's code is tried again, max_restarts times.
        pytest.param(FAILED, *GOES_ON, id="first failure"),
        pytest.param(FAILED | {"restarts": 4}, *GOES_ON, id="last restart"),
        pytest.param(
            FAILED | {"restarts": 5}, T.ERROR, SearchExit.ERROR, id="restarts used up"
        ),
        pytest.param(
            FAILED | {"max_restarts": 0}, T.ERROR, SearchExit.ERROR, id="no restarts wanted"
        ),
        pytest.param(
            FAILED | {"restarts": 1, "is_repeated": True},
            T.ERROR, SearchExit.ERROR, id="the same failure again",
        ),
        pytest.param(FAILED | PREEMPTED, *GOES_ON, id="failed after it acknowledged"),
        pytest.param(
            FAILED | PREEMPTED | {"max_restarts": 0},
            T.ERROR, SearchExit.ERROR, id="failed after it acknowledged, no restarts wanted",
        ),
        # What no code of the user's is to blame for is not counted.
        pytest.param(
            FAILED | {"reason": ExitReason.START_FAILED},
            T.ERROR, SearchExit.ERROR, id="cannot start",
        ),
        pytest.param(
            FAILED | CANNOT_START | {"num_shortages": MAX_SHORTAGES}, *GOES_ON,
            id="cannot start for now",
        ),
        pytest.param(
            FAILED | CANNOT_START | {"num_shortages": MAX_SHORTAGES + 1},
            T.ERROR, SearchExit.ERROR, id="cannot start for too long",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.SHORTAGE, "num_shortages": 1, "max_restarts": 0},
            *GOES_ON, id="shortage",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.SHORTAGE, "num_shortages": MAX_SHORTAGES},
            *GOES_ON, id="shortage often",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.SHORTAGE, "num_shortages": MAX_SHORTAGES + 1},
            T.ERROR, SearchExit.ERROR, id="shortage for too long",
        ),
        pytest.param(
            {"trial_state": T.STOPPING_CANCELED, "reason": ExitReason.SHORTAGE, **FAILED},
            T.CANCELED, SearchExit.CANCELED, id="shortage while canceled",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.RUNNER_LOST, "num_runners_lost": 1, "max_restarts": 0},
            *GOES_ON, id="runner lost",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.RUNNER_LOST, "num_runners_lost": MAX_RUNNERS_LOST},
            *GOES_ON, id="runner lost often",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.RUNNER_LOST, "num_runners_lost": MAX_RUNNERS_LOST + 1},
            T.ERROR, SearchExit.ERROR, id="runner lost too often",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.PREEMPTION_TIMEOUT, "max_restarts": 0},
            *GOES_ON, id="preemption timeout",
        ),
        pytest.param(
            FAILED | {"reason": ExitReason.KILLED, "was_asked_to_stop": True, "max_restarts": 0},
            *GOES_ON, id="killed while the master shuts down",
        ),
        pytest.param(
            {"reason": ExitReason.KILLED, "was_asked_to_stop": True},
            *GOES_ON, id="killed while the master shuts down, exit 0",
        ),
        # Preemption.
        pytest.param(PREEMPTED, *GOES_ON, id="preempted"),
        pytest.param(PREEMPTED | {"outcome": "preempted"}, *GOES_ON, id="preempted and said so"),
        pytest.param(
            {"acknowledged": True, "outcome": "preempted"}, *GOES_ON, id="preempted by a signal"
        ),
        pytest.param(
            {"acknowledged": True}, T.COMPLETED, SearchExit.COMPLETED,
            id="acknowledged what nobody asked for",
        ),
        pytest.param(
            {"was_asked_to_stop": True}, T.COMPLETED, SearchExit.COMPLETED,
            id="exit 0 without acknowledging",
        ),
        # Early exits that the code asks for.
        pytest.param(
            {"early_exit": "invalid_hp"}, T.COMPLETED, SearchExit.INVALID_HP, id="invalid hp"
        ),
        pytest.param(
            FAILED | {"early_exit": "invalid_hp"},
            T.COMPLETED, SearchExit.INVALID_HP, id="invalid hp, exit 1",
        ),
        pytest.param(
            FAILED | {"early_exit": "invalid_hp", "reason": ExitReason.RUNNER_LOST},
            *GOES_ON, id="invalid hp, runner lost",
        ),
        pytest.param(
            PREEMPTED | {"early_exit": "user_requested_stop"},
            T.COMPLETED, SearchExit.COMPLETED, id="early exit while preempted",
        ),
        pytest.param(
            {"early_exit": "user_requested_stop"},
            T.COMPLETED, SearchExit.COMPLETED, id="early exit",
        ),
    ],
)  # fmt: skip
def test_the_end_of_an_attempt_is_judged_by_the_table(
    facts: Callable[..., AttemptFacts],
    given: dict[str, Any],
    state: TrialState,
    told: SearchExit | None,
) -> None:
    result = judge_exit(facts(**given))
    assert (result.state, result.search_exit) == (state, told)


@pytest.mark.parametrize(
    ("given", "restarts"),
    [
        (FAILED, 1),
        (FAILED | {"restarts": 2}, 3),
        (FAILED | PREEMPTED, 1),
        (FAILED | {"reason": ExitReason.RUNNER_LOST}, 0),
        (FAILED | {"reason": ExitReason.SHORTAGE}, 0),
        (FAILED | {"reason": ExitReason.PREEMPTION_TIMEOUT}, 0),
        (FAILED | {"reason": ExitReason.KILLED}, 0),
        (PREEMPTED, 0),
        ({}, 0),
        ({"early_exit": "invalid_hp"}, 0),
        (STOPPED | FAILED, 0),
    ],
)
def test_only_failures_of_the_code_count_as_restarts(
    facts: Callable[..., AttemptFacts], given: dict[str, Any], restarts: int
) -> None:
    assert judge_exit(facts(**given)).restarts == restarts


@pytest.mark.parametrize(
    ("given", "retries"),
    [
        (FAILED | {"reason": ExitReason.RUNNER_LOST, "num_runners_lost": 1}, 4),
        (FAILED | {"reason": ExitReason.SHORTAGE, "num_shortages": 1}, 4),
        (FAILED | CANNOT_START | {"num_shortages": 1}, 4),
        (FAILED | CANNOT_START | {"num_shortages": MAX_SHORTAGES + 1}, None),
        (FAILED | {"reason": ExitReason.START_FAILED}, None),
        (FAILED | {"reason": ExitReason.PREEMPTION_TIMEOUT}, None),
        (FAILED, None),
        (PREEMPTED, None),
    ],
)
def test_only_transient_errors_count_as_retries(
    facts: Callable[..., AttemptFacts], given: dict[str, Any], retries: int | None
) -> None:
    assert judge_exit(facts(retries=3, **given)).retries == retries


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (FAILED | {"restarts": 5}, r"too large\) and max_restarts is 5"),
        (
            FAILED | {"restarts": 1, "is_repeated": True},
            r"too large\) the same way as the one before, .* \(1 of 5 used\)",
        ),
        (FAILED | {"reason": ExitReason.START_FAILED}, "could not start: .*too large"),
        (
            FAILED | {"reason": ExitReason.RUNNER_LOST, "num_runners_lost": 6},
            "The attempt was lost 6 times in a row: .*too large",
        ),
        (
            FAILED | {"reason": ExitReason.NOT_FORMED, "num_not_formed": 6},
            "did not come together 6 times in a row: .*too large.*Hint: ",
        ),
        (
            FAILED | {"reason": ExitReason.SHORTAGE, "num_shortages": MAX_SHORTAGES + 1},
            f"could not start {MAX_SHORTAGES + 1} times in a row: .*too large.*Hint: ",
        ),
        (STOPPED | FAILED, "too large"),
    ],
)
def test_an_error_says_what_happened(
    facts: Callable[..., AttemptFacts], given: dict[str, Any], pattern: str
) -> None:
    result = judge_exit(facts(**given))
    assert result.error is not None
    assert re.search(pattern, result.error)
    assert result.note is not None
    assert result.error in result.note
