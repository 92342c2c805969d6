"""Temporary directories for the files of checkpoints, which a killed process cannot remove."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# No other directories have this name: without a lock, one of it is removed.
_PREFIX = "paceline-locked-"
# Until it is locked, a directory has another name, so that nobody takes it for a killed one's.
_NEW_PREFIX = "paceline-new-"


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield an empty directory below TMPDIR, and remove those that killed processes have left.

    Whoever uses one holds a lock on it, which the system takes back from a process that ends.
    """
    root = Path(tempfile.gettempdir())
    _remove_left(root)
    new = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX))
    path = new.with_name(new.name.replace(_NEW_PREFIX, _PREFIX, 1))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A file system without locks has no leftovers removed.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.rename(new, path)
        yield path
    finally:
        for each in (new, path):
            shutil.rmtree(each, ignore_errors=True)
        os.close(lock)


def _remove_left(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        # Those of other users, and what is removed meanwhile.
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
