"""Files that readers see as a whole or not at all."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Two threads may write the same file at once.
_numbers = itertools.count()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
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
