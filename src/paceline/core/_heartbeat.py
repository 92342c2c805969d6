"""Signs of life of a run without a master, for those who look from another machine."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.journal import RunDirectory

# A fraction of `HEARTBEAT_LIMIT_S`, as a file system may tell of a change late.
_INTERVAL_S = 10.0


@contextmanager
def sending_heartbeats(run: RunDirectory) -> Iterator[None]:
    """Give signs of life of a run within the block; a full disk is no error."""
    stopping = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(run, stopping), name="paceline-heartbeat", daemon=True
    )
    with suppress(OSError):
        run.beat()
    thread.start()
    owner = os.getpid()
    try:
        yield
    finally:
        # A forked child may come here too; the run goes on then.
        if os.getpid() == owner:
            stopping.set()
            thread.join()
            run.end_heartbeat()


def _beat(run: RunDirectory, stopping: threading.Event) -> None:
    while not stopping.wait(_INTERVAL_S):
        with suppress(OSError):
            run.beat()
