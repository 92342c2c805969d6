"""Samples of indexed files."""

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from paceline._base.arguments_and_errors import check_count
from paceline.data._file_index_and_format import (
    DataFile,
    FileFormat,
    FileIndex,
    cache_directory,
    decoded_sample,
)
from paceline.data._file_locations import DirectoryLocation, DiskCache, FileLocation, ObjectLocation
from paceline.data._sample_columns import ConcatenatedPieces, gather_columns
from paceline.data._sample_sources import Numbers, Source

_EXIT_S = 5.0


class Payload(Protocol):
    """Content of a piece, as read from a file."""

    @property
    def num_bytes(self) -> int:
        """Memory of the content in bytes."""


class ChunkCache:
    """Cache of pieces: the last used, and those read ahead by threads.

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
        # Pieces that the first batch still waits for; None until the first `expect`.
        self._first: set[int] | None = None
        self._threads: set[threading.Thread] = set()
        self._num_busy = 0
        self._is_closed = False
        _open_caches.add(self)

    def get(self, chunk: int) -> Any:
        """Return a piece, from memory or by reading the file."""
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
            # Errors of reading ahead are dropped: the read below retries, or raises in the caller.
            with suppress(Exception):
                return future.result()
            return self.get(chunk)
        return self._read(chunk)

    def expect(
        self, chunks: Iterable[int], later: Iterable[int] = (), *, least_bytes: int = 0
    ) -> None:
        """Read pieces ahead in this order; replaces the earlier list of expected pieces.

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
            # Until the first batch is complete, pieces needed later must not delay it.
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
        """Stop reading ahead, and wait for reads in progress up to a time limit."""
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
                    # Under the lock: `_start_threads` must count only threads that take another
                    # piece.
                    self._threads.discard(threading.current_thread())
                    return
                chunk = self._expected.popleft()
                if chunk in self._kept or chunk in self._under_way:
                    # The training has read it itself meanwhile.
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
            # Newest piece always stays: a single piece may be larger than the limit.
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


MEMORY_BYTES = 48 * 1024 * 1024
# Decoded samples may take a little more than the index says.
_MEMORY_FACTOR = 1.25
# More would mix no better, and a start has to read all of a window.
_WINDOW_BYTES = 16 * 1024 * 1024
_WINDOW_ROWS = 1 << 18
_THREADS = {True: 1, False: 2}
# How much is loaded, in the form of the file and as samples together, until memory is given back.
# The system takes its time to give it again: after each piece that cost a third of the speed.
_GIVEN_BACK_BYTES = 32 * 1024 * 1024
# Several threads may ask for the first samples.
_making = threading.Lock()
_loaded_bytes = 0


