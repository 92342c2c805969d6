"""Files that readers see as a whole or not at all."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Two threads may write the same file at once.
_numbers = itertools.count()


@contextmanager
def replacing_atomically(path: Path) -> Iterator[Path]:
    """Yield a file to write, which takes the place of another one when the block ends.

    If the block raises, the earlier file stays, and what was written is removed.

    Args:
        path: The file to replace; its directory must exist.
    """
    written = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}")
    try:
        yield written
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    written.replace(path)


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
