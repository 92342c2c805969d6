"""Reading what the workers of a group print."""

import logging
import os
import selectors
import time
from collections.abc import Callable, Iterable
from typing import IO

from paceline.workers.processes._local_worker import LocalWorker
from paceline.workers.processes._output_lines import (
    LINE_CHARACTERS,
    LineSplitter,
    OutputLine,
    Stream,
)

logger = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
# A launcher puts "[rank=N] " before each piece, and the next reader must not cut it again.
_PREFIX_CHARACTERS = 32

OnLine = Callable[[OutputLine], None]


class OutputReader:
    """Give each line of workers to a function; used by one thread but for `wake`.

    Args:
        on_line: Gets the lines, or None if there are none to read.
    """

    def __init__(self, on_line: OnLine | None) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def wake(self) -> None:
        """Have `read` return."""
        os.write(self._wake_writer, b"\0")

    def open(self, worker: LocalWorker, pipe: IO[bytes], stream: Stream) -> None:
        """Read a stream of a worker from now on."""
        spec = worker.spec
        is_one_of_many = spec.world_size > 1
        worker.open_streams[pipe] = LineSplitter(
            stream,
            spec.rank if is_one_of_many else None,
            max_characters=LINE_CHARACTERS - (_PREFIX_CHARACTERS if is_one_of_many else 0),
        )
        self._selector.register(pipe, selectors.EVENT_READ, worker)

    def read(self, timeout_s: float | None) -> int:
        """Read from what has something to read; return the number of streams that had."""
        num_read = 0
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, _READ_BYTES)
            if key.data is None:
                continue
            num_read += 1
            if data:
                splitter = key.data.open_streams[key.fileobj]
                self._deliver(splitter.feed(data, time.time()))
            else:
                self.close_stream(key.data, key.fileobj)  # type: ignore[arg-type] # registered so
        return num_read

    def close_stream(self, worker: LocalWorker, pipe: IO[bytes]) -> None:
        """Read a stream no more."""
        self._selector.unregister(pipe)
        splitter = worker.open_streams.pop(pipe)
        pipe.close()
        self._deliver(splitter.close(time.time()))

    def deliver_due(self, workers: Iterable[LocalWorker]) -> None:
        """Give away what stands at the beginning of a line for long."""
        now = time.time()
        for worker in workers:
            for splitter in worker.open_streams.values():
                self._deliver(splitter.tick(now))

    def close(self) -> None:
        """Close what this reader has opened."""
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _deliver(self, lines: list[OutputLine]) -> None:
        for line in lines:
            try:
                if self._on_line is not None:
                    self._on_line(line)
            except Exception:
                logger.exception("A line of output could not be passed on: %r", line)
