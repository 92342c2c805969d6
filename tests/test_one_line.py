"""`paceline.init`, `log` and `finish`: a run for scripts without a `with` block."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import paceline
from paceline import core
from paceline._base.run_directory import RunDirectory


@pytest.fixture(autouse=True)
def work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in an empty directory, and end its run."""
    for name in [name for name in os.environ if name.startswith(("PACELINE_", "RANK", "WORLD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    yield
    paceline.finish()


def metrics_of(path: Path) -> list[tuple[int, dict[str, Any]]]:
    rows = core.read_metrics(RunDirectory(path), "training")
    return [(row.steps_completed, row.metrics) for row in rows]


def test_numbers_become_metrics_and_steps_count_by_themselves() -> None:
    run = paceline.init(project="digits", name="small", config={"lr": 0.1}, tags=["try", "cpu"])
    paceline.log({"loss": 0.5, "nested": {"acc": 1}})
    paceline.log({"loss": 0.4})
    paceline.log({"loss": 0.3}, step=10)
    paceline.log({"more": 1}, step=10)
    paceline.log({"loss": 0.2})
    assert run.config == {"lr": 0.1}
    paceline.finish()
    paceline.finish()
    assert metrics_of(run.run_dir) == [
        (1, {"loss": 0.5, "nested": {"acc": 1}}), (2, {"loss": 0.4}), (10, {"loss": 0.3}),
        (10, {"more": 1}), (11, {"loss": 0.2}),
    ]  # fmt: skip
    info = RunDirectory(run.run_dir).read_info()
    assert (info.name, info.hparams) == ("small", {"lr": 0.1})
    assert info.labels == ["project:digits", "try", "cpu"]
    assert core.summarize_run(run.run_dir).state is core.RunState.COMPLETED


def test_media_are_told_from_numbers(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("n")
    picture = Image.new("RGB", (2, 2))
    with paceline.init(name="media") as run:
        paceline.log(
            {
                "image": paceline.Image(np.zeros((2, 2)), "dark"),
                "images": [picture, paceline.Image(picture, "second")],
                "audio": paceline.Audio(np.zeros(4), sample_rate=4),
                "video": paceline.Video(np.zeros((2, 2, 2, 3))),
                "table": paceline.Table(columns=["n", "name"], data=[[1, "a"]]),
                "histogram": paceline.Histogram([1.0, 2.0]),
                "html": paceline.Html("<p>"),
                "file": paceline.File(tmp_path / "notes.txt"),
                "loss": 1.0,
                "list": [1, 2],
            }
        )
        paceline.log({"only": picture})
    assert metrics_of(run.run_dir) == [(1, {"loss": 1.0, "list": [1, 2]})]
    found = [row.report for row in core.read_media(RunDirectory(run.run_dir))]
    assert [(one.name, one.kind, one.steps_completed) for one in found] == [
        ("image", "image", 1), ("images", "image", 1), ("audio", "audio", 1), ("video", "video", 1),
        ("table", "table", 1), ("histogram", "histogram", 1), ("html", "html", 1),
        ("file", "file", 1), ("only", "image", 2),
    ]  # fmt: skip
    assert [file.caption for file in found[1].files] == ["", "second"]


def test_a_second_run_ends_the_first_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first = paceline.init(name="first")
    second = paceline.init(name="second", config=argparse.Namespace(lr=1))
    assert f"ends the run {first.run_dir.name}, which is still open" in caplog.text
    assert core.summarize_run(first.run_dir).state is core.RunState.COMPLETED
    assert core.summarize_run(second.run_dir).state is core.RunState.RUNNING
    assert second.config == {"lr": 1}
    # The first is over, whoever still has it.
    first.finish()
    assert core.summarize_run(second.run_dir).state is core.RunState.RUNNING


def test_a_resumed_run_counts_on_from_its_checkpoint() -> None:
    run = paceline.init(name="again")
    for _ in range(3):
        paceline.log({"loss": 1.0})
    with run.context.checkpoint.store_path({"steps_completed": 2}) as (path, _):
        (path / "state").write_text("")
    run.finish(ValueError("stop"))
    again = paceline.init(name="again", resume="auto")
    assert again.run_dir == run.run_dir
    paceline.log({"loss": 0.5})
    paceline.finish()
    rows = core.read_metrics(RunDirectory(run.run_dir), "training")
    shown = [(row.steps_completed, row.metrics["loss"]) for row in rows if not row.is_superseded]
    assert shown == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_a_trial_gives_its_hyperparameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline._base.run_directory import RunInfo, TrialInfo

    trial = TrialInfo(trial_id=7, experiment_id=3, trial_seed=1, hparams={"lr": 0.2}, config={})
    info = RunInfo(
        run_id="r", name="t", created=1.0, attempt=1, trial=trial, cluster_id="c",
        checkpoint_storage=str(tmp_path / "storage"),
    )  # fmt: skip
    directory = RunDirectory.create(tmp_path / "attempt", info)
    monkeypatch.setenv("PACELINE_RUN_DIR", str(directory.path))
    run = paceline.init(project="ignored", config={"lr": 0.1, "depth": 3})
    assert run.config == {"lr": 0.2, "depth": 3}
    paceline.log({"loss": 1.0})
    paceline.finish()
    assert metrics_of(directory.path) == [(1, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"tags": "one"}, TypeError, "`tags` must be a list of texts, but got 'one'"),
        ({"tags": [1]}, TypeError, "`labels` must be a list of texts"),
        ({"tags": [""]}, ValueError, "A label must have 1 to 100 printable characters"),
        ({"config": 3}, TypeError, "`config` must be a dictionary or an object, but got 3"),
        ({"name": "a/b"}, ValueError, "name"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        paceline.init(**arguments)
    with pytest.raises(RuntimeError, match=r"needs a run. Hint: call `paceline.init\(\)` first"):
        paceline.log({"loss": 1.0})


ENDS = """
import sys, threading
import paceline
run = paceline.init(name="ends")
paceline.log({"loss": 1.0})
way = sys.argv[1]
if way == "raise":
    raise ValueError("bad data")
if way == "exit":
    sys.exit(3)
if way == "exit 0":
    sys.exit(0)
if way == "caught":
    try:
        sys.exit(3)
    except SystemExit:
        paceline.log({"loss": 2.0})
if way == "thread":
    thread = threading.Thread(target=lambda: sys.exit(3))
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("way", "code", "state", "error"),
    [
        ("end", 0, "completed", None),
        ("raise", 1, "crashed", "ValueError: bad data"),
        ("exit", 3, "crashed", "SystemExit: 3"),
        ("exit 0", 0, "completed", None),
        ("caught", 0, "completed", None),
        ("thread", 0, "completed", None),
    ],
)
def test_the_end_of_the_script_is_that_of_the_run(
    way: str,
    code: int,
    state: str,
    error: str | None,
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
) -> None:
    result = run_python(ENDS, way)
    assert result.returncode == code, result.stderr
    [path] = (tmp_path / "paceline_runs").iterdir()
    summary = core.summarize_run(path)
    assert (summary.state.value, summary.error) == (state, error)
