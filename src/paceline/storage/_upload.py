"""Uploads: a file on its way to a store, hashed as it is read, and how long that may take."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import xxhash

from paceline.storage import _durable_files
from paceline.storage._manifest import FileEntry

_DEFAULTS_S = {"PART": 60.0, "FILE": 1800.0, "CHECKPOINT": 3600.0}

FileSender: TypeAlias = Callable[[str, int, Iterable[memoryview]], None]
"""Stores a file of a checkpoint from memory: its name, its size in bytes and its pieces in order.

It may return before the file is stored. The memory must stay as it is until the block of
`store_path` or `store_shard` has ended, which waits for all files. An error is raised by the next
call, or at the end of the block.
"""


class Upload:
    """What is sent to a store, in parts, within a time.

    Args:
        size: The size in bytes.
        part_bytes: The size of the parts in which it is sent.
        timeout_s: After how many seconds reading raises TimeoutError.

    Attributes:
        size: As given.
        num_parts: How many parts it has.
        timeout_s: As given.
        is_late: Whether the time was over.
    """

    def __init__(self, size: int, part_bytes: int, timeout_s: float) -> None:
        self.size = size
        self.num_parts = max(1, -(-size // part_bytes))
        self.timeout_s = timeout_s
        self.is_late = False
        self._part_bytes = part_bytes
        self._deadline = time.monotonic() + timeout_s
        self._hasher = xxhash.xxh3_128()
        self._num_hashed = 0

    @property
    def num_sent(self) -> int:
        """How many parts were read by the client."""
        return self._num_hashed // self._part_bytes

    def entry(self) -> FileEntry:
        """Return the size and digest of what was read, once all of it was."""
        return FileEntry(self._num_hashed, self._hasher.hexdigest())

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            self.is_late = True
            raise TimeoutError(f"{self.num_sent} of {self.num_parts} parts were sent in time.")

    def _note(self, data: bytes | memoryview) -> None:
        self._hasher.update(data)
        self._num_hashed += len(data)


class FileUpload(Upload):
    """A file that a client reads in order; use it in a `with` statement.

    Args:
        path: The file.
        part_bytes: The size of the parts in which it is sent.
        timeout_s: After how many seconds reading raises TimeoutError.
    """

    def __init__(self, path: Path, part_bytes: int, timeout_s: float) -> None:
        super().__init__(path.stat().st_size, part_bytes, timeout_s)
        self._path = path
        self._file = path.open("rb")

    def read(self, size: int = -1) -> bytes:
        """Return the next piece.

        Raises:
            TimeoutError: The time is over.
        """
        self._check_time()
        data = self._file.read(size)
        self._note(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move on in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place in the file."""
        return self._file.tell()

    def entry(self) -> FileEntry:
        """Return the size and digest of what was read, once all of it was."""
        if self._num_hashed != self.size:
            # The client has read some of it again.
            return _durable_files.digest_file(self._path)
        return super().entry()

    def __enter__(self) -> "FileUpload":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class MemoryUpload(Upload):
    """Pieces of memory that a client reads once, in order.

    Args:
        pieces: The pieces.
        size: The bytes of all of them.
        part_bytes: The size of the parts in which they are sent.
        timeout_s: After how many seconds reading raises TimeoutError.
    """

    def __init__(
        self, pieces: Iterable[memoryview], size: int, part_bytes: int, timeout_s: float
    ) -> None:
        super().__init__(size, part_bytes, timeout_s)
        self._pieces = pieces

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the pieces, none larger than a part.

        Raises:
            TimeoutError: The time is over.
            ValueError: They have another size than was said.
        """
        for piece in self._pieces:
            data = piece.cast("B")
            for begin in range(0, len(data), self._part_bytes):
                self._check_time()
                part = data[begin : begin + self._part_bytes]
                self._note(part)
                yield part
        if self._num_hashed != self.size:
            raise ValueError(
                f"The pieces of a file must have {self.size} bytes together, as was said, but have"
                f" {self._num_hashed}."
            )


class UploadLimits(NamedTuple):
    """The seconds that a part of a file, a file, and one rank's files of a checkpoint have.

    A part that takes longer is sent again for twice as long; then it has failed.
    """

    part_s: float
    file_s: float
    checkpoint_s: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "UploadLimits":
        """Return what PACELINE_STORE_PART_TIMEOUT_S and its like say.

        Raises:
            ValueError: One is no number above 0.
        """
        variables = os.environ if environment is None else environment
        return cls(*(_seconds(variables, _name(what), _DEFAULTS_S[what]) for what in _DEFAULTS_S))


def _name(what: str) -> str:
    return f"PACELINE_STORE_{what}_TIMEOUT_S"


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"`{name}` must be a number of seconds above 0, but got {text!r}.")
    return value


def limit_hint(what: str) -> str:
    """Return how to allow more time for a "part", a "file" or a "checkpoint"."""
    return f"Hint: {_name(what.upper())} allows more time."
