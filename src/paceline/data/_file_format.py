"""What all formats of files have in common."""

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data._errors import DataFormatError
from paceline.data._file_locations import FileLocation, FoundFile


class FileChunk(NamedTuple):
    """A piece of a file that is read as a whole, such as a row group.

    Attributes:
        rows: The number of samples.
        start: Where it begins, in bytes.
        size: Its bytes in the file.
        num_bytes: About how much memory it takes.
    """

    rows: int
    start: int
    size: int
    num_bytes: int


class IndexedFile(NamedTuple):
    """What an index holds of a file.

    Attributes:
        chunks: Its pieces.
        fingerprint: What differs for another content.
        schema: What must be alike in all files, a line for each column.
    """

    chunks: Sequence[FileChunk]
    fingerprint: str
    schema: str


class DataFile:
    """A file that a format reads.

    Args:
        place: Where it lies.
        found: The file.
    """

    def __init__(self, place: FileLocation, found: FoundFile) -> None:
        self._place = place
        self.found = found
        self.size = found.size
        self.name = place.name_of(found.name)

    @property
    def local_path(self) -> Path | None:
        """Where it lies on this machine."""
        return self._place.local_path(self.found)

    def read(self, offset: int, size: int) -> bytes:
        """Return a piece of it.

        Raises:
            DataFormatError: It ends before.
        """
        if size <= 0:
            return b""
        data = self._place.read(self.found, offset, size)
        if len(data) < size:
            raise self.damaged(f"it ends after {offset + len(data)} bytes")
        return data

    def damaged(
        self, reason: object, hint: str = "is it cut off, or of another format?"
    ) -> DataFormatError:
        """Return the error for content that cannot be read."""
        return DataFormatError(
            f"The file {self.name!r} ({self.size} bytes) cannot be read: {reason}. Hint: {hint}"
        )

    def columns_of(self, schema: Any, columns: Sequence[str] | None) -> str:
        """Return what an index holds of the columns to read: a line for each.

        Args:
            schema: The schema of the file, of Arrow.
            columns: The columns to read; None for all.

        Raises:
            DataFormatError: It lacks one, or two have one name.
        """
        names = list(schema.names)
        if missing := sorted(set(columns or ()) - set(names)):
            raise self.damaged(
                f"it has no column {missing}, only {names}", "`columns` names those to read."
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise self.damaged(
                f"several columns have the name {twice[0]!r}", "give each a name of its own."
            )
        return "\n".join(f"{name}: {schema.field(name).type}" for name in columns or names)


class FileSegments(io.RawIOBase):
    """A file of which some pieces are in memory, for readers that want a file.

    Args:
        file: What reads the rest.
        pieces: Bytes by where they begin.
    """

    def __init__(self, file: DataFile, pieces: dict[int, bytes]) -> None:
        super().__init__()
        self._file = file
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that any place can be read."""
        return True

    def tell(self) -> int:
        """Return the present place."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self._file.size

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        left = self._file.size - self._at
        size = left if size is None or size < 0 else min(size, left)
        if size <= 0:
            return b""
        begin, self._at = self._at, self._at + size
        for start, data in self._pieces.items():
            if start <= begin and begin + size <= start + len(data):
                return data[begin - start : begin - start + size]
        return self._file.read(begin, size)


class FileFormat(ABC):
    """A format of files whose samples lie in pieces.

    Implementers override `index_file` and `read_chunk`.
    """

    kind: str
    suffixes: tuple[str, ...]
    is_encoded: bool = False
    """Whether the samples of a piece have contents that are still to be decoded."""

    @abstractmethod
    def index_file(self, file: DataFile) -> IndexedFile:
        """Return what an index holds of a file.

        Raises:
            DataFormatError: It cannot be read.
        """

    @abstractmethod
    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Return the samples of a piece: `Columns` or `FileRows`.

        Args:
            file: The file.
            number: Which piece of the file it is.
            chunk: The piece.

        Raises:
            DataFormatError: It cannot be read.
        """


class FileRows:
    """Samples as a list.

    Args:
        samples: The samples.
        num_bytes: About how much memory they take.
    """

    def __init__(self, samples: Sequence[Any], num_bytes: int) -> None:
        self._samples = samples
        self.num_bytes = num_bytes

    def take(self, places: Any) -> list[Any]:
        """Return some samples, by their places."""
        return [self._samples[place] for place in places]
