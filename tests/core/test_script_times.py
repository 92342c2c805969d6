"""What the time of a loop of one's own went to."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline._base.journal_records import TimeShares

STEP_S = 0.02


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write run directories to a temporary directory."""
    monkeypatch.chdir(tmp_path)


def shares_of(context: core.Context) -> TimeShares:
    return core.time_shares_of_run(context.run_dir)


def train(context: core.Context, first: int, last: int) -> None:
    for step in range(first, last):
        time.sleep(STEP_S)
        context.train.report_training_metrics(step + 1, {"loss": 1.0})


def store(context: core.Context, steps: int) -> None:
    with context.checkpoint.store_path({"steps_completed": steps}) as (path, _):
        (path / "state").write_text("state")
        time.sleep(STEP_S)


def fail() -> None:
    with core.init(name="lossy") as context:
        train(context, 0, 3)
        store(context, 3)
        train(context, 3, 6)
        raise RuntimeError("ended")


def test_a_loop_of_ones_own_is_divided() -> None:
    with core.init() as context:
        time.sleep(STEP_S)
        train(context, 0, 5)
        with context.train.time_spent_on("validation"):
            time.sleep(STEP_S)
        store(context, 5)
    shares = shares_of(context)
    # The first report begins it.
    assert shares.start_s >= 2 * STEP_S
    assert shares.training_s >= 4 * STEP_S
    assert shares.validation_s >= STEP_S
    assert shares.checkpoint_s >= STEP_S
    assert shares.lost_s == shares.undivided_s == 0
    assert shares.goodput is not None


def test_what_follows_the_last_checkpoint_of_a_failed_attempt_is_lost() -> None:
    with pytest.raises(RuntimeError, match="ended"):
        fail()
    with core.init(name="lossy", resume="auto") as context:
        assert context.latest_checkpoint is not None
        train(context, 3, 6)
    shares = shares_of(context)
    assert shares.lost_s >= 3 * STEP_S
    assert shares.training_s >= 4 * STEP_S


HANGING = """
import os, signal, sys, time
from paceline import core
from paceline.core import _heartbeats_and_live_reports
from paceline.core import _process_environment

_heartbeats_and_live_reports._INTERVAL_S = 0.1
with core.init(name="hanging", resume="auto") as context:
    context.train.report_training_metrics(1, {"loss": 1.0})
    if len(sys.argv) > 1:
        time.sleep(float(sys.argv[1]))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_time_from_the_last_record_of_a_killed_process_to_its_end_is_lost(
    run_python: Any, tmp_path: Path
) -> None:
    assert run_python(HANGING, "3").returncode == -signal.SIGKILL
    [run] = (tmp_path / "paceline_runs").iterdir()
    killed = core.time_shares_of_run(run)
    assert killed.lost_s >= 1.0
    shutil.copytree(run, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "run.json", (time.time() + 100,) * 2)
    assert core.time_shares_of_run(tmp_path / "copy").lost_s < 1.0
    assert run_python(HANGING).returncode == 0
    resumed = core.time_shares_of_run(run)
    assert resumed.lost_s == pytest.approx(killed.lost_s)
    assert resumed.waiting_s > 0
    # The time of the end is text by now.
    shutil.copytree(run, tmp_path / "later", copy_function=shutil.copyfile)
    assert core.time_shares_of_run(tmp_path / "later").lost_s == resumed.lost_s


def test_it_is_lost_although_workers_before_it_have_ended_in_order(
    run_python: Any, tmp_path: Path
) -> None:
    """Those of the first generation have recorded their end, those of the second were killed."""
    assert run_python(HANGING).returncode == 0
    [ended] = (tmp_path / "paceline_runs").iterdir()
    ended.rename(tmp_path / "ended")
    assert run_python(HANGING, "3").returncode == -signal.SIGKILL
    [run] = (tmp_path / "paceline_runs").iterdir()
    (run / "journal" / "a0.g0.r0").rename(run / "journal" / "a0.g1.r0")
    shutil.copytree(tmp_path / "ended" / "journal", run / "journal", dirs_exist_ok=True)
    assert core.time_shares_of_run(run).lost_s >= 1.0


def test_a_checkpoint_of_another_thread_does_not_stop_training() -> None:
    with core.init() as context:
        train(context, 0, 1)
        thread = threading.Thread(target=store, args=(context, 1))
        thread.start()
        train(context, 1, 3)
        thread.join()
    shares = shares_of(context)
    assert shares.checkpoint_s == 0
    assert shares.training_s >= 2 * STEP_S


def test_a_trainer_that_records_its_times_is_not_counted_twice() -> None:
    with core.init() as context:
        context.train.note_time_spent("start", 0, {"validation": 0.0})
        train(context, 0, 2)
        with context.train.time_spent_on("validation"):
            time.sleep(STEP_S)
        context.train.note_time_spent("end", 2, {"validation": 0.0})
    shares = shares_of(context)
    assert shares.validation_s == 0
    assert shares.training_s >= 3 * STEP_S


def test_a_script_that_reports_nothing_is_not_divided() -> None:
    with core.init() as context:
        time.sleep(STEP_S)
    shares = shares_of(context)
    assert shares.undivided_s >= STEP_S
    assert shares.goodput is None


def test_only_what_can_be_told_apart_is_taken() -> None:
    with core.init() as context, pytest.raises(ValueError, match="must be 'validation'.*'naps'"):
        context.train.time_spent_on("naps")
