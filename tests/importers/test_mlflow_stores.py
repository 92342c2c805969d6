"""MLflow's stores, written by MLflow itself, as runs."""

import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from imported_runs import Import, media, points, run_script, tree
from optional_modules import Needed

from paceline._base.run_directory import RunDirectory
from paceline.core import RunState, read_history, summarize_run

Needed("mlflow")

SCRIPT = """
import os, sys
import mlflow, numpy as np

def write(root, uri):
    os.chdir(root)
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("project one")
    with mlflow.start_run(run_name="first run", tags={"team": "a"}):
        mlflow.log_params({"lr": 0.5, "optimizer": "adam", "steps": 3})
        for step in range(3):
            mlflow.log_metrics({"loss": 1 / (step + 1), "val/accuracy": step / 3}, step=step)
        mlflow.log_metric("odd", float("nan"), step=1)
        mlflow.log_metric("odd", float("-inf"), step=2)
        mlflow.log_metric("system/cpu", 3.5, step=2)
        mlflow.log_text("hello", "notes/a.txt")
        mlflow.log_image(np.zeros((4, 5, 3), dtype=np.uint8), key="some/image", step=2)
    try:
        with mlflow.start_run(run_name="broken"):
            mlflow.log_metric("loss", 1.0)
            raise ValueError
    except ValueError:
        pass

write(sys.argv[1] + "/files", f"file://{sys.argv[1]}/files/mlruns")
write(sys.argv[1] + "/database", f"sqlite:///{sys.argv[1]}/database/mlflow.db")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mlflow")
    (root / "files").mkdir()
    (root / "database").mkdir()
    run_script(SCRIPT, root, MLFLOW_ALLOW_FILE_STORE="true")
    return root


@pytest.fixture(params=["files", "database"])
def store(written: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the store, elsewhere than where it was written."""
    return Path(shutil.copytree(written / request.param, tmp_path / "store"))


@pytest.mark.long
def test_runs_of_both_kinds_of_store_come_whole(store: Path, run_import: Import) -> None:
    runs, problems = run_import(store)
    assert problems == []
    found = {run.name: run for run in runs}
    assert {run.state for run in runs} == {"new"}
    first = found["first run"]
    rows = points(first.path)
    values = {(g, s, k): v for g, s, metrics in rows for k, v in metrics.items()}
    assert math.isnan(values.pop(("training", 1, "odd")))
    assert values == {
        **{("training", step, "loss"): 1 / (step + 1) for step in range(3)},
        **{("training", step, "val/accuracy"): step / 3 for step in range(3)},
        ("training", 2, "odd"): -math.inf,
        ("system", 2, "system/cpu"): 3.5,
    }
    directory = RunDirectory(first.path)
    info = directory.read_info()
    assert info.hparams == {"lr": 0.5, "optimizer": "adam", "steps": 3}
    metadata = read_history(directory).metadata
    assert metadata is not None
    assert (metadata["project"], metadata["tags"]["team"]) == ("project one", "a")
    logged = media(first.path)
    text, image = logged["notes/a.txt"], logged["some/image"]
    assert (first.path / "files" / text.files[0].path).read_text() == "hello"
    assert (image.kind, image.steps_completed) == ("image", 2)
    assert summarize_run(first.path).state is RunState.COMPLETED
    broken = summarize_run(found["broken"].path)
    assert broken.state is RunState.CRASHED
    assert broken.error is not None
    assert "FAILED" in broken.error


def test_second_import_changes_nothing(store: Path, run_import: Import, tmp_path: Path) -> None:
    run_import(store)
    before = tree(tmp_path / "runs")
    runs, _ = run_import(store)
    assert {run.state for run in runs} == {"unchanged"}
    assert tree(tmp_path / "runs") == before


def test_dry_run_writes_nothing(store: Path, run_import: Import, tmp_path: Path) -> None:
    runs, _ = run_import(store, dry_run=True)
    assert sum(run.num_points for run in runs) == 10
    assert not (tmp_path / "runs").exists()


