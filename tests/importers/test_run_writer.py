"""Imports that are cut off, grow, meet each other or run out of disk."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from imported_runs import Import, points, tree

from paceline._base.run_directory import RunDirectory
from paceline.core import list_runs, summarize_run
from paceline.importers._export_files import RunImport
from paceline.importers._run_writer import ImportRefusedError

NUM_RUNS, NUM_STEPS = 3, 40

# Imports, and dies at a record: as if by a power cut, nothing is cleaned up.
KILLED = """
import os, signal, sys
from pathlib import Path
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline.importers._export_files import RunImport

append, left = JournalWriter.append, int(sys.argv[3])

def count(writer, record):
    global left
    left -= 1
    if not left:
        # Half a line, as a power cut leaves it.
        if writer._file_descriptor >= 0:
            os.write(writer._file_descriptor, b"0badbeef 17 {half")
        os.kill(os.getpid(), signal.SIGKILL)
    return append(writer, record)

JournalWriter.append = count
for run in RunImport(Path(sys.argv[1]), into=Path(sys.argv[2])):
    pass
"""


def write_run(store: Path, number: int, first: int, last: int, *, status: int = 1) -> None:
    """Write a run as MLflow's file store has it; 1 is running, 3 finished."""
    run = store / "1" / f"{number:032x}"
    (run / "metrics").mkdir(parents=True, exist_ok=True)
    (store / "1" / "meta.yaml").write_text("experiment_id: '1'\nname: many\n")
    (run / "meta.yaml").write_text(
        f"run_id: {run.name}\nrun_name: run-{number}\nstart_time: {1_700_000_000_000 + number}\n"
        f"status: {status}\nlifecycle_stage: active\n"
    )
    with (run / "metrics" / "loss").open("a") as file:
        for step in range(first, last):
            file.write(f"{1_700_000_000_000 + step} {step / 8!r} {step}\n")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for number in range(NUM_RUNS):
        write_run(tmp_path / "mlruns", number, 0, NUM_STEPS)
    return tmp_path / "mlruns"


def all_points(into: Path) -> dict[str, Any]:
    return {run.name: points(run.path) for run in list_runs(into)}


def expected(num_steps: int = NUM_STEPS) -> dict[str, Any]:
    rows = [("training", step, {"loss": step / 8}) for step in range(num_steps)]
    return {f"run-{number}": rows for number in range(NUM_RUNS)}


def import_killed(store: Path, into: Path, at: int) -> None:
    command = [sys.executable, "-c", KILLED, str(store), str(into), str(at)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", [1, 30, 45, 100])
def test_killed_import_shows_whole_runs_only_and_is_repeated(
    store: Path, run_import: Import, tmp_path: Path, at: int
) -> None:
    into = tmp_path / "runs"
    import_killed(store, into, at)
    whole = all_points(into)
    assert all(rows == expected()[name] for name, rows in whole.items())
    assert len(whole) == (at - 1) // (NUM_STEPS + 2)
    run_import(store)
    assert all_points(into) == expected()
    assert not (into / ".importing").exists()


@pytest.mark.parametrize("at", [1, 5, 15])
def test_killed_import_of_a_grown_store_is_completed(
    store: Path, run_import: Import, tmp_path: Path, at: int
) -> None:
    run_import(store)
    for number in range(NUM_RUNS):
        write_run(store, number, NUM_STEPS, NUM_STEPS + 10)
    import_killed(store, tmp_path / "runs", at)
    runs, _ = run_import(store)
    assert {run.state for run in runs} <= {"grown", "unchanged"}
    assert all_points(tmp_path / "runs") == expected(NUM_STEPS + 10)
    # A run without an end goes on in its journal.
    assert {run.num_attempts for run in list_runs(tmp_path / "runs")} == {1}
    before = tree(tmp_path / "runs")
    assert {run.state for run in run_import(store)[0]} == {"unchanged"}
    assert tree(tmp_path / "runs") == before


@pytest.mark.parametrize("at", [1, 2, 6])
def test_killed_import_after_the_end_of_a_run_is_completed(
    store: Path, run_import: Import, tmp_path: Path, at: int
) -> None:
    write_run(store, 0, 0, 0, status=3)
    run_import(store)
    write_run(store, 0, NUM_STEPS, NUM_STEPS + 10, status=3)
    import_killed(store, tmp_path / "runs", at)
    run_import(store)
    run = next(run for run in list_runs(tmp_path / "runs") if run.name == "run-0")
    assert run.num_attempts == 2
    assert points(run.path) == expected(NUM_STEPS + 10)["run-0"]


def test_same_values_are_not_lost_as_repetitions(tmp_path: Path, run_import: Import) -> None:
    store = tmp_path / "mlruns"
    write_run(store, 0, 0, 1)
    for _ in range(2):
        write_run(store, 0, 0, 1)
    ((run,), _) = run_import(store)
    assert len(points(run.path)) == 3
    write_run(store, 0, 0, 1)
    ((run,), _) = run_import(store)
    assert (run.state, run.num_points) == ("grown", 1)
    assert len(points(run.path)) == 4


def test_renamed_run_directory_is_found_again(store: Path, run_import: Import) -> None:
    runs, _ = run_import(store)
    runs[0].path.rename(runs[0].path.with_name("mine"))
    again, _ = run_import(store)
    assert {run.state for run in again} == {"unchanged"}
    assert again[0].path.name == "mine"


def test_second_import_at_the_same_time_is_refused(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "runs"
    into.mkdir()
    descriptor = os.open(into, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ImportRefusedError, match="Only one import at a time can write into"):
            RunImport(store, into=into)
    finally:
        os.close(descriptor)


def test_hparams_that_came_later_are_taken_up(store: Path, run_import: Import) -> None:
    runs, _ = run_import(store)
    params = store / "1" / f"{0:032x}" / "params"
    params.mkdir()
    (params / "lr").write_text("0.5")
    run_import(store)
    assert RunDirectory(runs[0].path).read_info().hparams == {"lr": 0.5}


@pytest.mark.long
@pytest.mark.root
def test_full_disk_is_an_error_and_the_import_continues_later(
    store: Path, tmp_path: Path, small_disk: Path, run_import: Import
) -> None:
    write_run(store, NUM_RUNS - 1, NUM_STEPS, 60_000)
    with pytest.raises(OSError, match="No space left"):
        run_import(store, into=small_disk / "runs")
    # Whole runs only; the one that found no place does not show.
    assert {summarize_run(run.path).last_step for run in list_runs(small_disk / "runs")} == {39}
    assert all_points(small_disk / "runs").keys() == {"run-0", "run-1"}


def test_directory_with_two_kinds_of_stores_asks_for_one(
    store: Path, tmp_path: Path, run_import: Import
) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(ImportRefusedError, match="holds mlflow and tensorboard"):
        run_import(tmp_path)
    assert len(run_import(tmp_path, kind="mlflow")[0]) == NUM_RUNS


def test_nothing_to_import_is_said(tmp_path: Path, run_import: Import) -> None:
    with pytest.raises(ImportRefusedError, match="is not there"):
        run_import(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportRefusedError, match="holds nothing of it"):
        run_import(tmp_path / "empty")
