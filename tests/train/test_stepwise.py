"""Runs that wait at each report: stopped, gone on with, and with ranks that report unequally."""

import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as the workers stay."""


def count(config: dict[str, Any]) -> int:
    """Report each step once or, on other ranks than the chief, as often as they are to."""
    state = train.load_checkpoint() or {"step": 0}
    rank = train.world_rank()
    for step in range(state["step"], config["steps"]):
        if config["saves_first"]:
            train.save_checkpoint(step=step + 1)
        for _ in range(1 if rank == 0 else config.get("others", 1)):
            train.report(step=step, size=train.world_size())
        if not config["saves_first"]:
            train.save_checkpoint(step=step + 1)
        if rank == 0:
            Path(config["notes"], str(step)).touch()
    return config["steps"]


@pytest.mark.parametrize("saves_first", [True, False])
def test_a_stopped_run_has_trained_no_further_and_keeps_its_workers(
    two_workers: train.Trainer, tmp_path: Path, saves_first: bool
) -> None:
    pids = two_workers.execute(os.getpid)
    config = {"steps": 5, "saves_first": saves_first, "notes": str(tmp_path)}
    run = two_workers.run_stepwise(count, config, run_dir=tmp_path / "first")
    reports = [report["step"] for _, report in zip(range(3), run, strict=False)]
    latest = run.latest_checkpoint
    assert latest is not None
    # What was saved before the report exists by then.
    assert latest.load() == {"step": 3 if saves_first else 2}
    run.stop()
    assert reports == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "first"]
    assert two_workers.execute(os.getpid) == pids

    # No report is missed or told twice, whatever the order of the two calls.
    run = two_workers.run_stepwise(count, config, checkpoint=latest, known=run.recent)
    assert [report["step"] for report in run] == [3, 4]
    assert run.get_results() == [5, 5]


@pytest.mark.parametrize("others", [0, 3])
def test_ranks_may_report_unequally_often(
    two_workers: train.Trainer, tmp_path: Path, others: int
) -> None:
    config = {"steps": 2, "saves_first": True, "others": others, "notes": str(tmp_path)}
    run = two_workers.run_stepwise(count, config, run_dir=tmp_path / "run")
    assert [report["step"] for report in run] == [0, 1]
    assert run.get_results() == [2, 2]


def test_a_trainer_without_workers_cannot_wait() -> None:
    with pytest.raises(ValueError, match="num_workers=1"):
        train.Trainer(num_workers=0).run_stepwise(count)


def test_a_trainer_is_replaced_with_other_arguments(two_workers: train.Trainer) -> None:
    import pickle

    copy = pickle.loads(pickle.dumps(two_workers.replace(num_workers=3, cpus_per_worker=None)))
    assert copy.num_workers == 3
    assert two_workers.num_workers == 2
    with pytest.raises(RuntimeError, match="must not be running"):
        two_workers.to_trainable(count)
    with pytest.raises(ValueError, match="at least 1"):
        train.Trainer(num_workers=0).to_trainable(count)
