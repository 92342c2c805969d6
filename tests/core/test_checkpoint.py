import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import core
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline.core import _background_checkpoints as _checkpoint_parts
from paceline.journal import (
    CheckpointDeleted,
    CheckpointFilesDeleted,
    CheckpointStored,
    JournalReader,
    RunDirectory,
)
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DirectoryStorage,
)
from paceline.storage._checkpoint_storage import is_of_other_trial


def store(context: core.Context, steps: int, content: str = "x", note: str = "") -> str:
    metadata = {"steps_completed": steps, "note": note}
    with context.checkpoint.store_path(metadata) as (path, uuid):
        (path / "model").write_text(content)
    return uuid


def test_stored_checkpoint_is_committed_recorded_and_latest(records_of: Callable[..., Any]) -> None:
    with core.init() as context:
        assert context.latest_checkpoint is None
        metadata = {"steps_completed": np.int64(3), "note": ("a", None)}
        with context.checkpoint.store_path(metadata) as (path, uuid):
            (path / "model").write_text("weights")
            assert context.latest_checkpoint is None
        assert context.latest_checkpoint == uuid
        assert context.checkpoint.get_metadata(uuid) == {"steps_completed": 3, "note": ["a", None]}
        with context.checkpoint.restore_path(uuid) as restored:
            assert (restored / "model").read_text() == "weights"
    (record,) = records_of(context.run_dir, CheckpointStored)
    assert (record.uuid, record.steps_completed, record.resources) == (uuid, 3, {"model": 7})
    assert record.storage == str(context.run_dir / "checkpoints")


def test_names_of_checkpoints_are_of_the_trial_of_the_master(
    cluster_run: Callable[..., RunDirectory], tmp_path: Path
) -> None:
    cluster_run()
    (tmp_path / "files").mkdir()
    with core.init() as context:
        uuids = [context.checkpoint.upload(tmp_path / "files", {"steps_completed": 1})]
        for shard in (False, True):
            with context.checkpoint.store_path({"steps_completed": 2}, shard=shard) as (_, uuid):
                uuids.append(uuid)
        uuids.append(context.checkpoint.parts(lambda record: None).new_series())
    assert len(set(uuids)) == 4
    assert all(is_of_other_trial(uuid, "c1", 8) for uuid in uuids)
    assert not any(is_of_other_trial(uuid, "c1", 7) for uuid in uuids)


def test_upload_and_download_copy_a_directory(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("1")
    with core.init() as context:
        uuid = context.checkpoint.upload(tmp_path / "source", {"steps_completed": 1})
        context.checkpoint.download(uuid, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "source").iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("metadata", "error", "match"),
    [
        (None, ValueError, "must hold 'steps_completed'"),
        ({}, ValueError, "must hold 'steps_completed'"),
        ({"steps_completed": "3"}, TypeError, "must be an integer, but got '3'"),
        ({"steps_completed": True}, TypeError, "must be an integer, but got True"),
        ({"steps_completed": 2.0}, TypeError, "must be an integer, but got 2.0"),
        ({"steps_completed": -1}, ValueError, "at least 0"),
        ({"steps_completed": 2**63}, ValueError, "must be below 2\\*\\*63, but got 9223"),
        ({"steps_completed": 1, "x": {1, 2}}, TypeError, "must be JSON-able.*set"),
        ({"steps_completed": 1, "x": float("nan")}, TypeError, "must be JSON-able"),
        ({"steps_completed": 1, "x": "\ud800"}, TypeError, "must be JSON-able"),
    ],
)
def test_wrong_metadata_is_refused_before_anything_is_written(
    tmp_path: Path, metadata: Any, error: type[Exception], match: str
) -> None:
    with core.init(checkpoint_storage=tmp_path / "storage") as context:
        with pytest.raises(error, match=match), context.checkpoint.store_path(metadata):
            pass
        with pytest.raises(error, match=match):
            context.checkpoint.upload(tmp_path, metadata)
    assert not (tmp_path / "storage").exists()


def test_metadata_larger_than_a_master_stores_is_refused(tmp_path: Path) -> None:
    metadata = {"steps_completed": 1, "large": "x" * 2**20}
    with core.init() as context, pytest.raises(ValueError, match="must have 1048576 bytes"):
        context.checkpoint.upload(tmp_path, metadata)


