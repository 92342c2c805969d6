"""The index of files: how many samples lie in which piece of which file."""

import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from paceline.data._errors import DataFormatError, DataNotFoundError
from paceline.data._file_format import DataFile, FileChunk, FileFormat, IndexedFile
from paceline.data._file_locations import DirectoryLocation, FileLocation, FoundFile

logger = logging.getLogger(__name__)

INDEX_NAME = "paceline-index.bin"
CACHE_VARIABLE = "PACELINE_CACHE_DIR"
_VERSION = 1
_THREADS = {True: 4, False: 16}
_NAMED_FILES = 200


class _Stored(msgspec.Struct):
    version: int
    kind: str
    pattern: str
    schema: str
    names: list[str]
    marks: list[str]
    prints: list[str]
    sizes: bytes
    chunks_of_file: bytes
    chunks: bytes


class FileIndex:
    """The pieces of files, as arrays.

    Attributes:
        files: The files, in the order of their samples.
        file_of: The number of the file of each piece.
        first_of: The number of the first piece of each file.
        rows: The number of samples of each piece.
        schema: What is alike in all files, a line for each column.
    """

    def __init__(self, stored: _Stored) -> None:
        self._stored = stored
        sizes = np.frombuffer(stored.sizes, dtype=np.int64)
        self._sizes = sizes
        counts = np.frombuffer(stored.chunks_of_file, dtype=np.int64)
        self._chunks = np.frombuffer(stored.chunks, dtype=np.int64).reshape(-1, 4)
        self.rows: Any = self._chunks[:, 0]
        self.num_bytes: Any = self._chunks[:, 3]
        self.file_of = np.repeat(np.arange(len(counts)), counts)
        self.first_of = np.cumsum(counts) - counts
        self.schema = stored.schema
        self.digest = xxhash.xxh3_128_hexdigest(
            b"\0".join(
                [
                    stored.kind.encode(),
                    "\0".join(stored.names).encode(),
                    "\0".join(stored.prints).encode(),
                    stored.sizes,
                    self.rows.tobytes(),
                ]
            )
        )

    @property
    def num_files(self) -> int:
        """The number of files."""
        return len(self._stored.names)

    def file(self, number: int) -> FoundFile:
        """Return a file by its number."""
        stored = self._stored
        return FoundFile(stored.names[number], int(self._sizes[number]), stored.marks[number])

    def chunk(self, number: int) -> FileChunk:
        """Return a piece by its number."""
        return FileChunk(*self._chunks[number].tolist())

    def prints(self) -> dict[str, str]:
        """Return the fingerprints of the files by name, unless they are many."""
        stored = self._stored
        if len(stored.names) > _NAMED_FILES:
            return {}
        return dict(zip(stored.names, stored.prints, strict=True))

    def encode(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self._stored)


def load_index(place: FileLocation, pattern: str, file_format: FileFormat) -> FileIndex:
    """Return the index of files: the one beside them, the one kept from before, or a new one.

    Raises:
        DataError: Files cannot be read, or differ in their columns.
    """
    beside = _decode_index(place.read_whole(INDEX_NAME))
    if beside is not None and (beside.kind, beside.pattern) == (file_format.kind, pattern):
        return FileIndex(beside)
    found = _find_indexed_files(place, pattern)
    kept = _kept_path(place, pattern, file_format, found)
    known = _decode_index(kept.read_bytes()) if kept.is_file() else None
    if known is not None:
        return FileIndex(known)
    index = make_index(place, pattern, file_format, found)
    try:
        DirectoryLocation(kept.parent).write(kept.name, index.encode())
    except OSError as error:
        logger.info("The index of %s is not kept, as %s cannot be written.", place.url, error)
    return index


def write_index(place: FileLocation, pattern: str, file_format: FileFormat) -> FileIndex:
    """Write an index beside the files, which is taken from then on without looking at them."""
    found = _find_indexed_files(place, pattern)
    index = make_index(place, pattern, file_format, found)
    place.write(INDEX_NAME, index.encode())
    return index


def _find_indexed_files(place: FileLocation, pattern: str) -> list[FoundFile]:
    found = [each for each in place.find(pattern) if not each.name.endswith(INDEX_NAME)]
    if not found:
        raise DataNotFoundError(
            f"There must be files to read, but {place.name_of(pattern)!r} matches none."
        )
    return found


def make_index(
    place: FileLocation, pattern: str, file_format: FileFormat, found: Sequence[FoundFile]
) -> FileIndex:
    """Return the index of files, each of which is looked into.

    Raises:
        DataFormatError: A file cannot be read, or has other columns than the first.
    """
    files = [DataFile(place, each) for each in found]
    with ThreadPoolExecutor(_THREADS[isinstance(place, DirectoryLocation)]) as pool:
        indexed = list(pool.map(file_format.index_file, files))
    schema = _common_schema_of_files(files, indexed)
    counts = np.array([len(each.chunks) for each in indexed], dtype=np.int64)
    chunks = [chunk for each in indexed for chunk in each.chunks]
    return FileIndex(
        _Stored(
            version=_VERSION,
            kind=file_format.kind,
            pattern=pattern,
            schema=schema,
            names=[each.name for each in found],
            marks=[each.mark for each in found],
            prints=[each.fingerprint for each in indexed],
            sizes=np.array([each.size for each in found], dtype=np.int64).tobytes(),
            chunks_of_file=counts.tobytes(),
            chunks=np.array(chunks, dtype=np.int64).reshape(-1, 4).tobytes(),
        )
    )


def _common_schema_of_files(files: Sequence[DataFile], indexed: Sequence[IndexedFile]) -> str:
    first: tuple[DataFile, IndexedFile] | None = None
    for file, each in zip(files, indexed, strict=True):
        if not any(chunk.rows for chunk in each.chunks):
            # Without samples, columns may have no types.
            continue
        if first is None:
            first = file, each
        elif each.schema != first[1].schema:
            expected, got = first[1].schema.splitlines(), each.schema.splitlines()
            lacks = [line for line in expected if line not in got]
            adds = [line for line in got if line not in expected]
            hint = "`columns` names those that all have"
            if [_name(line) for line in lacks] == [_name(line) for line in adds]:
                hint = "write their values alike in all files, such as 1.0 in place of 1 in CSV"
            raise DataFormatError(
                f"All files must have the same columns as {first[0].name!r}, but {file.name!r}"
                f" lacks {lacks} and has {adds}. Hint: {hint}, or read the files as data sets of"
                " their own."
            )
    return "" if first is None else first[1].schema


def _name(line: str) -> str:
    """Return the name of the column of a line of a schema."""
    return line.rpartition(": ")[0]


def cache_directory() -> Path:
    """Return where indexes and pieces of remote files are kept between runs."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline"


def _kept_path(
    place: FileLocation, pattern: str, file_format: FileFormat, found: Sequence[FoundFile]
) -> Path:
    key = [place.url, pattern, file_format.kind, _options(file_format), found]
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]
    return cache_directory() / "indexes" / digest


def _options(file_format: FileFormat) -> list[Any]:
    delimiter = getattr(file_format, "delimiter", ",")
    return [repr(getattr(file_format, "_columns", None)), *([delimiter] * (delimiter != ","))]


def _decode_index(data: bytes | None) -> _Stored | None:
    """Return a stored index, or None for none or one of another version."""
    if data is None:
        return None
    try:
        stored = msgspec.msgpack.decode(data, type=_Stored)
    except msgspec.MsgspecError:
        return None
    return stored if stored.version == _VERSION else None
