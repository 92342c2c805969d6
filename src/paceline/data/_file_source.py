"""Samples of files that have an index."""

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from paceline._argument_checks import check_count
from paceline.data._chunk_cache import ChunkCache
from paceline.data._concatenated_pieces import ConcatenatedPieces
from paceline.data._disk_cache import DiskCache
from paceline.data._encoded_images import decoded_sample
from paceline.data._file_format import DataFile, FileFormat
from paceline.data._file_index import FileIndex, cache_directory
from paceline.data._file_locations import DirectoryLocation, FileLocation, ObjectLocation
from paceline.data._sample_columns import gather_columns
from paceline.data._sample_source import Numbers, Source

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
        file_format: What reads them.
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
        return {**vars(self), "_made": None}

    def keep(self, memory_bytes: int | None, disk_bytes: int) -> None:
        """Set how much is kept of what was read, in the memory and on the disk.

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
        """The pieces in the memory of this process: a forked one has neither threads nor locks."""
        made = self._made
        if made is None or made[0] != os.getpid():
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
    """Yield each piece with the rows that lie in it."""
    if not len(rows):
        return
    rows = rows[np.argsort(chunks[rows], kind="stable")]
    needed, begins = np.unique(chunks[rows], return_index=True)
    yield from zip(needed.tolist(), np.split(rows, begins[1:]), strict=True)


def _note_loaded(num_bytes: int) -> None:
    """Give back to the system what files took, each time that enough was loaded by this process.

    Each thread would keep its own. Threads may miscount a little.
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
