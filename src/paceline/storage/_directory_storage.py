"""Storage of checkpoints in directories of a local or shared file system."""

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from paceline import faults
from paceline._base.files import (
    open_regular_below,
    opened_below,
    opened_directory,
    replacing_below,
    sync_directory,
)
from paceline.storage import _checkpoint_directory, _checkpoint_errors, _checkpoint_files
from paceline.storage._checkpoint_directory import (
    CheckpointDirectory,
    NewDirectory,
    made_directory,
    mark_closed,
    mark_open,
    marked,
    opened_checkpoint,
    remove_leftover,
)
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)
from paceline.storage._checkpoint_storage import (
    PROBE_BYTES,
    UUID_FORM,
    CheckpointStorage,
    UuidList,
    check_uuid,
    raise_if_damaged,
)


class DirectoryStorage(CheckpointStorage):
    """Keep each checkpoint under ``<root>/<uuid>/``.

    Links in the path of the root are followed. Below it, none is, and special files are refused.

    Args:
        root: The directory; it is made at the first write.
        has_one_owner: Whether files that belong to another user than the directory of their
            checkpoint are refused, and leftovers of checkpoints stay unless the user who began them
            owns them: for who reads and deletes for others.
        owner: The id of the user to whom the directories of checkpoints must belong; any by
            default.
    """

    def __init__(
        self, root: str | Path, *, has_one_owner: bool = False, owner: int | None = None
    ) -> None:
        self._root = Path(os.path.abspath(Path(root).expanduser()))
        self._has_one_owner = has_one_owner
        self._owner = owner
        self._made_here: dict[str, os.stat_result] = {}

    def __repr__(self) -> str:
        return f"DirectoryStorage({str(self._root)!r})"

    @property
    def root(self) -> Path:
        """Directory with the checkpoints, as an absolute path."""
        return self._root

    @property
    def local_root(self) -> Path:
        """Directory with the checkpoints, as an absolute path."""
        return self._root

    @property
    def url(self) -> str:
        """The absolute path of the directory."""
        return str(self._root)

    @contextmanager
    def store_path(self, uuid: str, *, rank: int = 0) -> Iterator[Path]:
        """Yield ``<root>/<uuid>/``, empty, and finish the shard afterwards."""
        with self._storing(uuid, is_shared=False) as directory:
            yield directory.path
            _finish_shard(directory, rank, directory.sealed())

    def copy_in(self, uuid: str, source: Path, *, rank: int = 0) -> None:
        """Copy a directory's files; a link to a regular file is copied as its target."""
        source = Path(source)
        if not source.is_dir():
            raise NotADirectoryError(
                f"A checkpoint must be stored from a directory, but got {str(source)!r}."
            )
        names = _checkpoint_files.check_file_names(
            _checkpoint_files.list_files(source, follow_links=True)
        )
        self._check_uncommitted(self._path(uuid), rank)
        # Several ranks may bring their shards of one checkpoint, each its own files.
        with self._storing(uuid, is_shared=True) as directory:
            entries: dict[str, _checkpoint_files.FileEntry] = {}
            for name in names:
                if entries:
                    faults.reach("storage.between_files")
                entries[name] = directory.copy_in(source / name, name)
            _finish_shard(directory, rank, entries)

    @contextmanager
    def store_shard(self, uuid: str, rank: int) -> Iterator[Path]:
        """Yield a directory of its own within the checkpoint's; its files move up afterwards."""
        path = self._path(uuid)
        with ExitStack() as stack:
            with _checkpoint_errors.durable_write_errors(uuid, self._root):
                self._check_uncommitted(path, rank)
                directory = stack.enter_context(self._made(uuid, exist_ok=True))
                opened_own = made_directory(directory.descriptor, path / f".rank-{rank}")
                own = stack.enter_context(opened_own)
            faults.reach("storage.begun")
            try:
                with _checkpoint_errors.durable_write_errors(uuid, own.path):
                    yield own.path
                    directory.check_place()
                    entries = own.sealed()
                    _checkpoint_directory.move_files_up(
                        own.descriptor, directory.descriptor, entries
                    )
                    own.remove()
                    faults.reach("storage.before_done")
                    # Last: the done file vouches for files in their place.
                    _write_done(directory, rank, entries)
            except BaseException:
                own.remove()
                raise

    @contextmanager
    def _storing(self, uuid: str, *, is_shared: bool) -> Iterator[NewDirectory]:
        """Make the checkpoint's directory; remove the directory if the body fails."""
        with ExitStack() as stack:
            with _checkpoint_errors.durable_write_errors(uuid, self._root):
                directory = stack.enter_context(self._made(uuid, exist_ok=is_shared))
            faults.reach("storage.begun")
            try:
                with _checkpoint_errors.durable_write_errors(uuid, directory.path):
                    yield directory
            except BaseException:
                # Plain removal instead of `discard`: a user's file may have the manifest's name.
                directory.remove()
                mark_closed(self._root, uuid)
                raise

    @contextmanager
    def _made(self, uuid: str, *, exist_ok: bool) -> Iterator[NewDirectory]:
        """Make and yield the directory of a checkpoint."""
        path = self._path(uuid)
        self._make_root()
        with _checkpoint_errors.naming_files_below(self._root):
            mark_open(self._root, uuid)
        with (
            opened_directory(self._root) as root,
            made_directory(root, path, exist_ok=exist_ok) as directory,
        ):
            self._made_here[uuid] = directory.facts
            yield directory

    def _make_root(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
        self._root.mkdir(parents=True, exist_ok=True)
        # A power cut must not take the directory away from under a checkpoint that was committed.
        for path in missing:
            sync_directory(path.parent)

    def _check_uncommitted(self, path: Path, rank: int) -> None:
        if (path / _checkpoint_files.MANIFEST_NAME).exists() or (
            path / _checkpoint_files.done_name(rank)
        ).exists():
            raise FileExistsError(
                f"A checkpoint is immutable, but {path.name} has a shard of rank {rank} already."
                " Hint: store under a new UUID."
            )

    def discard(self, uuid: str) -> None:
        """Remove the files of a checkpoint without a manifest.

        Another directory than this storage has made stays.
        """
        made = self._made_here.pop(uuid, None)
        with suppress(OSError, CheckpointCorruptError), self._opened(uuid) as directory:
            if directory.has(_checkpoint_files.MANIFEST_NAME):
                return
            # A directory that somebody has put in its place is not ours to empty.
            if made is None or os.path.samestat(made, directory.facts):
                _checkpoint_files.empty_directory(directory.descriptor)
                with opened_directory(self._root) as root:
                    os.rmdir(uuid, dir_fd=root)
        mark_closed(self._root, uuid)

    def manifest(self, uuid: str) -> _checkpoint_files.Manifest:
        """Read ``manifest.json``."""
        try:
            with self._opened(uuid) as directory:
                return directory.manifest()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_found(uuid) from error

    def problems(self, manifest: _checkpoint_files.Manifest) -> dict[str, str]:
        """Compare the size and digest of every file with the manifest's."""
        try:
            with self._opened(manifest.uuid) as directory:
                return directory.problems(manifest.files)
        except (FileNotFoundError, NotADirectoryError):
            return dict.fromkeys(manifest.files, "is missing")

    @contextmanager
    def restore_path(
        self, uuid: str, *, selects: _checkpoint_files.Selector | None = None
    ) -> Iterator[Path]:
        """Verify the checkpoint, yield its own directory, and check for changes afterwards."""
        manifest = self.manifest(uuid).selected(selects)
        raise_if_damaged(uuid, self.problems(manifest))
        path = self._path(uuid)
        before = {name: _file_state(path / name) for name in manifest.files}
        yield path
        is_touched = any(_file_state(path / name) != before[name] for name in before)
        # Somebody else may have deleted the whole checkpoint meanwhile.
        if is_touched and self.exists(uuid) and (changed := self.problems(manifest)):
            details = ", ".join(f"{name} {reason}" for name, reason in changed.items())
            raise CheckpointCorruptError(
                "The files of a checkpoint must stay as they are, but in the block of"
                f" `restore_path` {details}: checkpoint {uuid} can no longer be used. Hint:"
                " `download` gives a copy that may be changed."
            )

    def open_file(self, uuid: str, name: str) -> IO[bytes]:
        """Open a file of a checkpoint for unbuffered reading; nothing is verified.

        Raises:
            CheckpointCorruptError: It is a link, a special file, or one of a user who is refused.
            FileNotFoundError: There is no such file.
        """
        with self._opened(uuid) as directory:
            return directory.open(name)

    def read_file(self, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file of a checkpoint."""
        with self.open_file(uuid, name) as file:
            file.seek(offset)
            pieces = []
            while size and (piece := file.read(size)):
                pieces.append(piece)
                size -= len(piece)
        return b"".join(pieces)

    def download(
        self, uuid: str, target: Path, *, selects: _checkpoint_files.Selector | None = None
    ) -> _checkpoint_files.Manifest:
        """Copy the files and compare the bytes read with the manifest."""
        manifest = self.manifest(uuid).selected(selects)
        target = Path(target)
        target.mkdir(parents=True, exist_ok=True)
        problems: dict[str, str] = {}
        for path, entry in manifest.files.items():
            try:
                with self.open_file(uuid, path) as file:
                    copied = _checkpoint_files.copy_stream(file, target / path)
            except FileNotFoundError:
                problems[path] = "is missing"
                continue
            if copied != entry:
                problems[path] = "was altered"
        raise_if_damaged(uuid, problems)
        return manifest

    def delete(self, uuid: str) -> None:
        """Remove the manifest, then the files."""
        self._delete(uuid, lambda directory: None)

    def delete_checked(
        self, uuid: str, check: Callable[[_checkpoint_files.Manifest], None]
    ) -> None:
        """Remove the manifest, if readable and passing the check, then the files."""
        self._delete(uuid, lambda directory: check(directory.manifest()))

    def _delete(self, uuid: str, check: Callable[[CheckpointDirectory], None]) -> None:
        try:
            with self._opened(uuid) as directory:
                check(directory)
                if directory.has(_checkpoint_files.MANIFEST_NAME):
                    mark_open(self._root, uuid)
                os.unlink(_checkpoint_files.MANIFEST_NAME, dir_fd=directory.descriptor)
                # Removal of the manifest on disk first: no power cut leaves it without its files.
                os.fsync(directory.descriptor)
                faults.reach("storage.after_manifest_deleted")
                _checkpoint_files.empty_directory(directory.descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._not_found(uuid, " to be deleted") from error
        with opened_directory(self._root) as root:
            os.rmdir(uuid, dir_fd=root)
        mark_closed(self._root, uuid)

    def _not_found(self, uuid: str, purpose: str = "") -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"Checkpoint {uuid} must be committed in {self.url!r}{purpose}, but there is none."
        )

    def replace_manifest(self, manifest: _checkpoint_files.Manifest) -> None:
        """Replace ``manifest.json``, then remove the files no longer named there."""
        with (
            _checkpoint_errors.durable_write_errors(manifest.uuid, self._root),
            self._opened(manifest.uuid) as directory,
        ):
            directory.write(
                _checkpoint_files.MANIFEST_NAME, _checkpoint_files.encode_with_checksum(manifest)
            )
        faults.reach("storage.after_manifest_replaced")
        with self._opened(manifest.uuid) as directory:
            for name in manifest.deleted:
                folder, _, last = name.rpartition("/")
                with (
                    suppress(FileNotFoundError),
                    opened_below(directory.descriptor, folder) as parent,
                ):
                    os.unlink(last, dir_fd=parent)

    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove marked checkpoints without a manifest and without recent changes."""
        now: list[float] = []

        def is_old(changed_s: float) -> bool:
            now[:] = now or [self._time_there()]
            return now[0] - changed_s >= older_than_s

        return [
            uuid
            for uuid in marked(self._root)
            if (among is None or uuid in among)
            and remove_leftover(self._root, uuid, is_old, has_one_owner=self._has_one_owner)
        ]

    def _time_there(self) -> float:
        """Return the file server's time: its clock stamps the changes of files."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._root, prefix=".clock-") as file:
                return Path(file.name).stat().st_mtime
        except OSError:
            return time.time()

    def probe(self) -> None:
        """Write, read and remove a file in the directory, which must be there."""
        name, data = f".probe-{uuid4()}", bytes(PROBE_BYTES)
        with opened_directory(self._root) as directory:
            with replacing_below(directory, name) as file:
                file.write(data)
            try:
                with open_regular_below(directory, name) as found:
                    is_same = found.read(len(data)) == data
            finally:
                os.unlink(name, dir_fd=directory)
        if not is_same:
            raise CheckpointError(f"{self._root} must give back what was written, but does not.")

    def list(self) -> UuidList:
        """Return the names of the directories with a manifest."""
        if not self._root.is_dir():
            return []
        names = sorted(name for name in os.listdir(self._root) if UUID_FORM.fullmatch(name))
        return [name for name in names if self._has_manifest(name)]

    def _has_manifest(self, uuid: str) -> bool:
        try:
            with self._opened(uuid) as directory:
                return directory.has(_checkpoint_files.MANIFEST_NAME)
        except (OSError, CheckpointCorruptError):
            return False

    def _read_done(self, uuid: str, rank: int) -> _checkpoint_files.ShardDone | None:
        try:
            with self._opened(uuid) as directory:
                return directory.done(rank)
        except FileNotFoundError:
            return None

    def _write_manifest(self, manifest: _checkpoint_files.Manifest) -> None:
        faults.reach("storage.before_manifest")
        try:
            with _checkpoint_errors.durable_write_errors(manifest.uuid, self._root):
                with self._opened(manifest.uuid) as directory:
                    directory.write(
                        _checkpoint_files.MANIFEST_NAME,
                        _checkpoint_files.encode_with_checksum(manifest),
                    )
                # A power cut could otherwise take the checkpoint's own entry.
                sync_directory(self._root)
        except BaseException:
            self.discard(manifest.uuid)
            raise
        self._made_here.pop(manifest.uuid, None)
        faults.reach("storage.after_manifest")
        mark_closed(self._root, manifest.uuid)

    def _path(self, uuid: str) -> Path:
        return self._root / check_uuid(uuid)

    def _opened(self, uuid: str) -> AbstractContextManager[CheckpointDirectory]:
        return opened_checkpoint(
            self._root, check_uuid(uuid), has_one_owner=self._has_one_owner, owner=self._owner
        )


def _finish_shard(
    directory: NewDirectory, rank: int, entries: dict[str, _checkpoint_files.FileEntry]
) -> None:
    _checkpoint_files.sync_directories(directory.descriptor)
    faults.reach("storage.before_done")
    _write_done(directory, rank, entries)


def _write_done(
    directory: NewDirectory, rank: int, entries: dict[str, _checkpoint_files.FileEntry]
) -> None:
    done = _checkpoint_files.ShardDone(rank=rank, files=entries)
    directory.write(_checkpoint_files.done_name(rank), _checkpoint_files.encode_with_checksum(done))
    directory.check_place()
    faults.reach("storage.after_done")


def _file_state(path: Path) -> tuple[int, int] | None:
    """Return modification time and size to detect writes to a file; None if the file is gone."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_mtime_ns, facts.st_size
