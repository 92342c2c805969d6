"""TensorBoard files: what is written, where it is, and what is uploaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import core
from paceline.core import TensorboardMode
from paceline.journal import RunDirectory
from paceline.storage import ObjectStorage, storage_from


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(path))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def keys(url: str) -> list[str]:
    storage = storage_from(url)
    assert isinstance(storage, ObjectStorage)
    return [each.key.partition("/")[2] for each in storage.objects("tensorboard/")]


def test_auto_writes_what_is_reported_and_a_resumed_run_goes_on() -> None:
    with core.init(name="auto", tensorboard_mode=TensorboardMode.AUTO) as context:
        place = context.train.get_tensorboard_path()
        assert place == context.run_dir / "tensorboard"
        metrics = {"loss": 0.5, "by_class": {"cat": 1, "dog": float("inf")}, "note": "text"}
        context.train.report_training_metrics(1, metrics)
        context.train.report_training_metrics(1, metrics)
        context.train.report_metrics("test", 2, {"loss": 0.25})
        with context.checkpoint.store_path({"steps_completed": 2}):
            pass
        context.train.report_training_metrics(3, {"loss": 9.0})
        context.preempt.settle()
    assert scalars(place) == {
        "training/loss": [(1, 0.5), (3, 9.0)],
        "training/by_class/cat": [(1, 1.0)],
        "training/by_class/dog": [(1, float("inf"))],
        "test/loss": [(2, 0.25)],
    }
    with core.init(name="auto", resume="auto", tensorboard_mode=TensorboardMode.AUTO) as context:
        context.train.report_training_metrics(3, {"loss": 0.125})
        context.profiler.on(0.1, 1)
    found = scalars(place)
    # What lay beyond the checkpoint is gone.
    assert found["training/loss"] == [(1, 0.5), (3, 0.125)]
    assert [step for step, _ in found["system/cpu_percent"]] == [3]


def test_manual_gives_a_place_and_uploads_on_request_to_an_object_store(
    s3: str, cluster_run: Callable[..., RunDirectory]
) -> None:
    cluster_run(checkpoint_storage=s3)
    with core.init(tensorboard_mode=TensorboardMode.MANUAL) as context:
        context.train.report_training_metrics(1, {"loss": 0.5})
        place = context.train.get_tensorboard_path()
        assert place is not None
        assert list(place.iterdir()) == []
        (place / "plugins").mkdir()
        (place / "plugins" / "host.trace").write_text("one")
        (place / "notes").write_text("one")
        context.train.upload_tensorboard_files(
            lambda path: path.name != "notes", lambda path, rank: path.with_suffix(f".{rank}")
        )
        assert keys(s3) == ["c1/trial_7/plugins/host.0"]
        context.train.upload_tensorboard_files()
    assert sorted(keys(s3)) == [
        f"c1/trial_7/{name}" for name in ("notes", "plugins/host.0", "plugins/host.trace")
    ]
    assert storage_from(s3).list() == []


def test_auto_uploads_with_each_checkpoint_and_at_the_end(
    s3: str, cluster_run: Callable[..., RunDirectory]
) -> None:
    cluster_run(checkpoint_storage=s3)
    with core.init(tensorboard_mode=TensorboardMode.AUTO) as context:
        context.train.report_training_metrics(1, {"loss": 0.5})
        assert keys(s3) == []
        with context.checkpoint.store_path({"steps_completed": 1}):
            pass
        [key] = keys(s3)
        assert key.startswith("c1/trial_7/events.out.tfevents.")
        context.train.report_training_metrics(2, {"loss": 0.25})
    [key] = keys(s3)
    place = context.run_dir / "copy"
    place.mkdir()
    data = storage_from(s3).read_file("tensorboard", key, 0, 1 << 20)
    (place / Path(key).name).write_bytes(data)
    assert scalars(place) == {"training/loss": [(1, 0.5), (2, 0.25)]}


def test_a_trial_keeps_its_files_in_a_storage_that_is_a_directory(
    tmp_path: Path, cluster_run: Callable[..., RunDirectory]
) -> None:
    cluster_run()
    with core.init(tensorboard_mode=TensorboardMode.MANUAL) as context:
        place = context.train.get_tensorboard_path()
        context.train.upload_tensorboard_files()
        assert place == tmp_path / "storage" / "tensorboard" / "c1" / "trial_7"
        assert context.checkpoint.storage.list() == []


def test_what_does_not_fit_the_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with core.init() as context:
        assert context.train.get_tensorboard_path() is None
        with pytest.raises(RuntimeError, match=r"needs `TensorboardMode.MANUAL`, but the .* OFF"):
            context.train.upload_tensorboard_files()
    assert not (context.run_dir / "tensorboard").exists()
    monkeypatch.setattr("paceline.core._tensorboard_files.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs TensorBoard, .* pip install 'paceline"):
        core.init(tensorboard_mode=TensorboardMode.AUTO)


def test_a_disk_that_fails_ends_the_files_and_not_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with core.init(tensorboard_mode=TensorboardMode.AUTO) as context:
        # A file where the directory is to be.
        (context.run_dir / "tensorboard").write_text("")
        for step in (1, 2):
            context.train.report_training_metrics(step, {"loss": 0.5})
    assert caplog.text.count("TensorBoard files in") == 1
    assert "end here" in caplog.text
