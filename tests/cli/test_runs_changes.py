"""`runs compare`, `runs delete` and `runs prune`: what goes, and what must stay."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline._base.run_directory import RunDirectory, RunInfo

ALIVE = """
import paceline

with paceline.core.init(name="alive") as context:
    context.train.report_validation_metrics(1, {"loss": 1.0})
    print(context.run_dir, flush=True)
    input()
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the directories of three runs below `tmp_path`, the oldest first."""
    monkeypatch.chdir(tmp_path)
    paths = []
    for number, lr in enumerate((0.5, 0.25, 0.5)):
        with core.init(name=f"run{number}", hparams={"lr": lr, "depth": 2}) as context:
            for step in (1, 2):
                metrics = {"loss": lr * step, "worst": float("inf") if step == 2 else 3.0}
                context.train.report_validation_metrics(step, metrics)
            paths.append(context.run_dir)
    return paths


@contextmanager
def living_run(directory: Path) -> Iterator[Path]:
    """Give the directory of a run whose process waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALIVE],
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Path(process.stdout.readline().strip())
    finally:
        process.communicate("\n")


def names(tmp_path: Path) -> set[str]:
    """Return the names of the runs there are, without their times."""
    return {path.name.split("-")[-1] for path in (tmp_path / "paceline_runs").iterdir()}


def test_a_comparison_shows_what_differs_and_last_least_and_greatest_values(
    paceline: Any, runs: list[Path], tmp_path: Path
) -> None:
    shown = paceline("runs", "compare", "run0", "run1", cwd=tmp_path).stdout
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[2:]}
    assert rows["hparams.lr"] == ["0.5", "0.25"]
    assert "hparams.depth" not in rows
    assert rows["validation/loss"] == [*["1", "(0.5", "to", "1)"], *["0.5", "(0.25", "to", "0.5)"]]
    found = json.loads(paceline("runs", "compare", "run0", "run1", "--json", cwd=tmp_path).stdout)
    # A value that is not finite is no extreme.
    worst = {"last": {"$float": "inf"}, "min": 3.0, "max": 3.0}
    assert [one["metrics"]["validation/worst"] for one in found] == [worst, worst]
    one = paceline("runs", "compare", "run0", cwd=tmp_path, code=1)
    assert "at least twice" in one.stderr
    none = paceline("runs", "compare", "run0", "nothing", cwd=tmp_path, code=1)
    assert "must be a run directory" in none.stderr


def test_a_run_is_deleted_only_if_it_is_confirmed(
    paceline: Any, runs: list[Path], tmp_path: Path
) -> None:
    tried = paceline("runs", "delete", "run1", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(tried.stdout)["is_deleted"] is False
    refused = paceline("runs", "delete", "run1", cwd=tmp_path, code=1)
    assert "Hint: add `--yes`." in refused.stderr
    assert names(tmp_path) == {"run0", "run1", "run2"}
    told = json.loads(paceline("runs", "delete", "run1", "--yes", "--json", cwd=tmp_path).stdout)
    assert told["path"] == str(runs[1])
    assert told["is_deleted"] is True
    assert told["num_bytes"] > 0
    assert names(tmp_path) == {"run0", "run2"}


def test_only_ended_runs_without_a_master_are_deleted_and_never_through_a_link(
    paceline: Any, runs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(runs[0])
    (runs[1] / "journal" / "link").symlink_to(tmp_path / "other")
    mastered = tmp_path / "paceline_runs" / "mastered"
    info = RunDirectory(runs[0]).read_info()
    fields = {name: getattr(info, name) for name in RunInfo.__struct_fields__}
    RunDirectory.create(mastered, RunInfo(**(fields | {"cluster_id": "a master"})))
    with living_run(tmp_path) as alive:
        for run, message in (
            ("link", "is a link"),
            ("other", "must be a Paceline run directory"),
            ("nothing", "must be a run directory"),
            (mastered, "belongs to a trial"),
            (alive, "a process works on"),
        ):
            refused = paceline("runs", "delete", run, "--yes", cwd=tmp_path, code=1)
            assert message in refused.stderr.replace("\n", " ")
            assert "Traceback" not in refused.stderr
        assert alive.exists()
        paceline("runs", "prune", "--keep", 0, "--yes", cwd=tmp_path)
        assert names(tmp_path) == {"mastered", "alive"}
    # A link inside of a run is removed, and not what it leads to.
    assert (tmp_path / "other" / "file").read_text() == "mine"


def test_pruning_keeps_the_newest_or_the_recently_used_runs(
    paceline: Any, runs: list[Path], tmp_path: Path
) -> None:
    long_ago = time.time() - 3 * 86_400
    for path in (runs[0], runs[2]):
        info = RunDirectory(path).read_info()
        fields = {name: getattr(info, name) for name in RunInfo.__struct_fields__}
        RunDirectory(path).write_info(RunInfo(**(fields | {"created": long_ago})))
    for path in (runs[0] / "journal").glob("*/*"):
        os.utime(path, (long_ago, long_ago))
    shown = paceline("runs", "prune", "--older-than", "2d", "--dry-run", cwd=tmp_path).stdout
    assert "run0" in shown
    # Run 2 is as old, but was resumed of late.
    assert "run2" not in shown
    assert names(tmp_path) == {"run0", "run1", "run2"}
    assert "`--yes`" in paceline("runs", "prune", "--keep", 1, cwd=tmp_path, code=1).stderr
    pruned = paceline("runs", "prune", "--older-than", "2d", "-y", "--json", cwd=tmp_path).stdout
    (row,) = json.loads(pruned)
    assert (row["path"].endswith("run0"), row["is_deleted"]) == (True, True)
    told = paceline("runs", "prune", "--keep", 1, "--yes", cwd=tmp_path).stdout
    assert told.splitlines()[-1] == "Deleted 1 run."
    assert names(tmp_path) == {"run1"}
    assert "No runs to delete" in paceline("runs", "prune", "--keep", 1, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "`--older-than` or `--keep` must be given"),
        (["--keep", "1", "--older-than", "1d"], "`--older-than` or `--keep` must be given"),
        (["--older-than", "30"], "must be a number with the unit"),
        (["nothing", "--keep", "1"], "`DIR` must be a directory"),
    ],
)
def test_wrong_options_of_prune_are_refused(
    paceline: Any, tmp_path: Path, options: list[str], message: str
) -> None:
    refused = paceline("runs", "prune", *options, cwd=tmp_path, code=1)
    assert message in refused.stderr
