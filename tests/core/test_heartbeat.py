"""Runs on other machines: signs of life tell whether they go on."""

import gc
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from paceline import core
from paceline._base.run_directory import HEARTBEAT_LIMIT_S
from paceline.core import _heartbeats_and_live_reports
from paceline.core._heartbeats_and_live_reports import sending_heartbeats
from paceline.journal import RunDirectory


@pytest.fixture(autouse=True)
def own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of another test, which may wait for longer."""
    monkeypatch.setattr(
        _heartbeats_and_live_reports, "_heartbeats", _heartbeats_and_live_reports._Heartbeats()
    )


def state_of(path: Path) -> core.RunState:
    [summary] = core.list_runs(path.parent)
    return summary.state


def beating() -> set[threading.Thread]:
    """Return the threads that give signs of life."""
    return {each for each in threading.enumerate() if each.name == "paceline-run-heartbeats"}


def move_to(host: str, path: Path, *, age_s: float) -> None:
    """Have the last sign of life come from another machine."""
    (path / "heartbeat").write_text(host)
    os.utime(path / "heartbeat", (time.time() - age_s,) * 2)


def test_signs_of_life_of_another_machine_decide(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This machine gives one at the beginning only.
    monkeypatch.setattr("paceline.core._heartbeats_and_live_reports._INTERVAL_S", 3600.0)
    monkeypatch.setattr("paceline.core._heartbeats_and_live_reports._FIRST_S", 0.1)
    with core.init(name="far") as context:
        path = context.run_dir
        while not (path / "heartbeat").exists():
            time.sleep(0.01)
        assert (path / "heartbeat").read_text() == os.uname().nodename
        context.train.report_training_metrics(1, {"loss": 1.0})
        # The lock of a machine that failed may stay.
        move_to("other", path, age_s=HEARTBEAT_LIMIT_S + 1)
        assert state_of(path) is core.RunState.CRASHED
        move_to("other", path, age_s=1)
        assert state_of(path) is core.RunState.RUNNING
        context.preempt.settle()
    # The end of the run takes it away.
    assert not (path / "heartbeat").exists()
    assert state_of(path) is core.RunState.PREEMPTED
    # A lock of another machine may not be seen.
    move_to("other", path, age_s=1)
    assert state_of(path) is core.RunState.RUNNING
    with caplog.at_level(logging.WARNING), core.init(resume=path):
        assert "was at work on another machine less than 60 s ago" in caplog.text
        assert state_of(path) is core.RunState.RUNNING
    assert state_of(path) is core.RunState.COMPLETED


def test_a_run_goes_on_beating_and_ends_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.core._heartbeats_and_live_reports._INTERVAL_S", 0.01)
    run = RunDirectory(tmp_path)
    file = tmp_path / "heartbeat"
    before = beating()
    owner = sending_heartbeats(run)
    owner.__enter__()
    while not file.exists():
        time.sleep(0.01)
    for _ in range(2):
        os.utime(file, (1, 1))
        while file.stat().st_mtime == 1:
            time.sleep(0.01)
    # Another machine that went on with the run by mistake does not stop it.
    file.write_text("other")
    while file.read_text() != os.uname().nodename:
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:  # a child that unwinds its parent's stack
        owner.__exit__(None, None, None)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert file.exists()
    # The next run has the same thread, which ends when it finds none.
    (thread,) = beating() - before
    with sending_heartbeats(RunDirectory(tmp_path)):
        assert beating() - before == {thread}
    # A context that nobody closes.
    del owner
    gc.collect()
    assert not file.exists()
    thread.join(60)
    assert not thread.is_alive()
