"""Exports, and the way back: the same records in the same order."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from imported_runs import Import, import_into, tree

from paceline import core
from paceline._base.run_directory import RunDirectory
from paceline.core import summarize_run

pyarrow = pytest.importorskip("pyarrow.parquet")

VALUES: list[dict[str, Any]] = [
    {"loss": 0.1 + 0.2, "zero": -0.0, "tiny": 5e-324, "count": 2**53 + 1},
    {"loss": math.nan, "high": math.inf, "low": -math.inf, "text": "é\n", "flag": True},
    {"nested": {"a": [1, 2.5]}, "list": [1.5, math.nan]},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with core.init(name="tiny", hparams={"lr": 0.5}, checkpoint_storage=None) as context:
        for step, values in enumerate(VALUES):
            context.train.report_training_metrics(step, values)
            context.train.report_validation_metrics(step, {"loss": 1.0})
        context.train.set_metadata({"note": "x"})
        with context.checkpoint.store_path({"steps_completed": 3}) as (path, _):
            (path / "state.txt").write_text("state")
    (path,) = (tmp_path / "paceline_runs").iterdir()
    (path / "files").mkdir()
    (path / "files" / "a.txt").write_text("a")
    return path


def export(*arguments: object) -> None:
    command = [sys.executable, "-m", "paceline.cli", "export", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def records(path: Path) -> list[tuple[Any, int, bytes]]:
    run = RunDirectory(path)
    return [(k, e.sequence, e.payload) for k in run.journal_keys() for e in run.reader(k)]


@pytest.mark.long
def test_import_of_an_export_has_the_same_records(
    run: Path, tmp_path: Path, run_import: Import
) -> None:
    export(run, "-o", tmp_path / "export", "--checkpoints")
    shutil.move(str(run), tmp_path / "away")
    (back,), problems = run_import(tmp_path / "export")
    assert problems == []
    assert records(back.path) == records(tmp_path / "away")
    assert (back.path / "files" / "a.txt").read_text() == "a"
    info, before = (RunDirectory(path).read_info() for path in (back.path, tmp_path / "away"))
    assert (info.run_id, info.name, info.hparams) == (before.run_id, "tiny", {"lr": 0.5})
    latest = summarize_run(back.path).latest_checkpoint
    assert latest is not None
    assert (back.path / "checkpoints" / latest / "state.txt").read_text() == "state"
    content = tree(tmp_path / "runs")
    assert run_import(tmp_path / "export")[0][0].state == "unchanged"
    assert tree(tmp_path / "runs") == content


@pytest.mark.long
def test_run_that_is_there_is_not_imported_again(run: Path, tmp_path: Path) -> None:
    export(run, "-o", tmp_path / "export")
    before = tree(run)
    ((back,), _) = import_into(run.parent, tmp_path / "export")
    assert (back.state, back.path) == ("unchanged", run)
    assert tree(run) == before


def test_export_has_tables_and_facts_for_other_programs(run: Path, tmp_path: Path) -> None:
    export(run.parent, "-o", tmp_path / "export")
    place = tmp_path / "export" / run.name
    rows = pyarrow.read_table(place / "metrics.parquet").to_pylist()
    losses = [row["value"] for row in rows if (row["group"], row["name"]) == ("training", "loss")]
    assert losses[0] == 0.1 + 0.2
    assert math.isnan(losses[1])
    facts = json.loads((place / "run.json").read_text())
    assert facts["hparams"] == {"lr": 0.5}
    assert facts["metadata"] == {"note": "x"}
    assert [stored["steps_completed"] for stored in facts["checkpoints"]] == [3]
    assert facts["environment"]["python"]


def test_damaged_export_gives_what_can_be_read(
    run: Path, tmp_path: Path, run_import: Import
) -> None:
    export(run, "-o", tmp_path / "export")
    place = tmp_path / "export" / run.name
    lines = (place / "records.jsonl").read_bytes().splitlines(keepends=True)
    (place / "records.jsonl").write_bytes(b"{half\n" + b"".join(lines[1:]))
    table = (place / "metrics.parquet").read_bytes()
    (place / "metrics.parquet").write_bytes(table[: len(table) // 2])
    (place / "files" / "link").symlink_to("/etc/hostname")
    shutil.move(str(run), tmp_path / "away")
    (back,), problems = run_import(tmp_path / "export")
    assert len(problems) == 2
    assert "Line 1 of records.jsonl is damaged" in problems[0]
    assert "metrics.parquet cannot be read to its end" in problems[1]
    assert len(records(back.path)) == len(lines)
    assert not (back.path / "files" / "link").exists()
