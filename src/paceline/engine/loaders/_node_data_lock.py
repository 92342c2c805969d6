"""A lock by which the workers of a node prepare data one after the other."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def node_data_lock() -> Iterator[None]:
    """Hold a lock that one process of this user holds at a time, so that downloads do not collide.

    The operating system releases it when the process dies.
    """
    path = Path(tempfile.gettempdir(), f"paceline-data-{os.getuid()}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
