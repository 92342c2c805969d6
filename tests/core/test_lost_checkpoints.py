"""Runs whose checkpoints were moved, copied, lost or kept go on from the right one, or say so."""

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from paceline import core
from paceline._training.engine.checkpoints.checkpoint_saver import KeptCheckpoints
from paceline.journal import NotARunDirectoryError, RunDirectory
from paceline.storage import CheckpointNotFoundError, CheckpointWriteError, DirectoryStorage
from paceline.storage._retention_rules import Kept, RetentionRules


def stopped(*steps: int, **options: Any) -> core.Context:
    """Run an attempt that stores checkpoints at steps and ends by an error."""
    kept: list[core.Context] = []

    def train() -> None:
        with core.init(name="lost", **options) as context:
            kept.append(context)
            for step in steps:
                with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "model").write_text(str(step))
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        train()
    return kept[0]


def resumed(**options: Any) -> int | None:
    """Return the step of the checkpoint that the run goes on from."""
    with core.init(name="lost", resume="auto", **options) as context:
        if context.latest_checkpoint is None:
            return None
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            return int((Path(path) / "model").read_text())


def checkpoints(context: core.Context) -> list[Path]:
    """Return the directories of the checkpoints, the oldest first."""
    storage = context.checkpoint.storage
    found = [Path(storage.url, uuid) for uuid in storage.list()]
    return sorted(found, key=lambda path: int((path / "model").read_text()))


def test_another_storage_that_lacks_the_newest_checkpoint_is_refused(tmp_path: Path) -> None:
    """The run began anew there, without a word."""
    old, new = tmp_path / "old", tmp_path / "new"
    stopped(3, checkpoint_storage=str(old))
    told = r"newest checkpoint of the run, .* of step 3, must be in '.*/new' .* it is in '.*/old'"
    with pytest.raises(CheckpointNotFoundError, match=told):
        resumed(checkpoint_storage=str(new))
    shutil.copytree(old, new)
    stopped(5, checkpoint_storage=str(new), resume="auto")
    # The run has recorded the old one, which lacks the newest now.
    with pytest.raises(CheckpointNotFoundError, match=r"of step 5, must be in '.*/old'"):
        resumed()
    assert resumed(checkpoint_storage=str(new)) == 5


def test_a_missing_checkpoint_is_passed_over_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = stopped(3, 5)
    newest = checkpoints(run)[-1]
    (newest / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert resumed() == 3
    assert f"Passing over checkpoint {newest.name} of step 5: it is not in" in caplog.text


@pytest.mark.parametrize("is_storage_gone", [False, True])
def test_a_run_of_which_all_checkpoints_are_missing_does_not_begin_anew(
    is_storage_gone: bool, tmp_path: Path
) -> None:
    """A file system that is not mounted is an empty directory, or none."""
    storage = tmp_path / "storage"
    stopped(3, 5, checkpoint_storage=str(storage))
    storage.rename(tmp_path / "away")
    if not is_storage_gone:
        storage.mkdir()
    with pytest.raises(
        CheckpointNotFoundError, match=r"none is there; the newest was .* of step 5"
    ):
        resumed()
    if not is_storage_gone:
        storage.rmdir()
    (tmp_path / "away").rename(storage)
    assert resumed() == 5


def test_what_a_run_has_deleted_itself_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    run = stopped(3)
    with core.init(name="lost", resume="auto") as context:
        assert context.latest_checkpoint is not None
        context.checkpoint.delete(context.latest_checkpoint)
        context.train.report_training_metrics(4, {"loss": 1.0})
    assert context.run_dir == run.run_dir
    with core.init(name="lost", resume=str(run.run_dir)) as context:
        assert context.latest_checkpoint is None
    assert "Passing over" not in caplog.text


def test_a_copied_run_directory_has_the_checkpoints_that_were_copied_with_it(
    tmp_path: Path,
) -> None:
    run = stopped(3)
    copy = tmp_path / "copy"
    shutil.copytree(run.run_dir, copy)
    with core.init(name="lost", resume=str(copy)) as context:
        assert context.checkpoint.storage.url == str(copy / "checkpoints")
        assert context.latest_checkpoint is not None
        context.checkpoint.delete(context.latest_checkpoint)
    assert list((copy / "checkpoints").glob("[!.]*")) == []
    # They were those of the original.
    assert resumed() == 3


def test_a_checkpoint_that_could_be_deleted_by_half_is_deleted_with_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.storage import _checkpoint_files

    empty, failures = _checkpoint_files.empty_directory, [OSError(errno.EBUSY, "Device is busy")]

    def empty_later(directory: int) -> None:
        if failures:
            raise failures.pop()
        empty(directory)

    monkeypatch.setattr(_checkpoint_files, "empty_directory", empty_later)
    with core.init(name="lost") as context:
        storage = context.checkpoint.storage
        assert isinstance(storage, DirectoryStorage)
        kept = KeptCheckpoints(
            [], rules=RetentionRules(latest=1),
            delete=lambda one: context.checkpoint.delete(one.uuid),
        )  # fmt: skip
        stored = []
        for step in range(3):
            with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
                (path / "model").write_text(str(step))
            stored.append(uuid)
            kept.add(Kept(uuid, step, None))
            if step == 1:
                # Its manifest is gone, and its files are not.
                assert storage.list() == stored[1:]
                assert (storage.root / stored[0] / "model").exists()
                assert "A checkpoint is not deleted before the next one." in caplog.text
        assert [path.name for path in storage.root.iterdir() if path.is_dir()] == [
            *([".open"] if (storage.root / ".open").exists() else []), stored[2],
        ]  # fmt: skip
        assert not (storage.root / stored[0]).exists()


def test_a_checkpoint_in_a_bucket_that_is_deleted_by_half_is_deleted_the_next_time(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.storage._s3_azure_gcs_storage import BucketStorage

    remove, failures = BucketStorage.remove, [CheckpointWriteError("The server does not answer.")]

    def remove_later(storage: BucketStorage, keys: list[str]) -> None:
        if failures and not any(key.endswith("manifest.json") for key in keys):
            raise failures.pop()
        remove(storage, keys)

    with core.init(name="lost", checkpoint_storage=s3) as context:
        storage = context.checkpoint.storage
        assert isinstance(storage, BucketStorage)
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
            (path / "model").write_text("1")
        monkeypatch.setattr(BucketStorage, "remove", remove_later)
        with pytest.raises(CheckpointWriteError):
            context.checkpoint.delete(uuid)
        assert [*storage.objects(f"{uuid}/")] != []
        context.checkpoint.delete(uuid)
        assert [*storage.objects("")] == []
        with pytest.raises(CheckpointNotFoundError):
            context.checkpoint.delete(uuid)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT])
