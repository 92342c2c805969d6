"""What each tracker promises, read back with the library that it writes for."""

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline import core, integrations
from paceline.core import Tracker

CONFIG = {"lr": 0.1, "model": {"width": 3, "names": ["a", "b"]}}


# These libraries warn of what they themselves do.
SLOW = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Shown(NamedTuple):
    """A run as a library shows it: points by name, the config, URLs, and how it has ended."""

    points: dict[str, list[tuple[int, float]]]
    config: dict[str, Any]
    checkpoints: set[str]
    outcome: str


class Case(NamedTuple):
    """A tracker, and what reads all that was written for a run."""

    make: Callable[..., Tracker]
    read: Callable[[Path], Shown]


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tensorboard_case() -> Case:
    pytest.importorskip("tensorboard", reason="NOT TESTED: needs TensorBoard")
    from paceline.integrations import TensorBoardTracker

    def read(run_dir: Path) -> Shown:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
        tags = events.Tags()
        texts = {
            tag: [each.tensor_proto.string_val[0].decode() for each in events.Tensors(tag)]
            for tag in tags["tensors"]
        }
        urls = texts.get("checkpoints/text_summary", [""])[-1]
        config = texts["config/text_summary"][-1].strip("`\n")
        return Shown(
            {
                tag: [(each.step, each.value) for each in events.Scalars(tag)]
                for tag in tags["scalars"]
            },
            json.loads(config),
            {line.removeprefix("- ") for line in urls.splitlines()},
            texts["outcome/text_summary"][-1],
        )

    return Case(TensorBoardTracker, read)


def mlflow_case() -> Case:
    pytest.importorskip("mlflow", reason="NOT TESTED: needs MLflow")
    from mlflow.tracking import MlflowClient

    from paceline.integrations import MLflowTracker

    uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    # Makes its tables, which takes long.
    MlflowClient(uri).create_experiment("mine", artifact_location=str(Path.cwd() / "artifacts"))

    def read(run_dir: Path) -> Shown:
        client = MlflowClient(uri)
        (experiment,) = client.search_experiments(filter_string="name = 'mine'")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_name == run_dir.name.split("-", 2)[2]
        points = {}
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            points[name] = [(each.step, each.value) for each in history]
        tags = run.data.tags
        urls = {url for tag, url in tags.items() if tag.startswith("paceline.checkpoint.")}
        assert tags["paceline.checkpoint"] in urls or not urls
        names = {"FINISHED": "completed", "FAILED": "error", "KILLED": "preempted"}
        error = f": {tags['paceline.error']}" if "paceline.error" in tags else ""
        parameters = run.data.params
        config = {
            "lr": float(parameters["lr"]),
            "model": {
                "width": int(parameters["model.width"]),
                "names": json.loads(parameters["model.names"]),
            },
        }
        return Shown(points, config, urls, names[run.info.status] + error)

    def make(**options: Any) -> Tracker:
        return MLflowTracker(uri, experiment_name="mine", close_timeout_s=120.0, **options)

    return Case(make, read)