def test_metadata_that_no_list_could_show_is_refused(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"steps_completed": 1}
    for _ in range(70):
        metadata = {"steps_completed": 1, "deep": metadata}
    with core.init() as context, pytest.raises(TypeError, match="nested more than 64 times"):
        context.checkpoint.upload(tmp_path, metadata)


def test_failing_body_reports_nothing(records_of: Callable[..., Any]) -> None:
    def fail(context: core.Context) -> None:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "a").write_text("1")
            raise KeyError("mine")

    with core.init() as context:
        with pytest.raises(KeyError, match="mine"):
            fail(context)
        assert context.latest_checkpoint is None
    assert records_of(context.run_dir, CheckpointStored) == []
    assert list((context.run_dir / "checkpoints").iterdir()) == []


def test_deleted_checkpoint_is_gone_and_the_one_before_is_latest(
    records_of: Callable[..., Any],
) -> None:
    with core.init() as context:
        first, second = store(context, 1), store(context, 2)
        context.checkpoint.delete(second)
        assert context.latest_checkpoint == first
        with pytest.raises(CheckpointNotFoundError, match=second):
            context.checkpoint.get_metadata(second)
    assert [record.uuid for record in records_of(context.run_dir, CheckpointDeleted)] == [second]


def test_files_of_a_checkpoint_are_deleted_and_no_run_goes_on_from_it(
    records_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with core.init(name="part") as context:
        first = store(context, 1)
        with context.checkpoint.store_path({"steps_completed": 2}) as (path, uuid):
            (path / "model").write_text("weights")
            (path / "deep").mkdir()
            (path / "deep" / "optimizer_0").write_text("moments")
        context.checkpoint.delete(uuid, ["optimizer_*", "*.none"])
        context.checkpoint.delete(uuid, ["*.none"])
        assert context.latest_checkpoint == first
        assert context.checkpoint.get_metadata(uuid) == {"steps_completed": 2}
        with context.checkpoint.restore_path(uuid) as path:
            assert (path / "model").read_text() == "weights"
            assert not (path / "deep" / "optimizer_0").exists()
        for globs, error, match in (
            ("optimizer_*", TypeError, "must be a list of patterns, but got 'optimizer_"),
            ([], ValueError, "must hold a pattern"),
        ):
            with pytest.raises(error, match=match):
                context.checkpoint.delete(uuid, globs)
        context.preempt.settle()
    [record] = records_of(context.run_dir, CheckpointFilesDeleted)
    assert (record.uuid, record.resources) == (uuid, {"model": 7})
    with core.init(name="part", resume="auto") as context:
        assert context.latest_checkpoint == first
        # All files at once are the checkpoint.
        context.checkpoint.delete(first, ["*"])
        with pytest.raises(CheckpointNotFoundError):
            context.checkpoint.get_metadata(first)
    assert [r.uuid for r in records_of(context.run_dir, CheckpointDeleted)] == [first]


def test_selected_files_are_restored_by_one_rank(tmp_path: Path) -> None:
    with core.init() as context:
        uuid = store(context, 1)
        for mode in core.DownloadMode:
            target = tmp_path / mode.name
            context.checkpoint.download(uuid, target, mode, selector=lambda name: name == "x")
            assert list(target.iterdir()) == []
            with context.checkpoint.restore_path(uuid, mode) as path:
                assert (path / "model").read_text() == "x"
        with pytest.raises(TypeError, match="`download_mode` must be a DownloadMode, but got 'x'"):
            context.checkpoint.download(uuid, tmp_path, "x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="`selector` must be a function, but got 'model'"):
            context.checkpoint.restore_path(uuid, selector="model")  # type: ignore[arg-type]


def test_damaged_checkpoint_is_refused_by_name() -> None:
    with core.init() as context:
        uuid = store(context, 1)
        file = context.run_dir / "checkpoints" / uuid / "model"
        file.chmod(0o600)
        file.write_text("y")
        with (
            pytest.raises(CheckpointCorruptError, match="'model' was altered"),
            context.checkpoint.restore_path(uuid),
        ):
            pass


@pytest.mark.parametrize("spec", ["storage", "file://{}/storage", Path("storage"), None])
def test_storage_may_be_given_in_every_form(tmp_path: Path, spec: Any) -> None:
    if isinstance(spec, str):
        spec = spec.format(tmp_path)
    given: Any = DirectoryStorage("storage") if spec is None else spec
    with core.init(checkpoint_storage=given) as context:
        uuid = store(context, 1)
    assert DirectoryStorage(tmp_path / "storage").list() == [uuid]


def test_only_selected_files_are_uploaded(tmp_path: Path) -> None:
    (tmp_path / "source" / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.bin", "deep/c.txt"):
        (tmp_path / "source" / name).write_text(name)
    with core.init() as context:
        uuid = context.checkpoint.upload(
            tmp_path / "source", {"steps_completed": 1}, selector=lambda path: path.endswith("txt")
        )
        with pytest.raises(ValueError, match="must be a directory without `shard=True`, but is"):
            context.checkpoint.upload(None, {"steps_completed": 1})
        manifest = context.checkpoint.storage.manifest(uuid)
    assert manifest.resources == {"a.txt": 5, "deep/c.txt": 10}


@pytest.mark.root
def test_full_disk_is_a_clear_error_and_training_can_go_on(small_disk: Path) -> None:
    with core.init(checkpoint_storage=small_disk) as context:
        first = store(context, 1)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            store(context, 2, "x" * 2_000_000)
        assert context.latest_checkpoint == first
        third = store(context, 3)
        assert context.latest_checkpoint == third


@pytest.mark.root
@pytest.mark.parametrize("fills", ["before", "between"])
def test_a_checkpoint_that_cannot_be_recorded_is_not_acknowledged(
    small_disk: Path,
    tmp_path: Path,
    fill_disk: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    fills: str,
) -> None:
    """Its record in memory would end with the process, and the next one would remove it."""
    monkeypatch.chdir(small_disk)
    monkeypatch.setattr(_checkpoint_parts, "_RECORD_PATIENCE_S", 0.3)
    storage = DirectoryStorage(tmp_path / "storage")
    commit = DirectoryStorage.commit

    def commit_and_fill(self: DirectoryStorage, *args: Any, **kwargs: Any) -> Any:
        manifest = commit(self, *args, **kwargs)
        fill_disk(small_disk)
        return manifest

    with core.init(checkpoint_storage=tmp_path / "storage") as context:
        first = store(context, 1)
        with monkeypatch.context() as patch:
            if fills == "before":
                fill_disk(small_disk)
                # It is full once something was refused.
                context.train.report_training_metrics(1, {"loss": 1.0})
            else:
                patch.setattr(DirectoryStorage, "commit", commit_and_fill)
            with pytest.raises(CheckpointWriteError, match=r"was full for 0.3 s.*Hint: free some"):
                store(context, 2, note="x" * 5000)
        assert storage.list() == [first]
        assert context.latest_checkpoint == first
        (small_disk / "filler").unlink()
        third = store(context, 3)
    assert sorted(storage.list()) == sorted([first, third])
    with core.init(checkpoint_storage=tmp_path / "storage") as context:
        assert sorted(storage.list()) == sorted([first, third])


def test_why_a_checkpoint_cannot_be_recorded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_checkpoint_parts, "_RECORD_PATIENCE_S", 0.1)
    storage = DirectoryStorage(tmp_path / "storage")
    (tmp_path / "file").touch()
    journal = JournalWriter(tmp_path / "file" / "run" / "journal", close_patience_s=0.0)
    assert journal.refusal is None
    journal.append(CheckpointDeleted(time=0.0, uuid="other"))
    message = r"could not be written to for 0.1 s \(Not a directory\).*Hint: see that it is there"
    with pytest.raises(CheckpointWriteError, match=message):
        _checkpoint_parts.commit_checkpoint(
            RunDirectory(tmp_path), storage, journal, "a", {"steps_completed": 1}, num_shards=1
        )
    journal.close()
    assert "to the end (Not a directory): 1 records are lost" in caplog.text


@pytest.mark.root
def test_a_checkpoint_waits_for_space_for_its_record(
    small_disk: Path,
    tmp_path: Path,
    fill_disk: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(small_disk)
    with core.init(checkpoint_storage=tmp_path / "storage") as context:
        fill_disk(small_disk)
        context.train.report_training_metrics(1, {"loss": 1.0})
        timer = threading.Timer(0.5, (small_disk / "filler").unlink)
        timer.start()
        uuid = store(context, 1)
        timer.join()
        (journal,) = small_disk.glob("paceline_runs/*/journal/*")
        records = [entry.decode() for entry in JournalReader(journal)]
        assert [r.uuid for r in records if isinstance(r, CheckpointStored)] == [uuid]