def test_a_directory_that_cannot_be_written_to_for_a_moment_is_told_as_such(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that training goes on, as with a full disk."""
    from paceline.storage import _checkpoint_files

    def fail(*_: Any, **__: Any) -> Callable[..., Any]:
        raise OSError(error, "not now")

    with core.init(name="lost") as context:
        monkeypatch.setattr(_checkpoint_files, "write_durably_below", fail)
        with (
            pytest.raises(CheckpointWriteError, match="Hint: see that the directory is there"),
            context.checkpoint.store_path({"steps_completed": 1}) as (path, _),
        ):
            (path / "model").write_text("1")


def test_a_run_whose_journal_is_lost_says_that_checkpoints_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = stopped(3)
    [newest] = checkpoints(run)
    for path in (run.run_dir / "journal").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert resumed() is None
    assert f"tells of no checkpoint, but 1 are there, such as {newest.name}" in caplog.text
    # What it says to do.
    with core.init(name="other", resume=newest.as_uri()) as context:
        assert context.latest_checkpoint == newest.name


def test_the_directory_of_a_checkpoint_is_no_run_to_resume() -> None:
    [newest] = checkpoints(stopped(3))
    with (
        pytest.raises(NotARunDirectoryError, match=rf"Hint: '{newest.as_uri()}' is its URL"),
        core.init(name="lost", resume=str(newest)),
    ):
        pass


def test_patterns_that_match_no_file_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with core.init(name="lost") as context:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
            (path / "model").write_text("1")
        context.checkpoint.delete(uuid, ["optimiser_*"])
        assert f"No file of checkpoint {uuid} is deleted: none matches" in caplog.text
        context.checkpoint.storage.verify(uuid)


def test_a_copy_leaves_what_the_original_was_storing(tmp_path: Path) -> None:
    run = stopped(3)
    [stored] = checkpoints(run)
    original = RunDirectory(run.run_dir)
    # The original was about to store another one when it was copied, and has committed it since.
    original.note_checkpoint(stored.name, str(original.checkpoints_path))
    copy = tmp_path / "copy"
    shutil.copytree(run.run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / stored.name)
    for path in (copy / "journal").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with core.init(name="lost", resume=str(copy)):
        pass
    assert [path.name for path in checkpoints(run)] == [stored.name]


def test_a_deletion_that_was_cut_off_is_known_to_all_who_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = stopped(3)
    [stored] = checkpoints(run)
    directory = RunDirectory(run.run_dir)
    directory.note_checkpoint(stored.name, str(directory.checkpoints_path))
    (stored / "manifest.json").unlink()
    for _ in range(3):
        assert stopped(resume=str(run.run_dir)).latest_checkpoint is None
    assert "Passing over" not in caplog.text


def test_an_error_about_a_file_of_the_users_own_is_raised_as_it_is(tmp_path: Path) -> None:
    """Training does not go on without it, as it would without a checkpoint."""
    with (
        core.init(name="lost") as context,
        pytest.raises(PermissionError, match="secret"),
        context.checkpoint.store_path({"steps_completed": 1}),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "secret"))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Path.exists() hides these errors there")
@pytest.mark.parametrize("error", [errno.ESTALE, errno.ETIMEDOUT])
def test_a_file_server_that_is_away_is_told_as_such(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with core.init(name="lost") as context:
        storage = context.checkpoint.storage
        stat = os.stat

        def fail(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(storage.url):
                raise OSError(error, "away", str(path))
            return stat(path, *arguments, **options)

        for store in (
            lambda: context.checkpoint.store_path({"steps_completed": 1}),
            lambda: storage.store_shard(str(uuid4()), 0),
            lambda: storage.store_shard(str(uuid4()), 2),
        ):
            with monkeypatch.context() as away:
                away.setattr(os, "stat", fail)
                with pytest.raises(CheckpointWriteError, match="cannot be written to"), store():
                    pass