def records_of(log: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's offline file: LevelDB's log format after a header of 7 bytes."""
    assert log[:4] == b":W&B"
    place, block, data = 7, 32768, b""
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
        length, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        data += log[place + 7 : place + 7 + length]
        place += 7 + length
        # A record is whole (1), or its first, middle and last part (2, 3, 4).
        if kind in (1, 4):
            yield data
            data = b""


def wandb_case() -> Case:
    pytest.importorskip("wandb", reason="NOT TESTED: needs W&B")
    from paceline.integrations import WandbTracker

    def make(**options: Any) -> Tracker:
        return WandbTracker("mine", mode="offline", close_timeout_s=120.0, **options)

    def read(run_dir: Path) -> Shown:
        from wandb.proto import wandb_internal_pb2

        points: dict[str, list[tuple[int, float]]] = {}
        config: dict[str, Any] = {}
        summary: dict[str, Any] = {}
        code, num_ended = None, 0
        # An attempt has a directory of its own, and all have the same identity.
        files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
        for file in files:
            for data in records_of(file.read_bytes()):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                for item in record.run.config.update:
                    config[item.key] = json.loads(item.value_json)
                row = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                step = int(json.loads(row.pop("step", "0")))
                for name, value in row.items():
                    if not name.startswith("_"):
                        points.setdefault(name, []).append((step, float(json.loads(value))))
                for item in record.summary.update:
                    summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
                if record.HasField("exit"):
                    code = record.exit.exit_code
                    num_ended += 1
        if num_ended < len(files):
            # W&B's own process is still writing.
            time.sleep(0.1)
            return read(run_dir)
        config.pop("_wandb", None)
        outcome = summary["outcome"]
        assert (code == 0) is (outcome == "completed")
        error = f": {summary['error']}" if "error" in summary else ""
        there = summary.get("checkpoints", {})
        return Shown(points, config, set(there.values()), outcome + error)

    return Case(make, read)


@pytest.fixture(
    params=[
        pytest.param(tensorboard_case, id="tensorboard"),
        pytest.param(mlflow_case, id="mlflow", marks=SLOW),
        pytest.param(wandb_case, id="wandb", marks=SLOW),
    ]
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Return each tracker in turn."""
    yield request.param()
    if request.param is wandb_case:
        # Its service's client has a thread.
        import wandb

        wandb.teardown()


def report(context: core.Context, steps: range) -> None:
    for step in steps:
        context.train.report_training_metrics(
            step, {"loss": 0.5**step, "parts": {"odd name?": step}, "text": "x"}
        )
        context.train.report_validation_metrics(step, {"loss": float("nan")})


def store(context: core.Context, step: int) -> str:
    with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
        (path / "state").write_text("x")
    return uuid


def test_a_run_can_be_read_back_also_one_that_goes_on_after_an_error(case: Case) -> None:
    """The second attempt is the same run there; its metrics, checkpoints and end come to it."""
    tracker = case.make()
    with (  # noqa: PT012  # the block is a run
        pytest.raises(OSError, match="broken"),
        core.init(name="mine", hparams=CONFIG, trackers=[tracker]) as context,
    ):
        report(context, range(1, 4))
        first = store(context, 3)
        raise OSError("broken")
    run_dir, url = context.run_dir, context.checkpoint.storage.url
    shown = case.read(run_dir)
    assert shown.points["loss"] == [(step, 0.5**step) for step in (1, 2, 3)]
    (odd,) = shown.points.keys() - {"loss", "validation/loss"}
    assert odd.startswith("parts/odd name")
    assert [step for step, value in shown.points["validation/loss"] if math.isnan(value)] == [
        *(1, 2, 3)
    ]
    assert shown.config == CONFIG
    assert shown.checkpoints == {f"{url}/{first}"}
    assert shown.outcome == "error: OSError: broken"
    again = case.make()
    with core.init(resume=run_dir, trackers=[again]) as context:
        report(context, range(4, 6))
        second = store(context, 5)
        context.checkpoint.delete(first)
        third = store(context, 6)
    shown = case.read(run_dir)
    assert shown.points["loss"] == [(step, 0.5**step) for step in range(1, 6)]
    assert shown.checkpoints == {f"{url}/{second}", f"{url}/{third}"}
    assert shown.outcome.startswith("completed")
    assert (tracker.num_lost, again.num_lost) == (0, 0)


def test_one_object_serves_one_run_after_the_other(case: Case) -> None:
    tracker = case.make()
    for _ in range(2):
        with core.init(name="mine", hparams=CONFIG, trackers=[tracker]) as context:
            report(context, range(1, 3))
    assert tracker.num_lost == 0
    if case.make.__name__ != "make" or isinstance(tracker, integrations.WandbTracker):
        assert len(case.read(context.run_dir).points["loss"]) == 2