class FileSource(Source):
    """Samples of files by number, in the order of the files.

    Args:
        place: Where the files lie.
        pattern: Which of them.
        file_format: Their format.
        index: How many samples lie where.
    """

    def __init__(
        self, place: FileLocation, pattern: str, file_format: FileFormat, index: FileIndex
    ) -> None:
        self.name = place.name_of(pattern) if pattern else place.url
        self._place = place
        self._format = file_format
        self._index = index
        self._ends: Any = np.cumsum(index.rows)
        self._made: tuple[int, ChunkCache, ConcatenatedPieces] | None = None
        self.memory_bytes = MEMORY_BYTES

    def __getstate__(self) -> dict[str, Any]:
        # Caches have threads and locks, and cannot be pickled.
        return {**vars(self), "_made": None}

    def keep(self, memory_bytes: int | None, disk_bytes: int) -> None:
        """Set the bytes of pieces to keep in memory and, for remote files, on disk.

        Raises:
            ValueError: A number of bytes is none.
        """
        if memory_bytes is not None:
            check_count("memory_bytes", memory_bytes, least=0)
        check_count("disk_bytes", disk_bytes, least=0)
        if memory_bytes is not None:
            self.memory_bytes = memory_bytes
        if disk_bytes and isinstance(self._place, ObjectLocation):
            self._place.disk_cache = DiskCache(cache_directory() / "pieces", disk_bytes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return samples, after reading the pieces they lie in unless these are in memory."""
        if self.is_encoded:
            return [decoded_sample(sample) for sample in self.fetch_encoded(numbers)]
        return self._fetch(numbers)

    @property
    def is_encoded(self) -> bool:
        """Whether samples have to be decoded."""
        return self._format.is_encoded

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples before they are decoded."""
        samples: list[Any] = self._fetch(numbers)
        return samples

    def _fetch(self, numbers: Sequence[int]) -> Any:
        wanted = np.asarray(numbers, dtype=np.int64)
        chunks: Any = np.searchsorted(self._ends, wanted, side="right")
        places = wanted - (self._ends[chunks] - self._index.rows[chunks])
        taken: list[tuple[Any, Any, Any]] = []
        if not self.is_encoded:
            taken += self._joined.find(chunks, places)
        rest = np.arange(len(wanted))
        if taken:
            rest = np.delete(rest, np.concatenate([rows for rows, _, _ in taken]))
        for chunk, rows in _by_chunk(chunks, rest):
            taken.append((rows, self._cache.get(chunk), places[rows]))
        return gather_columns(len(wanted), taken)

    def chunk_sizes(self) -> Numbers:
        """Return the number of samples of each piece."""
        return self._index.rows

    def window(self) -> int:
        """Return how many samples are mixed with each other: about 16 MiB, at most 262,144."""
        total = max(1, len(self))
        mean_bytes = max(1.0, float(self._index.num_bytes.sum()) / total)
        return min(max(1, int(_WINDOW_BYTES / mean_bytes)), _WINDOW_ROWS)

    def expect(self, now: Numbers, later: Numbers) -> None:
        """Keep pieces in memory, and read others ahead as far as the memory goes."""
        in_use, next_ones = self._chunks_of(now), self._chunks_of(later)
        sizes = self._index.num_bytes
        least_bytes = int(_MEMORY_FACTOR * sizes[in_use].sum())
        left_bytes = self.memory_bytes - least_bytes
        fits = next_ones[np.cumsum(sizes[next_ones]) <= left_bytes]
        self._cache.expect(in_use.tolist(), fits.tolist(), least_bytes=least_bytes)
        self._joined.plan(in_use, int(sizes[in_use].sum()))

    def _chunks_of(self, numbers: Numbers) -> Any:
        chunks: Any = np.searchsorted(self._ends, numbers, side="right")
        return chunks[np.sort(np.unique(chunks, return_index=True)[1])]

    def identity(self) -> Mapping[str, Any]:
        """Return the digest of the index, and of some files their own."""
        return {
            "name": self.name,
            "digest": self._index.digest,
            "samples": len(self),
            "files": self._index.num_files,
            "prints": self._index.prints(),
        }

    @property
    def _cache(self) -> ChunkCache:
        return self._memory[1]

    @property
    def _joined(self) -> ConcatenatedPieces:
        return self._memory[2]

    @property
    def _memory(self) -> tuple[int, ChunkCache, ConcatenatedPieces]:
        """The piece caches of this process: a fork has neither threads nor usable locks."""
        made = self._made
        if made is None or made[0] != os.getpid():
            # Second check under the lock: another thread may have made the caches meanwhile.
            with _making:
                made = self._made
                if made is None or made[0] != os.getpid():
                    made = self._made = self._make()
        return made

    def _make(self) -> tuple[int, ChunkCache, ConcatenatedPieces]:
        threads = _THREADS[isinstance(self._place, DirectoryLocation)]
        cache = ChunkCache(self._load, limit_bytes=self.memory_bytes, num_threads=threads)
        joined = ConcatenatedPieces(self._index.rows, cache.get, cache.forget, self.memory_bytes)
        return os.getpid(), cache, joined

    def _load(self, number: int) -> Any:
        file_number = int(self._index.file_of[number])
        file = DataFile(self._place, self._index.file(file_number))
        first = int(self._index.first_of[file_number])
        chunk = self._index.chunk(number)
        payload = self._format.read_chunk(file, number - first, chunk)
        if not isinstance(self._place, DirectoryLocation):
            _note_loaded(chunk.size + payload.num_bytes)
        return payload


def _by_chunk(chunks: Any, rows: Any) -> Iterator[tuple[int, Any]]:
    """Yield each piece with the rows inside."""
    if not len(rows):
        return
    rows = rows[np.argsort(chunks[rows], kind="stable")]
    needed, begins = np.unique(chunks[rows], return_index=True)
    yield from zip(needed.tolist(), np.split(rows, begins[1:]), strict=True)


def _note_loaded(num_bytes: int) -> None:
    """Return freed memory to the system each time this process has loaded enough bytes.

    Without this, each thread would keep its own. Threads may miscount a little.
    """
    global _loaded_bytes  # memory belongs to the process, not to a source
    _loaded_bytes += num_bytes
    if _loaded_bytes < _GIVEN_BACK_BYTES:
        return
    _loaded_bytes = 0
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
