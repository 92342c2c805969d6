"""Specs, exits and who failed first."""

from pathlib import Path
from typing import Any

import pytest

from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.worker_process import WorkerSpec
from paceline._training.workers.worker_failures import WorkerExit, signal_name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": []}, "`command` must be a non-empty list"),
        ({"command": "python train.py"}, "`command` must be a non-empty list"),
        ({"rank": 1}, "`rank` must be at least 0 and below `world_size`"),
        ({"rank": -1}, "`rank` must be at least 0 and below `world_size`"),
    ],
)
def test_a_wrong_spec_is_refused(change: dict[str, Any], message: str) -> None:
    settings = {"command": ["true"], "environment": {}, "working_directory": Path()}
    with pytest.raises(ValueError, match=message):
        WorkerSpec(**(settings | change))


def test_a_group_needs_workers() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        LocalGroup([])


@pytest.mark.parametrize(
    ("exit_", "text"),
    [
        (WorkerExit(rank=2, code=3), "rank 2 exited with code 3"),
        (
            WorkerExit(rank=2, code=1, finished=True, error="ValueError: x"),
            "rank 2 exited with code 1 (ValueError: x)",
        ),
        (WorkerExit(rank=2, code=137, signal=9), "rank 2 was ended by SIGKILL"),
        (WorkerExit(rank=2, code=3, signal=6, finished=True), "rank 2 exited with code 3"),
    ],
)
def test_an_exit_is_described_in_one_phrase(exit_: WorkerExit, text: str) -> None:
    assert exit_.describe() == text


def test_signals_without_a_name_are_named_by_number() -> None:
    assert signal_name(15) == "SIGTERM"
    assert signal_name(40) == "signal 40"
