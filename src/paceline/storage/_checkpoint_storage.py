"""Base class of checkpoint storages, and UUIDs of checkpoints."""

import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID, uuid4, uuid5

import msgspec

from paceline.storage import _checkpoint_files
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from paceline.storage._uploads import FileSender

UuidList: TypeAlias = list[str]
RankList: TypeAlias = list[int]

PROBE_BYTES = 4096
"""Size of what a probe writes: a block of a file system."""
UUID_FORM = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")


class CheckpointStorage(ABC):
    """Storage of checkpoints by a commit protocol: each exists as a whole or not at all.

    Every rank stores its files (`store_path` or `copy_in`), which ends in `rank-<n>.done`; then
    the chief calls `commit`, which writes the manifest last. No step needs a rename or a view of
    another node's disk, so object stores fit as well as directories.

    Implementers override the abstract methods; all of them may be called from any thread, and by
    several processes at once for different checkpoints.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Location of this storage in the form accepted by `storage_from`."""

    @classmethod
    def from_url(cls, url: str) -> "CheckpointStorage":
        """Return the storage at a URL; for packages offering a storage by URL scheme.

        Raises:
            ValueError: The URL does not fit; the message shows the expected form.
        """
        raise ValueError(f"`checkpoint_storage` must not be a URL of {cls.__name__}: {url!r}.")

    @property
    def local_root(self) -> Path | None:
        """The directory on this machine with ``<uuid>/`` for each checkpoint, or None."""
        return None

    @property
    def is_remote(self) -> bool:
        """Whether every machine with credentials reaches this storage by its URL."""
        return False

    def watch(self, on_trouble: Callable[[str | None], None] | None) -> None:  # noqa: B027
        """Register a function to call when the storage stops answering, if the storage can tell.

        Args:
            on_trouble: Called, in any thread, with the reason once the storage has not answered for
                some seconds, and with None once it answers again; None calls nothing any more.
        """

    def in_a_hurry(self) -> "CheckpointStorage":
        """Return this storage, from now on giving up soon on a silent server.

        Use it for work that is repeated later, and must not hold up other work.
        """
        return self

    def probe(self) -> None:
        """Write, read and delete something small; a read-only storage reads.

        Raises:
            CheckpointError: The storage does not do so.
            OSError: It does not do so.
        """
        self.exists("probe")

    @abstractmethod
    def store_path(self, uuid: str, *, rank: int = 0) -> AbstractContextManager[Path]:
        """Return a context manager with an empty directory to write a new checkpoint's files to.

        Leaving it makes the files durable and writes the rank's done file; leaving it by an
        exception removes everything that this storage holds of the checkpoint.

        Raises:
            CheckpointWriteError: The files cannot be written.
        """

    @abstractmethod
    def copy_in(self, uuid: str, source: Path, *, rank: int = 0) -> None:
        """Store the files of a directory as a rank's part of a new checkpoint.

        Raises:
            NotADirectoryError: `source` is no directory.
            CheckpointWriteError: The files cannot be written.
        """

    @abstractmethod
    def store_shard(self, uuid: str, rank: int) -> AbstractContextManager[Path]:
        """Return a context manager with an empty directory for a rank's files of a checkpoint.

        Several ranks may store at once, each files of other names. Leaving it makes the files
        durable and writes the rank's done file; leaving it by an exception removes them.

        Raises:
            FileExistsError: The rank, or another one, has stored such a file already.
            CheckpointWriteError: The files cannot be written.
        """

    def file_sender(self, directory: Path) -> FileSender | None:
        """Return a function storing large files from memory without a copy on the local disk.

        Args:
            directory: The directory that `store_path` or `store_shard` yields, within its block.

        Returns:
            The function, which stores a file as if it were in the directory; None if files must
            be written there.
        """
        return None

    @abstractmethod
    def discard(self, uuid: str) -> None:
        """Remove the files of an uncommitted checkpoint."""

    @abstractmethod
    def manifest(self, uuid: str) -> _checkpoint_files.Manifest:
        """Return the manifest of a committed checkpoint.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointVersionError: It has another format version.
            CheckpointCorruptError: Its manifest is damaged.
        """

    @abstractmethod
    def problems(self, manifest: _checkpoint_files.Manifest) -> dict[str, str]:
        """Return the problems of a checkpoint's files: relative path to reason."""

    @abstractmethod
    def restore_path(
        self, uuid: str, *, selects: _checkpoint_files.Selector | None = None
    ) -> AbstractContextManager[Path]:
        """Return a context manager with a read-only directory of the verified files.

        With `selects`, only the files that it selects are verified and sure to be there.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointCorruptError: Files are missing or altered, or were written to in the block.
        """

    @abstractmethod
    def read_file(self, uuid: str, name: str, offset: int, size: int) -> bytes:
        """Return a piece of a file of a checkpoint, shorter at its end; nothing is verified.

        Raises:
            FileNotFoundError: There is no such file.
        """

    @abstractmethod
    def download(
        self, uuid: str, target: Path, *, selects: _checkpoint_files.Selector | None = None
    ) -> _checkpoint_files.Manifest:
        """Copy a checkpoint's files, or the selected files, and verify the copies.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointCorruptError: Files are missing or altered.
        """

    @abstractmethod
    def delete(self, uuid: str) -> None:
        """Delete a checkpoint, its manifest first.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
        """

    def delete_checked(
        self, uuid: str, check: Callable[[_checkpoint_files.Manifest], None]
    ) -> None:
        """Delete a checkpoint with a readable manifest, if the check of the manifest passes.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointCorruptError: Its manifest is damaged; nothing is deleted.
        """
        check(self.manifest(uuid))
        self.delete(uuid)

    @abstractmethod
    def sweep(self, *, older_than_s: float, among: Collection[str] | None = None) -> UuidList:
        """Remove leftovers of checkpoints never committed; return their UUIDs.

        Args:
            older_than_s: How many seconds must have passed since the last write to any of their
                files, by the clock of the storage, so that checkpoints which are being written
                stay. If above 0, those whose writer may take longer for a file stay for as long.
            among: The UUIDs that are removed; all by default.
        """

    @abstractmethod
    def list(self) -> UuidList:
        """Return the UUIDs of all committed checkpoints, sorted."""

    @abstractmethod
    def _read_done(self, uuid: str, rank: int) -> _checkpoint_files.ShardDone | None:
        """Return a rank's done file, or None if not written yet."""

    @abstractmethod
    def _write_manifest(self, manifest: _checkpoint_files.Manifest) -> None:
        """Write the manifest atomically, after everything else is durable."""

    def commit(
        self, uuid: str, metadata: dict[str, Any], *, num_shards: int = 1, origin: str = ""
    ) -> _checkpoint_files.Manifest:
        """Make a checkpoint exist, once all its shards are stored.

        Args:
            uuid: The checkpoint.
            metadata: JSON-able values.
            num_shards: How many ranks have stored a part.
            origin: The `Manifest.origin`.

        Raises:
            CheckpointCorruptError: A shard is missing, or two shards hold the same path with
                different content.
            FileExistsError: Another process has committed it, as far as the storage knows.
            CheckpointWriteError: The manifest cannot be written, or the storage does not answer.
        """
        files: dict[str, _checkpoint_files.FileEntry] = {}
        for rank in range(num_shards):
            done = self._done_of(uuid, rank)
            if done is None:
                raise CheckpointCorruptError(
                    f"Checkpoint {uuid} must have {num_shards} finished shards to be committed,"
                    f" but that of rank {rank} is missing."
                )
            for path, entry in done.files.items():
                if files.setdefault(path, entry) != entry:
                    raise CheckpointCorruptError(
                        f"The shards of checkpoint {uuid} must agree on every file they share,"
                        f" but rank {rank} holds another {path!r}."
                    )
        manifest = _checkpoint_files.Manifest(
            uuid=uuid,
            created=time.time(),
            metadata=metadata,
            files=dict(sorted(files.items())),
            origin=origin,
        )
        self._write_manifest(manifest)
        return manifest

    def delete_files(
        self, uuid: str, selects: _checkpoint_files.Selector
    ) -> _checkpoint_files.Manifest:
        """Delete the selected files of a checkpoint, and return its new manifest.

        The other files stay as they are. The new manifest is written first, so a crash leaves
        unnamed files behind, until the whole checkpoint is deleted.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointWriteError: The manifest cannot be written; nothing was deleted.
            ValueError: All files are selected: delete the checkpoint instead.
        """
        manifest = self.manifest(uuid)
        gone = [path for path in manifest.files if selects(path)]
        if not gone:
            return manifest
        if len(gone) == len(manifest.files):
            raise ValueError(
                f"A checkpoint must keep a file, but all {len(gone)} of {uuid} are to be deleted."
                " Hint: delete the whole checkpoint."
            )
        kept = {path: entry for path, entry in manifest.files.items() if path not in set(gone)}
        smaller = msgspec.structs.replace(
            manifest, files=kept, deleted=sorted({*manifest.deleted, *gone})
        )
        self.replace_manifest(smaller)
        return smaller

    def replace_manifest(self, manifest: _checkpoint_files.Manifest) -> None:
        """Write a manifest with fewer files than the present manifest; remove the other files.

        Raises:
            CheckpointWriteError: The manifest cannot be written; nothing was removed.
            NotImplementedError: This storage cannot do so.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot delete single files.")

    def put_file(self, name: str, file: Path) -> None:
        """Store a file outside of checkpoints; an earlier file of the same name is replaced.

        Args:
            name: A relative path with a slash in it, such as "tensorboard/trial_1/events".
            file: The file.

        Raises:
            OSError: It cannot be written.
            NotImplementedError: This storage keeps checkpoints alone.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps checkpoints alone.")

    def missing_shards(self, uuid: str, num_shards: int) -> RankList:
        """Return the ranks with an unfinished shard of a checkpoint.

        Raises:
            CheckpointCorruptError: A rank's record of its shard is damaged.
            CheckpointWriteError: The storage does not answer.
        """
        return [rank for rank in range(num_shards) if self._done_of(uuid, rank) is None]

    def _done_of(self, uuid: str, rank: int) -> _checkpoint_files.ShardDone | None:
        with failing_as_write(f"whether rank {rank} has stored its part of checkpoint {uuid}"):
            return self._read_done(uuid, rank)

    def exists(self, uuid: str) -> bool:
        """Return whether a committed checkpoint of this format is there."""
        try:
            self.manifest(uuid)
        except CheckpointNotFoundError:
            return False
        return True

    def verify(self, uuid: str) -> _checkpoint_files.Manifest:
        """Check every file of a checkpoint against its manifest, and return the manifest.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            CheckpointVersionError: It has another format version.
            CheckpointCorruptError: Files are missing or altered; the message names each.
        """
        manifest = self.manifest(uuid)
        raise_if_damaged(uuid, self.problems(manifest))
        return manifest


