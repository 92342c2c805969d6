"""Runs and their metrics as data frames."""

import math
from pathlib import Path

import pytest

import paceline
from paceline import core
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import AttemptStarted, MetricsReported
from paceline._base.run_directory import JournalKey, NotARunDirectoryError, RunDirectory


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with core.init(name="tiny", hparams={"lr": 0.5, "net": {"width": 8}}) as context:
        for step in range(3):
            context.train.report_training_metrics(step, {"loss": 1 / (step + 1)})
            context.train.report_training_metrics(step, {"more": {"a": step}})
        context.train.report_validation_metrics(2, {"loss": math.nan, "note": "text"})
    return next((tmp_path / "paceline_runs").iterdir())


def test_core_reads_a_run_by_its_path(run_dir: Path) -> None:
    by_text = list(core.read_metrics(str(run_dir), "training"))
    assert by_text == list(core.read_metrics(run_dir, "training"))
    assert [row.metrics for row in by_text][:2] == [{"loss": 1.0}, {"more": {"a": 0}}]
    assert {row.group for row in core.read_metrics(run_dir)} == {"training", "validation"}
    assert core.read_history(str(run_dir)).num_attempts == 1
    assert core.read_checkpoints(run_dir) == []
    with pytest.raises(NotARunDirectoryError, match="must be a Paceline run directory"):
        list(core.read_metrics("paceline_runs/missing"))


@pytest.mark.parametrize("name", ["path", "text", "name", "end", "last", "summary"])
def test_metrics_are_rows_by_any_name_of_a_run(run_dir: Path, name: str) -> None:
    run = {
        "path": run_dir,
        "text": str(run_dir),
        "name": run_dir.name,
        "end": "-tiny",
        "last": "last",
        "summary": core.summarize_run(run_dir),
    }[name]
    rows = paceline.read_metrics(run, "training")
    place = {"group": "training", "attempt": 1}
    assert rows == [
        {**place, "steps_completed": step, "loss": 1 / (step + 1), "more.a": step}
        for step in range(3)
    ]


def test_unknown_run_is_refused(run_dir: Path) -> None:
    with pytest.raises(NotARunDirectoryError, match="`run` must be a run directory, or a name"):
        paceline.read_metrics("missing")


def test_rows_of_an_attempt_that_was_repeated_are_left_out(run_dir: Path) -> None:
    writer = JournalWriter(RunDirectory(run_dir).journal_path(JournalKey(1, 0, 0)))
    writer.append(
        AttemptStarted(
            time=0, attempt=1, generation=0, rank=0, world_size=1, pid=0, host="",
            resumed_from=None, steps_completed=1,
        )
    )  # fmt: skip
    row = {"group": "training", "steps_completed": 2}
    writer.append(MetricsReported(time=0, metrics={"loss": 9.0}, **row))  # type: ignore[arg-type]
    writer.close()
    rows = paceline.read_metrics(run_dir, "training")
    assert [(row["attempt"], row["loss"]) for row in rows] == [(1, 1.0), (1, 0.5), (2, 9.0)]


def test_pandas_frames_have_the_columns(run_dir: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = paceline.read_metrics(run_dir).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["loss"])[:3] == [1.0, 1 / 2, 1 / 3]
    assert frame.shape == (4, 6)
    runs = paceline.runs().to_pandas()
    assert list(runs["state"]) == ["completed"]
    assert list(runs["hparams.net.width"]) == [8]
    assert list(paceline.runs(run_dir.parent).to_pandas()["name"]) == ["tiny"]


def test_polars_frames_take_metrics_that_change_their_kind(run_dir: Path) -> None:
    pytest.importorskip("polars")
    frame = paceline.read_metrics(run_dir).to_polars()
    assert frame["loss"].to_list()[:3] == [1.0, 1 / 2, 1 / 3]
    assert frame["note"].to_list() == [None, None, None, "text"]


def test_missing_library_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polars", None)
    with pytest.raises(ImportError, match="`to_polars` needs the package `polars`"):
        paceline.runs().to_polars()


def test_notebooks_show_runs_as_a_table(run_dir: Path) -> None:
    shown = paceline.runs()._repr_html_()
    assert "1 runs in paceline_runs" in shown
    assert "<th>hparams.lr</th>" in shown
    assert "<td>text</td>" in paceline.read_metrics("last")._repr_html_()
