"""The runs that processes have begun, and how the next ones go on with them."""

import os
import time
from pathlib import Path

import pytest

from paceline import core


def run_once(name: str, *, num_checkpoints: int = 0, resume: str | None = None) -> Path:
    with core.init(name=name, resume=resume) as context:
        for step in range(num_checkpoints):
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "a").write_text("1")
        return context.run_dir


def test_a_single_run_is_told_by_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    run_once("other")
    # Clocks of files and processes may differ a little.
    now = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: now)
    since = time.time() + 5
    now += 10
    path = run_once("mine", num_checkpoints=2)
    os.utime(path / "journal", (now, now))
    begun = core.BegunRuns(since, {os.getpid()})
    assert begun.paths() == [path]
    assert begun.num_checkpoints() == 2
    assert begun.are_completed()
    assert begun.variables() == {"PACELINE_RESUME": str(path)}
    assert core.BegunRuns(since, {1}).paths() == []
    assert core.BegunRuns(since, None).paths() == [path]
    assert core.BegunRuns(now + 10, None).paths() == []


def test_several_runs_are_found_by_their_names() -> None:
    begun = core.BegunRuns(time.time(), {os.getpid()})
    assert begun.variables() == {}
    assert not begun.are_completed()
    run_once("first")
    run_once("second")
    assert len(begun.paths()) == 2
    assert begun.variables() == {"PACELINE_RESUME": "auto"}


def test_of_a_run_that_is_gone_on_with_the_last_attempt_counts() -> None:
    path = run_once("mine", num_checkpoints=2)
    begun = core.BegunRuns(time.time(), {os.getpid()})
    run_once("mine", num_checkpoints=1, resume=str(path))
    assert begun.paths() == [path]
    assert begun.num_checkpoints() == 1
