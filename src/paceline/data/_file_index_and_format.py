"""The index of files: the number of samples in each piece of each file.

Samples with late decoding of images: per sample, or for a whole batch.
"""

import hashlib
import io
import json
import logging
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from paceline.data._data_errors import DataFormatError, DataNotFoundError
from paceline.data._file_locations import DirectoryLocation, FileLocation, FoundFile
from paceline.data._sample_sources import Source

logger = logging.getLogger(__name__)


IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


class FileChunk(NamedTuple):
    """Piece of a file, read as a whole, for example a row group.

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
    """Entry of a file in the index: pieces, fingerprint and schema.

    Attributes:
        chunks: Its pieces.
        fingerprint: A text that differs for another content.
        schema: The facts that must be equal in all files, a line for each column.
    """

    chunks: Sequence[FileChunk]
    fingerprint: str
    schema: str


class DataFile:
    """File to be read by a format: reads byte ranges and makes errors with the file's name.

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
        """Path of the file on this machine, or None if remote."""
        return self._place.local_path(self.found)

    def read(self, offset: int, size: int) -> bytes:
        """Return a byte range of the file.

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
        """Return the error for unreadable content of this file."""
        return DataFormatError(
            f"The file {self.name!r} ({self.size} bytes) cannot be read: {reason}. Hint: {hint}"
        )

    def columns_of(self, schema: Any, columns: Sequence[str] | None) -> str:
        """Return the schema text of the columns to read for the index: a line per column.

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
    """File object with some byte ranges in memory, for readers in need of a file.

    Args:
        file: The reader of the rest.
        pieces: Bytes by where they begin.
    """

    def __init__(self, file: DataFile, pieces: dict[int, bytes]) -> None:
        super().__init__()
        self._file = file
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        """Return True: the file can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: the file supports random access."""
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
    """File format of samples in pieces: indexes files and reads pieces.

    Implementers override `index_file` and `read_chunk`.
    """

    kind: str
    suffixes: tuple[str, ...]
    is_encoded: bool = False
    """Whether the samples of a piece have contents that are still to be decoded."""

    @abstractmethod
    def index_file(self, file: DataFile) -> IndexedFile:
        """Return the index entry of a file.

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
        schema: The facts that are equal in all files, a line for each column.
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
        """Return the index as MessagePack bytes."""
        return msgspec.msgpack.encode(self._stored)


def load_index(place: FileLocation, pattern: str, file_format: FileFormat) -> FileIndex:
    """Return the index of files: stored beside them, from the local cache, or newly made.

    Raises:
        DataError: Files cannot be read, or differ in their columns.
    """
    beside = _decode_index(place.read_whole(INDEX_NAME))
    if beside is not None and (beside.kind, beside.pattern) == (file_format.kind, pattern):
        return FileIndex(beside)
    found = _find_indexed_files(place, pattern)
    # The name depends on the files found, so changed files never meet an old index.
    kept = _kept_path(place, pattern, file_format, found)
    known = _decode_index(kept.read_bytes()) if kept.is_file() else None
    if known is not None:
        return FileIndex(known)
    index = make_index(place, pattern, file_format, found)
    try:
        DirectoryLocation(kept.parent).write(kept.name, index.encode())
    except OSError as error:
        # Without it only the next start is slower.
        logger.info("The index of %s is not kept, as %s cannot be written.", place.url, error)
    return index


def write_index(place: FileLocation, pattern: str, file_format: FileFormat) -> FileIndex:
    """Write an index beside the files; later reads use this index without listing them."""
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
    """Return a new index of files, after a look into each file.

    Raises:
        DataFormatError: A file cannot be read, or has other columns than the first.
    """
    files = [DataFile(place, each) for each in found]
    with ThreadPoolExecutor(_THREADS[isinstance(place, DirectoryLocation)]) as pool:
        indexed = list(pool.map(file_format.index_file, files))
    schema = _common_file_schema(files, indexed)
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


def _common_file_schema(files: Sequence[DataFile], indexed: Sequence[IndexedFile]) -> str:
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
    """Return a stored index, or None if absent, unreadable or of another version."""
    if data is None:
        return None
    try:
        stored = msgspec.msgpack.decode(data, type=_Stored)
    except msgspec.MsgspecError:
        return None
    return stored if stored.version == _VERSION else None


def decode_image(content: bytes, name: str) -> Any:
    """Return an image as an array of uint8 of shape [height, width, 3].

    Raises:
        DataFormatError: It is no image that can be read.
    """
    with open_image(content, name) as image:
        return np.array(image)


@contextmanager
def open_image(content: bytes, name: str) -> Iterator[Any]:
    """Yield a decoded image in three colours.

    Raises:
        DataFormatError: It is no image that can be read.
    """
    from PIL import Image

    from paceline.data._data_errors import DataFormatError

    try:
        with Image.open(io.BytesIO(content)) as image:
            # Decodes, without the lock of the interpreter.
            image.load()
            yield image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataFormatError(
            f"The image {name!r} ({len(content)} bytes) cannot be read: {error}."
        ) from error


def _decode_array(content: bytes, name: str) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


_DECODERS: dict[str, Callable[[bytes, str], Any]] = {
    **dict.fromkeys(IMAGES, decode_image),
    ".cls": lambda content, name: int(content),
    ".json": lambda content, name: json.loads(content),
    ".npy": _decode_array,
    ".txt": lambda content, name: content.decode(),
}


def decode(content: bytes, name: str) -> Any:
    """Return the decoded content of a file by suffix; the bytes for an unknown suffix."""
    at = name.rfind(".")
    decoder = _DECODERS.get(name[at:].lower())
    return content if decoder is None else decoder(content, name)


class Encoded(NamedTuple):
    """Encoded content of a file, with its name for messages and the choice of a decoder."""

    content: bytes
    name: str


def decoded_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with all contents decoded.

    Raises:
        DataFormatError: A content is damaged.
    """
    return {
        key: decode(*value) if isinstance(value, Encoded) else value
        for key, value in sample.items()
    }


