"""WebDataset shards: tar files in which the files of a sample follow each other.

What stands before the first dot of their names is the sample's key.
"""

import io
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash

from paceline.data._encoded_images import Encoded
from paceline.data._file_format import (
    DataFile,
    FileChunk,
    FileFormat,
    FileRows,
    FileSegments,
    IndexedFile,
)

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
