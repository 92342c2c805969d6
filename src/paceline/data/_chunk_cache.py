"""Pieces of files in memory: read ahead by threads, within a number of bytes."""

import atexit
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

_EXIT_S = 5.0


class Payload(Protocol):
    """What was read of a piece."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""


class ChunkCache:
    """The pieces that were used last, and those that are needed next.

    Args:
        load: Reads a piece by its number.
        limit_bytes: How much is kept; a single piece may be larger.
        num_threads: How many pieces are read at once.
    """

    def __init__(
        self, load: Callable[[int], Payload], *, limit_bytes: int, num_threads: int
    ) -> None:
        self._load = load
        self._limit_bytes = limit_bytes
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._num_bytes = self._least_bytes = 0
        self._under_way: dict[int, Future[Any]] = {}
        self._expected: deque[int] = deque()
        # What the first batch still needs; None until that is known.
        self._first: set[int] | None = None
        self._threads: set[threading.Thread] = set()
        self._num_busy = 0
        self._is_closed = False
        _open_caches.add(self)

    def get(self, chunk: int) -> Any:
        """Return a piece, which may have to be read first."""
        with self._lock:
            if chunk in self._kept:
                self._kept.move_to_end(chunk)
                return self._kept[chunk]
            future = self._under_way.get(chunk)
            if future is None:
                with suppress(ValueError):
                    self._expected.remove(chunk)
                self._under_way[chunk] = Future()
        if future is not None:
            # What fails ahead of time may succeed now, and else fails here, where it is needed.
            with suppress(Exception):
                return future.result()
            return self.get(chunk)
        return self._read(chunk)

    def expect(
        self, chunks: Iterable[int], later: Iterable[int] = (), *, least_bytes: int = 0
    ) -> None:
        """Read pieces ahead, in this order, in place of those that were expected before.

        Args:
            chunks: The pieces that are needed next.
            later: Those that are needed afterwards. At the start of an epoch, they do not delay
                the others.
            least_bytes: How much must be kept, even if that is beyond the limit.
        """
        chunks = list(chunks)
        with self._lock:
            self._least_bytes = least_bytes
            if self._is_closed:
                return
            self._expected = deque(
                each
                for each in [*chunks, *later]
                if each not in self._kept and each not in self._under_way
            )
            if self._first is None or self._first:
                self._first = set(chunks) - set(self._kept)
            self._start_threads()

    def _start_threads(self) -> None:
        while len(self._threads) < min(self._num_threads, self._num_busy + self._num_due()):
            thread = threading.Thread(target=self._run, name="paceline-data", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _num_due(self) -> int:
        """Return how many of the expected pieces may be read now."""
        if not self._first:
            return len(self._expected)
        return sum(each in self._first for each in self._expected)

    def forget(self, chunks: Iterable[int]) -> None:
        """Keep some pieces no longer, as their samples are kept elsewhere."""
        with self._lock:
            for chunk in chunks:
                payload = self._kept.pop(chunk, None)
                if payload is not None:
                    self._num_bytes -= payload.num_bytes

    def close(self, timeout_s: float = _EXIT_S) -> None:
        """Read nothing ahead any more, and wait for what is under way."""
        with self._lock:
            self._is_closed = True
            self._expected.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._num_due():
                    self._threads.discard(threading.current_thread())
                    return
                chunk = self._expected.popleft()
                if chunk in self._kept or chunk in self._under_way:
                    continue
                self._under_way[chunk] = Future()
                self._num_busy += 1
            try:
                with suppress(Exception):
                    self._read(chunk)
            finally:
                with self._lock:
                    self._num_busy -= 1

    def _read(self, chunk: int) -> Any:
        future = self._under_way[chunk]
        try:
            payload = self._load(chunk)
        except BaseException as error:
            with self._lock:
                self._finish(chunk)
            future.set_exception(error)
            raise
        with self._lock:
            self._finish(chunk)
            self._kept[chunk] = payload
            self._num_bytes += payload.num_bytes
            limit_bytes = max(self._limit_bytes, self._least_bytes)
            while self._num_bytes > limit_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
        future.set_result(payload)
        return payload

    def _finish(self, chunk: int) -> None:
        del self._under_way[chunk]
        if self._first:
            self._first.discard(chunk)
            if not self._first and not self._is_closed:
                self._start_threads()


_open_caches: "weakref.WeakSet[ChunkCache]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Let no thread run code while the interpreter ends."""
    for cache in list(_open_caches):
        cache.close()
