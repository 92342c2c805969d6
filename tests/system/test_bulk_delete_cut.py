"""A bulk delete that is cut by SIGKILL: each experiment is there as a whole, or not at all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.client import ApiError, MasterUnreachableError

NUM = 5
SCRIPT = """
import paceline as det

with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 1.0})
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "state").write_text("x" * 1000)
"""
CONFIG = {
    "name": "cut",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
}
DELETE = ("e", "delete", "--query", "name:cut", "--yes")


@pytest.fixture
def ended(make_master: Callable[..., Any], write_context: Callable[..., Path]) -> Any:
    """Return a running master with ended experiments that have a checkpoint each."""
    master = make_master(2).start()
    context = write_context(SCRIPT)
    made = [master.client().create_experiment(CONFIG, context) for _ in range(NUM)]
    assert {one.wait().value for one in made} == {"COMPLETED"}
    assert len(stored(master)) == NUM
    return master


def begin(master: Any) -> "subprocess.Popen[bytes]":
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *DELETE], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**clean, "PACELINE_HOME": str(master.home)},
    )  # fmt: skip


def stored(master: Any) -> set[str]:
    """Return the checkpoints that have files."""
    return {path.parent.name for path in (master.home / "checkpoints").glob("*/manifest.json")}


def check_whole(master: Any) -> int:
    """Check what is left, and return how many experiments that is."""
    experiments = master.client().list_experiments()
    uuids = set()
    for one in experiments:
        [trial] = one.trials()
        assert trial.reload().data.summary["validation"]["loss"].count == 1
        [checkpoint] = one.checkpoints()
        uuids.add(checkpoint.uuid)
    assert stored(master) == uuids
    return len(experiments)


def finish(master: Any) -> None:
    assert begin(master).wait(120) == 0
    assert check_whole(master) == 0
    assert list((master.home / "checkpoints").glob("*/state")) == []


@pytest.mark.long
def test_a_master_that_is_killed_between_rows_and_files_removes_these_at_its_next_start(
    ended: Any, wait_until: Callable[..., None]
) -> None:
    ended.kill()
    ended.start(fault="master.deletion.committed:2")
    command = begin(ended)
    ended.wait(120)
    # Rows of two are gone, and files of one.
    assert len(stored(ended)) == NUM - 1
    ended.start()
    command.wait(120)
    wait_until(lambda: len(stored(ended)) <= NUM - 2)
    assert check_whole(ended) <= NUM - 2
    finish(ended)


@pytest.mark.long
def test_a_client_that_is_killed_leaves_whole_experiments(ended: Any) -> None:
    command = begin(ended)
    while len(stored(ended)) == NUM and command.poll() is None:
        time.sleep(0.001)
    command.send_signal(signal.SIGKILL)
    command.wait()
    # What the master was told before goes on to its end.
    deadline = time.monotonic() + 60
    while True:
        with suppress(AssertionError, ApiError, MasterUnreachableError):
            check_whole(ended)
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    finish(ended)
