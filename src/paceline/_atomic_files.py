"""Files that readers see as a whole or not at all."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# A name that nobody can guess, and a file that was not there before: nobody's link is followed.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def replacing_atomically(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new file to write, which takes the place of another one when the block ends.

    If the block raises, the earlier file stays, and what was written is removed. Where others can
    write to the directory, use `replacing_below`.

    Args:
        path: The file to replace; its directory must exist.
        mode: The permissions of the new file, before the umask.
    """
    written = path.with_name(temporary_name(path.name))
    os.close(os.open(written, _NEW_FILE, mode))
    try:
        yield written
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_below(
    directory: int, name: str, *, owner: tuple[int, int] | None = None
) -> Iterator[IO[bytes]]:
    """Yield a new file to write, which takes the place of `name` when the block ends.

    Nothing that others put into the directory meanwhile is written to.

    Args:
        directory: The descriptor of the directory.
        name: The name of the file in it.
        owner: The ids of the user and the group that the file is to belong to; those of this
            process by default.

    Raises:
        OSError: The file cannot be written, or not be given away; the earlier one stays.
    """
    temporary = temporary_name(name)
    descriptor = os.open(temporary, _NEW_FILE, 0o666, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            facts = os.fstat(descriptor)
            if owner is not None and owner[0] != facts.st_uid:
                os.fchown(descriptor, *owner)
            yield file
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def temporary_name(name: str) -> str:
    """Return a name beside a file that nobody can guess, so that nobody puts a link there."""
    return f".{name}.{secrets.token_hex(8)}"


def sync_directory(path: Path) -> None:
    """Force the entries of a directory to disk.

    Raises:
        OSError: The disk refuses to, or the directory cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Force the content of a file to disk.

    Raises:
        OSError: The disk refuses to, or the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """Write a private file that readers see either not at all or as a whole.

    Args:
        path: The file; its directory must exist.
        data: The whole content.
        is_durable: Whether the file must survive the loss of the node as well; this waits for
            the disk.

    Raises:
        OSError: The file cannot be written; the previous one is intact.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if is_durable:
        sync_directory(path.parent)
