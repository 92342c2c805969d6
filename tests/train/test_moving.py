"""Workers on a node that will be taken away: they store a checkpoint, and others go on.

The workers are on this machine; the notice, which a Ray cluster gives, is given by hand.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline import train
from paceline._training.workers.process_pools import LocalPool
from paceline.core import RunState, list_runs

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Notice(train.TrainingCallback):
    """Gives notice to the worker of a rank at a report."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.leaving: list[int] = []
        self.is_given = False
        self.generations: dict[tuple[int, int], list[int]] = {}

    def handle_result(self, report: train.Report) -> None:
        key = report.rank, report["step"]
        self.generations.setdefault(key, []).append(report.generation)
        if report["step"] == 3 and not self.is_given:
            self.is_given = True
            self.leaving = [self._rank]

    def handle_restart(self, error: Exception, generation: int) -> None:
        raise AssertionError("A move is no loss.") from error


@pytest.fixture
def notice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Notice:
    """Have the first workers of a trainer leave by notice, as those of a Ray cluster can."""
    notice = Notice(request.param)
    started: list[int] = []
    start = LocalPool.start

    def note_start(pool: LocalPool, *args: Any) -> None:
        # Others are on other nodes.
        notice.leaving = []
        started.append(len(started))
        start(pool, *args)

    monkeypatch.setattr(LocalPool, "needs_reservation", True)
    monkeypatch.setattr(LocalPool, "leaving_ranks", lambda _: notice.leaving)
    monkeypatch.setattr(LocalPool, "start", note_start)
    return notice


def fit() -> tuple[int, int]:
    """Go on until the workers are others, for some steps more."""
    begun_at = (train.load_checkpoint() or {"step": 0})["step"]
    deadline = time.monotonic() + 120
    step = begun_at
    while not begun_at or step < begun_at + 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        step += 1
        train.report(step=step)
        if train.should_preempt():
            train.save_checkpoint(step=step)
            break
    return begun_at, os.getpid()


@pytest.mark.long
@pytest.mark.parametrize("notice", [0, 2], indirect=True)
def test_a_fixed_group_moves_with_a_checkpoint(notice: Notice, tmp_path: Path) -> None:
    with train.Trainer(3, max_retries=0, run_dir=tmp_path / "run") as trainer:
        pids = trainer.execute(os.getpid)
        results = trainer.run(fit, callbacks=[notice])
    assert notice.is_given
    assert results.num_restarts == 0
    [begun_at] = {begun_at for begun_at, _ in results}
    assert begun_at > 3
    assert not set(pids) & {pid for _, pid in results}
    steps = [report["step"] for report in results.metrics]
    assert steps == list(range(1, begun_at + 4))
    # It was told to store a checkpoint, and did nothing twice.
    assert len(results.checkpoints) == 1
    assert set(map(len, notice.generations.values())) == {1}
    (run,) = list_runs(tmp_path)
    assert run.state is RunState.COMPLETED


def test_a_notice_that_a_killed_driver_has_left_counts_for_nobody(tmp_path: Path) -> None:
    def ask() -> bool:
        return train.should_preempt()

    run_dir = tmp_path / "run"
    assert list(train.Trainer(num_workers=0, run_dir=run_dir).run(ask)) == [False]
    (run_dir / "workers_move").touch()
    assert list(train.Trainer(num_workers=0, run_dir=run_dir).run(ask)) == [False]
