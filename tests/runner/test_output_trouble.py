"""Trouble with the output of an attempt, which must not hold up what the attempt reports."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, sys, time
import paceline as det
with det.core.init() as context:
    for step in range(1, 41):
        context.train.report_training_metrics(step, {{"x": step}})
        print("line", step, flush=True)
        while step == 8 and not os.path.exists({go!r}):
            time.sleep(0.02)
"""


@pytest.fixture
def halfway(master: Any, tmp_path: Path, wait_until: Callable[..., None]) -> int:
    """Return an experiment that has reported 8 of 40 steps and waits; its master is away."""
    master.start()
    experiment_id: int = master.create(SCRIPT.format(go=str(tmp_path / "go")))
    wait_until(lambda: len(output(master, experiment_id)) == 8)
    wait_until(lambda: count(master, experiment_id) == 8)
    master.kill()
    return experiment_id


def output(master: Any, experiment_id: int) -> list[str]:
    lines: list[str] = master.output(master.trial(experiment_id))
    return lines


def count(master: Any, experiment_id: int) -> int:
    summary = master.trial(experiment_id)["summary"]
    return int(summary["training"]["x"]["count"]) if summary else 0


@pytest.mark.long
def test_a_damaged_line_of_the_log_holds_nothing_up(
    master: Any, halfway: int, tmp_path: Path
) -> None:
    path = master.home / "logs" / "trial-1" / "attempt-1.jsonl"
    data = bytearray(path.read_bytes())
    data[data.index(b'"line 3"') - 1] ^= 1
    path.write_bytes(bytes(data))
    master.start()
    (tmp_path / "go").touch()
    trial = master.wait_for_end(halfway)
    assert (trial["state"], trial["steps_completed"]) == ("COMPLETED", 40)
    assert count(master, halfway) == 40
    assert output(master, halfway) == [f"line {step}" for step in range(1, 41) if step != 3]
    assert master.read("/trials/1/logs")["num_damaged"] == 1
    for span in ({}, {"tail": 5}, {"tail": 100}):
        page = master.read(f"/experiments/{halfway}/logs", **span)
        # Five lines from the end, it is not met.
        assert page["num_damaged"] == 1, span


@pytest.mark.long
def test_output_that_the_master_cannot_store_holds_nothing_up_and_is_kept(
    master: Any, halfway: int, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    logs = master.home / "logs" / "trial-1"
    logs.rename(tmp_path / "aside")
    logs.touch()
    master.start()
    (tmp_path / "go").touch()
    trial = master.wait_for_end(halfway)
    assert (trial["state"], count(master, halfway)) == ("COMPLETED", 40)
    kept = master.home / "attempts" / "1.output.jsonl"
    told = trial["attempts"][0]["exit"]["error"]
    assert "output cannot be stored" in told
    assert str(kept) in told
    wait_until(kept.exists)
    wait_until(lambda: not (master.home / "attempts" / "1").exists())
    assert [f'"line {step}"' in kept.read_text() for step in (1, 40)] == [True, True]


@pytest.mark.long
def test_output_whose_storing_never_ends_holds_no_metrics_up(
    master: Any, halfway: int, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """A pipe that nobody reads keeps whoever opens it waiting for ever."""
    path = master.home / "logs" / "trial-1" / "attempt-1.jsonl"
    path.unlink()
    os.mkfifo(path)
    master.start()
    (tmp_path / "go").touch()
    wait_until(lambda: count(master, halfway) == 40)
