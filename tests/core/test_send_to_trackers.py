"""Trackers: what they are told, and that none of them stops, slows or fails a training."""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline import core
from paceline.core import MetricPoint, TrackedRun, Tracker
from paceline.core._arguments import Outcome
from paceline.core._trackers import tracker_named, tracker_names


class Told(Tracker):
    """Keeps what it is told; fails, or hangs, when asked to."""

    name = "told"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.runs: list[TrackedRun] = []
        self.points: list[MetricPoint] = []
        self.checkpoints: list[tuple[dict[str, str], str]] = []
        self.ends: list[tuple[Outcome, str | None]] = []
        self.threads: set[int] = set()
        self.num_failures = 0
        self.hangs = threading.Event()
        self.hangs.set()
        self.is_abandoned = False

    def start(self, run: TrackedRun) -> str:
        self._call()
        self.runs.append(run)
        return f"{run.run_id}-there"

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        self._call()
        self.points += points

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        self._call()
        self.checkpoints.append((dict(checkpoints), newest))

    def finish(self, outcome: Outcome, error: str | None) -> None:
        self._call()
        self.ends.append((outcome, error))

    def abandon(self) -> None:
        self.is_abandoned = True

    def _call(self) -> None:
        self.threads.add(threading.get_ident())
        self.hangs.wait()
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionError("nobody is there")


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hanging() -> Iterator[Told]:
    """Return a tracker that hangs in its first call until the end of the test."""
    tracker = Told(close_timeout_s=0.05)
    tracker.hangs.clear()
    yield tracker
    tracker.hangs.set()


def train(context: core.Context, steps: range = range(1, 4)) -> None:
    for step in steps:
        context.train.report_training_metrics(step, {"loss": 1 / step, "parts": {"a": step}})
        context.train.report_validation_metrics(step, {"accuracy": step, "note": "text"})


def store(context: core.Context, step: int) -> str:
    with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
        (path / "state").write_text("x")
    return uuid


def test_a_tracker_is_told_of_metrics_checkpoints_and_the_end_by_one_other_thread() -> None:
    tracker = Told()
    with core.init(name="mine", hparams={"lr": 0.1}, trackers=[tracker]) as context:
        train(context)
        first = store(context, 3)
        second = store(context, 4)
        context.checkpoint.delete(first)
    (run,) = tracker.runs
    assert (run.name, run.config, run.attempt, run.tracked_as) == ("mine", {"lr": 0.1}, 0, None)
    told = [(each.name, each.value, each.step) for each in tracker.points]
    expected = [
        [("loss", 1 / step, step), ("parts/a", step, step), ("validation/accuracy", step, step)]
        for step in (1, 2, 3)
    ]
    assert told == sum(expected, [])
    checkpoints, newest = tracker.checkpoints[-1]
    url = f"{context.checkpoint.storage.url}/{second}"
    assert newest == second
    assert checkpoints[second] == url
    assert tracker.ends == [(Outcome.COMPLETED, None)]
    assert len(tracker.threads) == 1
    assert tracker.threads != {threading.get_ident()}
    assert tracker.num_lost == 0


def test_a_failed_run_is_told_as_failed_with_its_error() -> None:
    tracker = Told()
    with pytest.raises(ZeroDivisionError), core.init(trackers=[tracker]) as context:  # noqa: PT012
        train(context)
        raise ZeroDivisionError("by zero")
    assert tracker.ends == [(Outcome.ERROR, "ZeroDivisionError: by zero")]
    assert len(tracker.points) == 9


def test_a_tracker_that_fails_is_tried_again_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = Told()
    tracker.num_failures = 1
    with core.init(trackers=[tracker]) as context:
        while not tracker.runs:
            time.sleep(0.01)
        train(context)
        tracker.num_failures = 1
    assert len(tracker.points) == 9
    assert tracker.num_lost == 0
    assert caplog.text.count("nobody is there. Training goes on") == 1