# Requests to a store wait for its answer, not for this machine.
_REQUESTS_AT_ONCE = 16


class ImageSource(Source):
    """Images below a place, each in the folder of its class.

    Args:
        place: The place.

    Raises:
        DataNotFoundError: There is no image in a folder.
    """

    def __init__(self, place: FileLocation) -> None:
        from PIL import Image

        # Processes of a loader that are forked need not load the decoders.
        Image.preinit()
        self.name = place.url
        self._place = place
        self._files = [
            each
            for each in place.find("*/**/*")
            if each.name.lower().endswith(IMAGES) and "/" in each.name
        ]
        if not self._files:
            raise DataNotFoundError(
                f"There must be images in folders of {place.url!r}, such as cats/1.jpg, but there"
                f" are none that end in {list(IMAGES)}."
            )
        self.classes = sorted({each.name.partition("/")[0] for each in self._files})
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Return images with the numbers of their classes."""
        return [decoded_sample(sample) for sample in self.fetch_encoded(numbers)]

    @property
    def is_encoded(self) -> bool:
        """Images have to be decoded."""
        return True

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return images before they are decoded."""
        if isinstance(self._place, DirectoryLocation) or len(numbers) == 1:
            return [self._image(number) for number in numbers]
        with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(numbers))) as pool:
            return list(pool.map(self._image, numbers))

    def _image(self, number: int) -> dict[str, Any]:
        file = DataFile(self._place, self._files[number])
        content = file.read(0, file.size)
        label = self._numbers[file.found.name.partition("/")[0]]
        return {"image": Encoded(content, file.name), "label": label}

    def identity(self) -> Mapping[str, Any]:
        """Return a digest of the names and sizes."""
        hasher = xxhash.xxh3_128()
        for each in self._files:
            hasher.update(f"{each.name}\0{each.size}\0".encode())
        return {
            "name": self.name,
            "digest": hasher.hexdigest(),
            "samples": len(self),
            "files": len(self),
            "prints": {},
        }


_PIECE_BYTES = 8 * 1024 * 1024
_BLOCK = 512


class _Member(NamedTuple):
    key: str
    name: str
    start: int
    end: int


class WebDatasetFormat(FileFormat):
    """Tar files of samples; samples are dictionaries of decoded files by their suffixes."""

    kind = "webdataset"
    suffixes = (".tar",)
    # Few samples are in memory as images.
    is_encoded = True

    def index_file(self, file: DataFile) -> IndexedFile:
        """Read where each sample lies."""
        hasher, chunks = xxhash.xxh3_64(), []
        start = end = rows = 0
        key: str | None = None
        for member in _shard_members(file):
            hasher.update(repr(member).encode())
            if member.key != key:
                if member.start - start >= _PIECE_BYTES:
                    chunks.append(
                        FileChunk(rows, start, member.start - start, member.start - start)
                    )
                    start, rows = member.start, 0
                key, rows = member.key, rows + 1
            end = member.end
        if rows:
            chunks.append(FileChunk(rows, start, end - start, end - start))
        return IndexedFile(chunks, hasher.hexdigest(), "")

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Read some samples; they are decoded when they are taken."""
        content = file.read(chunk.start, chunk.size)
        samples: list[dict[str, Any]] = []
        try:
            # Zero blocks are the end mark of a tar archive, which a piece of a shard lacks.
            with tarfile.open(fileobj=io.BytesIO(content + bytes(2 * _BLOCK)), mode="r:") as tar:
                for info in tar:
                    if not info.isfile():
                        continue
                    key, suffix = _parted(info.name)
                    if not samples or samples[-1]["__key__"] != key:
                        samples.append({"__key__": key})
                    begin = info.offset_data
                    name = f"{file.name}/{key}.{suffix}"
                    samples[-1][suffix] = Encoded(content[begin : begin + info.size], name)
        except tarfile.TarError as error:
            raise file.damaged(error) from error
        if len(samples) != chunk.rows:
            raise file.damaged(f"{len(samples)} samples were read where {chunk.rows} were counted")
        return FileRows(samples, chunk.num_bytes)


def _shard_members(file: DataFile) -> Iterator[_Member]:
    path = file.local_path
    # Each header of a remote file would be a request of its own.
    raw: Any = (
        path.open("rb") if path is not None else FileSegments(file, {0: file.read(0, file.size)})
    )
    try:
        with raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for info in tar:
                if info.isfile():
                    end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                    if info.offset_data + info.size > file.size:
                        raise file.damaged(f"{info.name!r} ends beyond it")
                    yield _Member(_parted(info.name)[0], info.name, info.offset, end)
    except (tarfile.TarError, EOFError) as error:
        raise file.damaged(error) from error


def _parted(name: str) -> tuple[str, str]:
    """Return the key and the suffix of a file's name."""
    directory, slash, base = name.rpartition("/")
    key, _, suffix = base.partition(".")
    return f"{directory}{slash}{key}", suffix