def test_grown_store_adds_what_is_new(store: Path, run_import: Import) -> None:
    (first,) = [run for run in run_import(store)[0] if run.name == "first run"]
    if (store / "mlruns" / "0").exists():
        (loss,) = [p for p in store.rglob("metrics/loss") if len(p.read_text().split("\n")) > 2]
        with loss.open("a") as file:
            file.write("1800000000000 0.125 7\n")
    else:
        with sqlite3.connect(store / "mlflow.db") as database:
            database.execute(
                "INSERT INTO metrics SELECT 'loss', 0.125, 1800000000000, run_uuid, 7, 0"
                " FROM runs WHERE name = 'first run'"
            )
        database.close()
    runs, problems = run_import(store)
    assert problems == []
    assert {run.name: (run.state, run.num_points) for run in runs} == {
        "first run": ("grown", 1),
        "broken": ("unchanged", 0),
    }
    assert [row[1:] for row in points(first.path) if "loss" in row[2]][-1] == (7, {"loss": 0.125})
    assert len([row for row in points(first.path) if "loss" in row[2]]) == 4
    # The run had ended, so what came later is its next attempt; nothing before is superseded.
    assert summarize_run(first.path).num_attempts == 2
    assert {run.state for run in run_import(store)[0]} == {"unchanged"}


def test_links_are_not_followed_and_damage_is_named(store: Path, run_import: Import) -> None:
    artifacts = next(path for path in store.rglob("artifacts") if any(path.iterdir()))
    (artifacts / "secret.txt").symlink_to("/etc/hostname")
    (artifacts / "outside").symlink_to("/etc")
    if (store / "mlruns" / "0").exists():
        experiment = artifacts.parents[1]
        (lost,) = [p for p in experiment.glob("*/meta.yaml") if p.parent != artifacts.parent]
        lost.write_text("!!python/object/apply:os.system ['touch owned']\n")
        loss = artifacts.parent / "metrics" / "loss"
        loss.write_text(loss.read_text() + "no number\n")
        expected = {"meta.yaml cannot be read", "Line 4 of metrics/loss is damaged"}
    else:
        with sqlite3.connect(store / "mlflow.db") as database:
            database.execute("UPDATE metrics SET value = 'text' WHERE key = 'loss' AND step = 2")
        database.close()
        expected = {"A value of 'loss' is damaged"}
    runs, problems = run_import(store)
    expected |= {"The artifact 'secret.txt' is a link", "The artifact 'outside' is a link"}
    assert len(problems) == len(expected)
    for text in expected:
        assert any(text in problem for problem in problems), (text, problems)
    (first,) = [run for run in runs if run.name == "first run"]
    assert "notes/a.txt" in media(first.path)
    assert not any("secret" in name for name in tree(first.path))


@pytest.mark.parametrize("store", ["database"], indirect=True)
def test_rest_of_a_damaged_database_is_named(store: Path, run_import: Import) -> None:
    path = store / "mlflow.db"
    data = bytearray(path.read_bytes())
    with sqlite3.connect(path) as database:
        (page,) = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'metrics'"
        ).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    data[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(bytes(data))
    runs, problems = run_import(store)
    assert any("The table metrics cannot be read to its end" in text for text in problems)
    (first,) = [run for run in runs if run.name == "first run"]
    assert "notes/a.txt" in media(first.path)


@pytest.mark.parametrize("ending", ["view", "-journal", "-wal"])
def test_a_hostile_database_cannot_make_the_import_wait(ending: str, tmp_path: Path) -> None:
    """A view may compute for ever, and SQLite opens the logs beside a database."""
    path, run = tmp_path / "hostile.db", "run_uuid, experiment_id, lifecycle_stage, start_time"
    with sqlite3.connect(path) as database:
        for table in ("experiments(experiment_id, name)", "metrics(key)", "params(key)"):
            database.execute(f"CREATE TABLE {table}")
        database.execute("INSERT INTO experiments VALUES (1, 'e')")
        numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
        endless = f"CREATE VIEW runs AS {numbers} SELECT x AS run_uuid, 1 AS experiment_id,"
        endless += " 'active' AS lifecycle_stage, 0 AS start_time FROM n"
        database.execute(endless if ending == "view" else f"CREATE TABLE runs({run})")
    database.close()
    if ending != "view":
        os.mkfifo(f"{path}{ending}")
    command = [sys.executable, "-m", "paceline.cli", "import", str(path), "--into"]
    done = subprocess.run(
        [*command, str(tmp_path / "runs")], capture_output=True, text=True, timeout=180
    )
    assert done.returncode != 0
    assert "holds nothing of it" in done.stderr, done.stderr
