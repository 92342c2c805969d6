"""Progress of a pass: the chief notes it in a file, and the driver shows it."""

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.display import TrainingProgress, ending_of

_INTERVAL_S = 0.1
# Batches so far, all batches (-1 if that is not known), and samples of all workers.
_LAYOUT = struct.Struct("<qqq")


class NotedProgress:
    """What the chief notes of a pass.

    Args:
        path: The file of the driver; on a node that does not see it nothing is noted.
        total: The batches of the pass, if they are known.
        then: Called with each batch too.
    """

    def __init__(
        self, path: str, total: int | None, then: Callable[[Any], None] | None = None
    ) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY)
        self._total = -1 if total is None else total
        self._then = then
        self._batches = self._samples = 0
        self._next = 0.0

    def __call__(self, batch: Any) -> None:
        """Note a batch."""
        if self._then is not None:
            self._then(batch)
        self._batches += 1
        self._samples += batch.num_all
        if (now := time.monotonic()) >= self._next:
            self._next = now + _INTERVAL_S
            self._write()

    def close(self) -> None:
        """Note the end."""
        self._write()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, _LAYOUT.pack(self._batches, self._total, self._samples), 0)


@contextmanager
def shown_pass(*, is_shown: bool) -> Iterator[str | None]:
    """Show the progress of a pass within a block, on a terminal or in a notebook.

    Args:
        is_shown: Whether to show it.

    Yields:
        The file for `NotedProgress`; None if nothing is shown.
    """
    if not is_shown:
        yield None
        return
    with TemporaryDirectory(prefix="paceline-progress-") as directory:
        path = Path(directory) / "pass"
        path.touch()
        shown = _ShownPass(path)
        try:
            yield str(path)
        except BaseException as error:
            shown.end(ending_of(error))
            raise
        shown.end(ending_of(None))


class _ShownPass:
    """A thread that looks at what was noted, and draws it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress: TrainingProgress | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="paceline-progress", daemon=True)
        self._thread.start()

    def end(self, how: str) -> None:
        """Draw the last state, and end the thread."""
        self._has_ended.set()
        self._thread.join()
        self._update()
        if self._progress is not None:
            self._progress.end(how)

    def _draw(self) -> None:
        while not self._has_ended.wait(_INTERVAL_S):
            self._update()

    def _update(self) -> None:
        noted = self._path.read_bytes()
        if len(noted) < _LAYOUT.size:
            return
        batches, total, samples = _LAYOUT.unpack(noted[: _LAYOUT.size])
        if self._progress is None:
            self._progress = TrainingProgress(None if total < 0 else total, "batches")
            self._progress.start(0)
        self._progress.update(batches, samples)
