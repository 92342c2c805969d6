"""Whether workers are started again."""

import signal

import pytest

from paceline._base.exceptions import CollectiveMismatchError
from paceline._training.workers.worker_failures import (
    RemoteTraceback,
    RestartPolicy,
    WorkerFailedError,
    WorkersLostError,
    restart_cause,
)

KILLED = WorkerFailedError("Rank 1 was ended by SIGKILL.", 1, signal=signal.SIGKILL)
LEFT = WorkerFailedError("Rank 0 exited with code 3.", 0, exit_code=3)


def raised(error: Exception) -> Exception:
    """Return an exception as a worker's function has raised it."""
    error.__cause__ = RemoteTraceback("Traceback ...")
    return error


def decide(
    policy: RestartPolicy, error: Exception, *received: int, num_commits: int = 0
) -> tuple[bool, str]:
    return tuple(policy.decide(error, num_commits, received))


def test_lost_workers_are_started_again_so_often() -> None:
    policy = RestartPolicy(2)
    assert decide(policy, KILLED) == (True, "restart 1 of 2")
    assert decide(policy, KILLED) == (True, "restart 2 of 2")
    assert decide(policy, KILLED) == (False, "No restart is left of 2.")
    assert policy.num_losses == 3


def test_restarts_without_progress_are_told() -> None:
    policy = RestartPolicy(float("inf"))
    texts = [decide(policy, KILLED, num_commits=commits)[1] for commits in (0, 1, 1, 1, 1, 2)]
    assert texts == [
        *("restart 1 of inf", "restart 2 of inf", "restart 3 of inf"),
        "restart 4 of inf, no progress in the last 3 starts",
        "restart 5 of inf, no progress in the last 4 starts",
        "restart 6 of inf",
    ]


def test_nothing_is_started_again_unasked() -> None:
    assert decide(RestartPolicy(0), KILLED) == (False, "")


def test_the_same_failure_twice_is_the_programs_own() -> None:
    policy = RestartPolicy(9)
    assert decide(policy, LEFT)[0]
    assert decide(policy, KILLED)[0]
    assert decide(policy, LEFT)[0]
    assert decide(policy, LEFT, num_commits=1)[0]
    is_restart, text = decide(policy, LEFT, num_commits=1)
    assert not is_restart
    assert "failed the same way twice with no checkpoint in between" in text


def test_exceptions_are_retried_only_if_asked() -> None:
    error = raised(ValueError("boom"))
    assert decide(RestartPolicy(9), error) == (False, "")
    policy = RestartPolicy(9, retries_errors=True)
    assert decide(policy, error)[0]
    assert decide(policy, raised(ValueError("bang")))[0]
    assert decide(policy, error)[0]
    assert not decide(policy, raised(ValueError("boom")))[0]


@pytest.mark.parametrize("code", [0, 1])
def test_an_exception_of_the_user_with_an_exit_code_is_no_worker_that_left(code: int) -> None:
    class CommandError(Exception):
        exit_code = code

    error = raised(CommandError("boom"))
    assert decide(RestartPolicy(9), error) == (False, "")
    assert decide(RestartPolicy(9, retries_errors=True), error)[0]
    with pytest.raises(CommandError, match="boom"):
        RestartPolicy(9).check(error, 0)


def test_an_exception_without_a_text_is_decided_on() -> None:
    class TextlessError(Exception):
        def __str__(self) -> str:
            raise LookupError("no text")

    policy = RestartPolicy(9, retries_errors=True)
    policy.check(raised(TextlessError()), 0)
    assert not decide(policy, raised(TextlessError()))[0]


def test_what_was_asked_to_end_is_not_started_again() -> None:
    assert decide(RestartPolicy(9), KILLED, signal.SIGTERM) == (
        False,
        "No restart follows, as this process received SIGTERM.",
    )


def test_a_failure_that_is_not_followed_by_a_restart_is_raised() -> None:
    policy = RestartPolicy(1, hint="Hint: look.")
    policy.check(KILLED, 0)
    with pytest.raises(WorkersLostError, match=r"`max_retries` \(1\).*were 2.*SIGKILL. Hint: look"):
        policy.check(KILLED, 0)
    with pytest.raises(ValueError, match="boom"):
        policy.check(raised(ValueError("boom")), 0)


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ("Rank 1 was ended by SIGKILL; its output is above.", "Rank 1 was ended by SIGKILL."),
        (500 * "x", 500 * "x"),
        (501 * "x", 497 * "x" + "..."),
    ],
)
def test_a_cause_that_is_cut_for_the_record_shows_it(text: str, recorded: str) -> None:
    assert restart_cause(CollectiveMismatchError(text)) == recorded
