"""Whether workers are started again."""

import signal

import pytest

from paceline.workers import Restarts, WorkerExit, describe_failure, offered_restarts

KILLED = WorkerExit(rank=1, code=137, signal=signal.SIGKILL)
RAISED = WorkerExit(rank=0, code=1, error="ValueError: boom")


def judge(
    restarts: Restarts, failure: WorkerExit, *received: int, has_progressed: bool = False
) -> tuple[bool, str]:
    verdict = restarts.judge(failure, received, has_progressed=has_progressed)
    return verdict.is_restart, verdict.text


def test_lost_workers_are_started_again_so_often() -> None:
    restarts = Restarts(2)
    assert judge(restarts, KILLED) == (True, "restart 1 of 2")
    assert judge(restarts, KILLED) == (True, "restart 2 of 2")
    assert judge(restarts, KILLED) == (False, "and no restart is left of 2")


def test_nothing_is_started_again_unasked() -> None:
    assert judge(Restarts(0), KILLED) == (False, "")


def test_the_same_error_twice_is_the_programs_own() -> None:
    restarts = Restarts(9)
    assert judge(restarts, RAISED)[0]
    assert judge(restarts, KILLED)[0]
    assert judge(restarts, RAISED)[0]
    assert judge(restarts, RAISED, has_progressed=True)[0]
    is_restart, text = judge(restarts, RAISED)
    assert not is_restart
    assert "as the time before: the program itself fails" in text
    other = WorkerExit(rank=0, code=1, error="ValueError: bang")
    assert judge(Restarts(9), RAISED)[0]
    assert judge(restarts, other)[0]


def test_what_was_asked_to_end_is_not_started_again() -> None:
    assert judge(Restarts(9), KILLED, signal.SIGTERM) == (
        False,
        "after the launcher had received SIGTERM",
    )


def test_a_failure_is_told_with_its_rank() -> None:
    assert describe_failure(KILLED, 2) == "Rank 1 was ended by SIGKILL, the first of 2 to fail"
    assert describe_failure(RAISED, 1) == "Rank 0 exited with code 1 (ValueError: boom)"


def test_under_a_master_its_own_restarts_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    assert offered_restarts(3) == 3
    monkeypatch.setenv("PACELINE_RUN_DIR", "/somewhere")
    assert offered_restarts(3) == offered_restarts(0) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