@contextmanager
def failing_as_write(what: str) -> Iterator[None]:
    """Turn failures of a storage read during a commit into write errors.

    Args:
        what: The question, as "whether ...".

    Raises:
        CheckpointWriteError: The body has raised an error that says nothing of the checkpoint.
    """
    try:
        yield
    except (CheckpointCorruptError, CheckpointWriteError):
        raise
    except (CheckpointError, OSError) as error:
        raise CheckpointWriteError(f"It cannot be seen {what}. {error}") from error


def raise_if_damaged(uuid: str, problems: dict[str, str]) -> None:
    """Raise if there is a problem with a file.

    Raises:
        CheckpointCorruptError: There is; the message names each file.
    """
    if problems:
        details = ", ".join(f"{path!r} {reason}" for path, reason in problems.items())
        raise CheckpointCorruptError(
            f"Checkpoint {uuid} must be whole to be used, but {details}."
            " Hint: use another checkpoint."
        )


def check_uuid(uuid: str) -> str:
    """Return a UUID after checking its safety as a name in a storage.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(uuid, str) or not UUID_FORM.fullmatch(uuid):
        raise ValueError(
            "A checkpoint's UUID must consist of letters, digits, hyphens and underscores,"
            f" but got {uuid!r}."
        )
    return uuid


if TYPE_CHECKING:
    pass


OPEN_NAME = ".open"


@contextmanager
def restored(storage: CheckpointStorage, uuid: str) -> Iterator[Path]:
    """Yield a directory with the verified files of a checkpoint, to read only.

    Raises:
        CheckpointCorruptError: Files are missing or altered.
        CheckpointNotFoundError: There is no such checkpoint, or it was deleted meanwhile.
    """
    try:
        with storage.restore_path(uuid) as path:
            yield path
    except CheckpointNotFoundError:
        raise
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        # A deletion during the read looks like damage.
        if storage.exists(uuid):
            raise
        raise _gone(f"{uuid} in {storage.url!r}", "it was deleted meanwhile") from error


@contextmanager
def reporting_deletion(path: Path) -> Iterator[None]:
    """Make read errors report the deletion of a checkpoint if the checkpoint was deleted.

    Args:
        path: The checkpoint's directory, or another place of weights.

    Raises:
        CheckpointNotFoundError: The body has failed, and the checkpoint is no longer there.
    """
    was_whole, was_there = (path / _checkpoint_files.MANIFEST_NAME).exists(), path.exists()
    try:
        yield
    except CheckpointNotFoundError:
        raise
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        is_whole = (path / _checkpoint_files.MANIFEST_NAME).exists()
        # A deletion takes the manifest first.
        is_unfinished = not is_whole and (path.parent / OPEN_NAME / path.name).exists()
        if (was_whole and not is_whole) or (was_there and not path.exists()):
            happened = "it was deleted meanwhile"
        elif is_unfinished:
            happened = "it is being deleted, or is not whole yet"
        else:
            raise
        raise _gone(f"in {str(path)!r}", happened) from error


def _gone(place: str, happened: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"The checkpoint {place} must be there while it is read, but {happened}. Hint: take a newer"
        " one; a run deletes the checkpoints that its rules do not keep."
    )


_UUID_DIGEST_BYTES = 6


def new_uuid(cluster_id: str = "", trial_id: int | None = None) -> str:
    """Return a new UUID; for a trial of a master, version 8 with the trial's digest at its end."""
    if not cluster_id or trial_id is None:
        return str(uuid4())
    return _with_end(uuid4(), _digest(cluster_id, trial_id))


def series_uuid(first: str, number: int) -> str:
    """Return a UUID derived from a new UUID by a number, for the same trial."""
    series = UUID(first)
    uuid = uuid5(series, str(number))
    return str(uuid) if series.version != 8 else _with_end(uuid, series.bytes[-_UUID_DIGEST_BYTES:])


def is_of_other_trial(uuid: str, cluster_id: str, trial_id: int) -> bool:
    """Return whether a name can only belong to another trial's checkpoint."""
    try:
        found = UUID(uuid)
    except ValueError:
        return False
    return found.version == 8 and found.bytes[-_UUID_DIGEST_BYTES:] != _digest(cluster_id, trial_id)


def _digest(cluster_id: str, trial_id: int) -> bytes:
    return hashlib.sha256(f"{cluster_id}.{trial_id}".encode()).digest()[:_UUID_DIGEST_BYTES]


def _with_end(uuid: UUID, end: bytes) -> str:
    data = bytearray(uuid.bytes[:-_UUID_DIGEST_BYTES] + end)
    data[6] = data[6] & 0x0F | 0x80
    return str(UUID(bytes=bytes(data)))
