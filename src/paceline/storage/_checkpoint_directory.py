"""The directory of one checkpoint, opened once: whatever others put in its place is not touched."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from paceline._regular_files import (
    NotRegularFileError,
    open_regular_below,
    opened_below,
    opened_directory,
    read_limited,
)
from paceline.storage import _durable_files
from paceline.storage._errors import CheckpointCorruptError
from paceline.storage._manifest import (
    MANIFEST_NAME,
    MAX_TEXT_BYTES,
    FileEntry,
    Manifest,
    ShardDone,
    decode_done,
    decode_manifest,
    done_name,
)


class CheckpointDirectory:
    """Reads and writes files of a checkpoint below the descriptor of its directory.

    No link is followed at any level, special files are refused, and nothing waits for others.

    Args:
        descriptor: The descriptor; the caller closes it.
        path: Where the directory is, for messages.
        has_one_owner: Whether files that belong to another user than the directory are refused.
    """

    def __init__(self, descriptor: int, path: Path, *, has_one_owner: bool) -> None:
        self.descriptor = descriptor
        self.path = path
        self.facts = os.fstat(descriptor)
        self._owners = [self.facts.st_uid] if has_one_owner else None

    def open(self, name: str) -> IO[bytes]:
        """Open a file for unbuffered reading.

        Raises:
            CheckpointCorruptError: It is a link or a special file, or belongs to another user.
            FileNotFoundError: There is no such file.
        """
        with refusing_links(self.path):
            return open_regular_below(self.descriptor, name, owners=self._owners)

    def has(self, name: str) -> bool:
        """Tell whether something of a name is there."""
        try:
            os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def manifest(self) -> Manifest:
        """Return the checkpoint's manifest.

        Raises:
            CheckpointCorruptError: It is damaged, a link, or of another checkpoint.
            CheckpointVersionError: It has another format version.
            FileNotFoundError: There is none.
        """
        return decode_manifest(self._read(MANIFEST_NAME), self.path.name)

    def done(self, rank: int) -> ShardDone | None:
        """Return a rank's done file, None if there is none; raises like `manifest`."""
        try:
            data = self._read(done_name(rank))
        except FileNotFoundError:
            return None
        return decode_done(data, self.path.name, rank)

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the commit protocol durably.

        Where files belong to one user, it is given to the owner of the directory.
        """
        owner = None if self._owners is None else (self.facts.st_uid, self.facts.st_gid)
        _durable_files.write_durably_below(self.descriptor, name, data, owner=owner)

    def problems(self, files: Mapping[str, FileEntry]) -> dict[str, str]:
        """Return what is wrong with files, by their name: they are compared with their digests."""
        found = {name: self._problem(name, entry) for name, entry in files.items()}
        return {name: reason for name, reason in found.items() if reason is not None}

    def _problem(self, name: str, entry: FileEntry) -> str | None:
        try:
            with self.open(name) as file:
                return problem_of_file(file, entry)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return "is missing"
        except CheckpointCorruptError as error:
            return f"is none of the checkpoint's files ({error})"

    def _read(self, name: str) -> bytes:
        with self.open(name) as file, refusing_links(self.path):
            return read_limited(file, MAX_TEXT_BYTES)


def problem_of_file(file: IO[bytes], entry: FileEntry) -> str | None:
    """Return what is wrong with an open file, from its beginning on; None if nothing is."""
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        return entry.difference(FileEntry(size, ""))
    found = _durable_files.digest_stream(file)
    return None if found == entry else entry.difference(found)


@contextmanager
def opened_checkpoint(
    root: Path, uuid: str, *, has_one_owner: bool = False
) -> Iterator[CheckpointDirectory]:
    """Yield the directory of a checkpoint; links in the path of the root are followed, once.

    Raises:
        CheckpointCorruptError: A link is in its place.
        FileNotFoundError: There is no such directory.
        NotADirectoryError: A file is there.
    """
    with refusing_links(root / uuid), opened_directory(root) as above:
        opened = opened_below(above, uuid)
        with opened as descriptor:
            yield CheckpointDirectory(descriptor, root / uuid, has_one_owner=has_one_owner)


@contextmanager
def refusing_links(path: Path) -> Iterator[None]:
    """Have files of a checkpoint that are none say so.

    Raises:
        CheckpointCorruptError: The body has met a link, a special file or a foreign file.
    """
    try:
        yield
    except NotRegularFileError as error:
        raise CheckpointCorruptError(
            f"Checkpoint {path.name} must consist of regular files and directories of one user, but"
            f" {error.filename!r} is something else ({error.strerror}). Hint: copy what it is to"
            " hold, and see who can write there."
        ) from error