def test_a_tracker_that_always_fails_loses_all_counted_and_nothing_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = Told()
    tracker.num_failures = 1000
    with core.init(trackers=[tracker]) as context:
        train(context)
        store(context, 3)
    # Three reports of training, three of validation, and a checkpoint.
    assert tracker.num_lost == 7
    assert caplog.text.count("has failed: ConnectionError") == 1
    assert "lacks 7 report(s) or checkpoint(s) of the run. All of them are in" in caplog.text


def test_a_tracker_that_hangs_neither_stops_training_nor_its_end(
    hanging: Told, caplog: pytest.LogCaptureFixture
) -> None:
    other = Told()
    with core.init(trackers=[hanging, other]) as context:
        train(context)
        while not hanging.threads:
            time.sleep(0.01)
    assert hanging.is_abandoned
    assert hanging.num_lost == 6
    assert "has not come to its end within 0.05 s and is left behind" in caplog.text
    assert len(other.points) == 9
    # The next run does not call the object that still hangs, and ends too.
    with core.init(trackers=[hanging]) as context:
        train(context)
    assert len(hanging.threads) == 1


def test_what_a_killed_process_has_not_sent_is_sent_by_the_next_attempt(hanging: Told) -> None:
    with core.init(name="killed", trackers=[Told()]) as context:
        train(context)
    path = context.run_dir
    with core.init(resume=path, trackers=[hanging]) as context:
        train(context, range(4, 6))
    later = Told()
    with core.init(resume=path, trackers=[later]) as context:
        train(context, range(6, 7))
    # What the first one has sent is not sent again.
    assert sorted({each.step for each in later.points}) == [4, 5, 6]
    (run,) = later.runs
    assert run.attempt == 2
    assert run.tracked_as == f"{run.run_id}-there"


def test_only_a_tracker_from_the_beginning_gets_earlier_attempts() -> None:
    with core.init(name="without") as context:
        train(context)
    tracker = Told()
    with core.init(resume=context.run_dir, trackers=[tracker]) as context:
        train(context, range(4, 5))
    assert {each.step for each in tracker.points} == {4}


def test_a_state_that_is_damaged_or_cannot_be_written_is_no_error() -> None:
    with core.init(name="torn", trackers=[Told()]) as context:
        state = context.run_dir / "trackers" / "told.json"
        train(context)
    assert json.loads(state.read_text())["tracked_as"].endswith("-there")
    state.write_text("{")
    tracker = Told()
    with core.init(resume=context.run_dir, trackers=[tracker]) as context:
        train(context, range(4, 5))
    assert {each.step for each in tracker.points} == {4}


def test_groups_and_ranks_are_chosen() -> None:
    tracker = Told(ranks=None, groups=None)
    assert tracker.takes("profiling", 2)
    assert Told(ranks=[0, 2]).takes("training", 2)
    assert not Told(ranks=[0, 2]).takes("training", 1)
    assert not Told().takes("profiling", 0)
    with core.init(trackers=[tracker]) as context:
        context.train.report_metrics("test", 1, {"loss": 1.0})
    assert [each.name for each in tracker.points] == ["test/loss"]
    with pytest.raises(ValueError, match="`ranks` must be ranks of at least 0"):
        Told(ranks=-1)
    with pytest.raises(ValueError, match="`close_timeout_s` must be at least 0"):
        Told(close_timeout_s=-1)


def test_names_of_trackers_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracker_names() == ["mlflow", "tensorboard", "wandb"]
    with pytest.raises(ValueError, match="A tracker must be mlflow, tensorboard, wandb"):
        core.init(trackers=["nothing"])
    with pytest.raises(TypeError, match="`trackers` must be Tracker objects or names"):
        core.init(trackers=[3])  # type: ignore[list-item]
    module: Any = ModuleType("package_of_another")
    module.Told = Told
    monkeypatch.setitem(sys.modules, module.__name__, module)
    points = [
        EntryPoint("own", "package_of_another:Told", "paceline.trackers"),
        EntryPoint("wrong", "os:getpid", "paceline.trackers"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    assert isinstance(tracker_named("own"), Told)
    with pytest.raises(TypeError, match="must be a class of `Tracker`, but os:getpid"):
        tracker_named("wrong")
