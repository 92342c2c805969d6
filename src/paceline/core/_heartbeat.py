"""Signs of life of runs without a master, for those who look from another machine."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.journal import RunDirectory

# A fraction of `HEARTBEAT_LIMIT_S`, as a file system may tell of a change late.
_INTERVAL_S = 10.0
# A run that is over sooner needs none.
_FIRST_S = 1.0


class _Heartbeats:
    """One thread that gives signs of life for all runs of this process.

    The thread ends when it finds no run. Runs that follow each other share it, because starting a
    thread takes long compared with an empty run.
    """

    def __init__(self) -> None:
        # Each run with the time of its next sign of life.
        self._runs: dict[RunDirectory, float] = {}
        # Reentrant: garbage collection may close a forgotten context within this thread's own hold.
        self._lock = threading.RLock()
        self._has_thread = False

    def add(self, run: RunDirectory) -> None:
        """Give signs of life of a run until it is removed."""
        with self._lock:
            self._runs[run] = 0.0
            if not self._has_thread:
                threading.Thread(
                    target=self._beat, name="paceline-run-heartbeats", daemon=True
                ).start()
                self._has_thread = True

    def remove(self, run: RunDirectory) -> None:
        """Give no further sign of life of a run, if this process gave some."""
        with self._lock:
            if self._runs.pop(run, None) is not None:
                run.end_heartbeat()

    def forget(self) -> None:
        """Give no further sign of life of any run, in a process that is forked."""
        self._runs, self._has_thread = {}, False
        self._lock = threading.RLock()

    def _beat(self) -> None:
        while True:
            time.sleep(min(_FIRST_S, _INTERVAL_S))
            with self._lock:
                now = time.monotonic()
                for run in [run for run, due in self._runs.items() if due <= now]:
                    with suppress(OSError):
                        run.beat()
                    if run in self._runs:
                        self._runs[run] = now + _INTERVAL_S
                    else:
                        run.end_heartbeat()
                if not self._runs:
                    self._has_thread = False
                    return


_heartbeats = _Heartbeats()


@contextmanager
def sending_heartbeats(run: RunDirectory) -> Iterator[None]:
    """Give signs of life of a run within the block; a full disk is no error."""
    heartbeats = _heartbeats
    try:
        heartbeats.add(run)
        yield
    finally:
        # A forked child may come here too; it gives none, and the run goes on.
        heartbeats.remove(run)


os.register_at_fork(after_in_child=lambda: _heartbeats.forget())
