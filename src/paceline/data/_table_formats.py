"""Formats of tables: Parquet, Arrow, CSV, JSON lines (pyarrow; named by string)."""

import io
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pyarrow import csv

from paceline.data._data_errors import DataError
from paceline.data._file_index_and_format import (
    DataFile,
    FileChunk,
    FileFormat,
    FileRows,
    FileSegments,
    IndexedFile,
)
from paceline.data._sample_columns import table_columns

_TAIL_BYTES = 64 * 1024
# A file of one row group is read by one request, footer and all, up to this size.
_WHOLE_BYTES = 64 * 1024 * 1024
_FOOTERS_KEPT = 32


@contextmanager
def _naming(file: DataFile) -> Iterator[None]:
    """Name the file in errors of pyarrow."""
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise file.damaged(error) from error


class ParquetFormat(FileFormat):
    """Parquet files.

    Args:
        columns: The columns to read; None for all.
    """

    kind = "parquet"
    suffixes = (".parquet", ".pq")

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)
        self._footers: OrderedDict[str, Any] = OrderedDict()

    def index_file(self, file: DataFile) -> IndexedFile:
        """Read the footer."""
        start, footer = _footer_of(file)
        metadata = self._metadata(file, {start: footer})
        schema = metadata.schema.to_arrow_schema()
        lines = file.columns_of(schema, self._columns)
        chunks = [
            _row_group_chunk(metadata.row_group(number))
            for number in range(metadata.num_row_groups)
        ]
        if len(chunks) == 1 and file.size <= _WHOLE_BYTES:
            chunks = [chunks[0]._replace(start=0, size=file.size)]
        return IndexedFile(chunks, xxhash.xxh3_64_hexdigest(footer), lines)

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Decode a row group."""
        path = file.local_path
        with _naming(file):
            if path is not None:
                opened = pq.ParquetFile(
                    path, metadata=self._footers.get(file.name), memory_map=True
                )
                self._keep(file, opened.metadata)
            else:
                pieces = {chunk.start: file.read(chunk.start, chunk.size)}
                metadata = self._metadata(file, pieces)
                opened = pq.ParquetFile(
                    pa.PythonFile(FileSegments(file, pieces)), metadata=metadata
                )
            with opened:
                # Several threads read files already.
                table = opened.read_row_group(number, columns=self._columns, use_threads=False)
        return table_columns(table)

    def _metadata(self, file: DataFile, pieces: dict[int, bytes]) -> Any:
        if file.name not in self._footers:
            if not any(start + len(data) == file.size for start, data in pieces.items()):
                start, footer = _footer_of(file)
                pieces = {start: footer}
            with _naming(file):
                metadata = pq.read_metadata(pa.PythonFile(FileSegments(file, pieces)))
            self._keep(file, metadata)
            return metadata
        return self._footers[file.name]

    def _keep(self, file: DataFile, metadata: Any) -> None:
        self._footers[file.name] = metadata
        while len(self._footers) > _FOOTERS_KEPT:
            self._footers.popitem(last=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_footers": OrderedDict()}


def _footer_of(file: DataFile) -> tuple[int, bytes]:
    """Return the offset and bytes of a file's end with all of its metadata."""
    start = max(0, file.size - _TAIL_BYTES)
    tail = file.read(start, file.size - start)
    if tail[-4:] != b"PAR1" or len(tail) < 12:
        raise file.damaged("it does not end as a Parquet file does")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > len(tail):
        start = file.size - length
        if start < 0:
            raise file.damaged("its metadata are longer than itself")
        tail = file.read(start, length)
    return file.size - length, tail[-length:]


def _row_group_chunk(group: Any) -> FileChunk:
    columns = [group.column(number) for number in range(group.num_columns)]
    starts = [
        min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
        for column in columns
    ]
    ends = [s + column.total_compressed_size for s, column in zip(starts, columns, strict=True)]
    start = min(starts, default=0)
    return FileChunk(group.num_rows, start, max(ends, default=0) - start, group.total_byte_size)


class ArrowFormat(FileFormat):
    """Arrow IPC files and streams, including Feather 2 and Hugging Face files.

    Args:
        columns: The columns to read; None for all.
    """

    kind = "arrow"
    suffixes = (".arrow", ".feather", ".ipc")

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = None if columns is None else list(columns)

    def index_file(self, file: DataFile) -> IndexedFile:
        """Read how many samples each batch has."""
        hasher, chunks = xxhash.xxh3_64(), []
        with _naming(file), _opened(file) as source:
            batches = _batches(source)
            schema = batches.schema
            for batch in batches:
                chunks.append(FileChunk(batch.num_rows, 0, 0, batch.nbytes))
                # The last sample stands for the content, so that no file is read as a whole.
                last = batch.slice(max(0, batch.num_rows - 1)).to_pylist()
                hasher.update(repr(last).encode())
        lines = file.columns_of(schema, self._columns)
        return IndexedFile(chunks, hasher.hexdigest(), lines)

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Read a batch."""
        with _naming(file), _opened(file) as source:
            batch = _arrow_batch(source, number)
        return table_columns(batch if self._columns is None else batch.select(self._columns))


def _opened(file: DataFile) -> Any:
    path = file.local_path
    if path is not None:
        return pa.memory_map(str(path))
    # Batches of a remote file are found one after the other: one request for all is faster.
    return pa.PythonFile(FileSegments(file, {0: file.read(0, file.size)}))


def _batches(source: Any) -> Any:
    try:
        return _FileBatches(pa.ipc.open_file(source))
    except pa.ArrowInvalid:
        # Arrow's stream format has no footer.
        source.seek(0)
        return pa.ipc.open_stream(source)


def _arrow_batch(source: Any, number: int) -> Any:
    batches = _batches(source)
    if isinstance(batches, _FileBatches):
        return batches.reader.get_batch(number)
    for _ in range(number):
        batches.read_next_batch()
    return batches.read_next_batch()


class _FileBatches:
    """The batches of a file with a footer."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.schema = reader.schema

    def __iter__(self) -> Any:
        return (self.reader.get_batch(n) for n in range(self.reader.num_record_batches))


BLOCK_BYTES = 4 * 1024 * 1024
_NEWLINE, _QUOTE = ord("\n"), ord('"')


class Block(NamedTuple):
    """Whole lines of a file: where they begin, and their bytes."""

    start: int
    data: bytes


def blocks_of(file: DataFile, hasher: "xxhash.xxh3_64", *, has_quotes: bool) -> Iterator[Block]:
    """Yield a file in blocks of whole lines.

    Args:
        file: The file.
        hasher: Takes all that is read.
        has_quotes: Whether double quotes can continue a value on the next line.
    """
    start, rest, at = 0, b"", 0
    while at < file.size:
        read = file.read(at, min(BLOCK_BYTES, file.size - at))
        hasher.update(read)
        at += len(read)
        rest += read
        end = len(rest) if at >= file.size else _end_of_lines(rest, has_quotes=has_quotes)
        if end:
            yield Block(start, rest[:end])
            start, rest = start + end, rest[end:]


def _end_of_lines(data: bytes, *, has_quotes: bool) -> int:
    """Return where the last whole line ends."""
    ends = line_ends(data, has_quotes=has_quotes)
    return int(ends[-1]) + 1 if len(ends) else 0


def line_ends(data: bytes, *, has_quotes: bool) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the positions of the newlines at line ends; `data` begins at a line start."""
    characters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(characters == _NEWLINE)
    if has_quotes and b'"' in data:
        quotes = np.flatnonzero(characters == _QUOTE)
        # A quote within quotes is doubled, so that an odd number of quotes stands before
        # quoted text.
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return ends


_FORM_HINT = (
    "is it cut off, compressed, of another encoding than UTF-8, or with another `delimiter`?"
)
_TYPES_HINT = (
    "the first 4 MiB of a file decide on the types of its columns: write numbers alike, such as 1.0"
    " where others have 1.5, or convert the file to Parquet."
)
# Text takes about as much memory as in the file, numbers less.
_TYPES = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string(), "bool": pa.bool_()}


class CsvFormat(FileFormat):
    """CSV files; the types of the columns come from the first lines of each file.

    Args:
        columns: The columns to read; None for all.
        delimiter: The character between the values of a line.

    Raises:
        ValueError: The delimiter is not one character.
    """

    kind = "csv"
    suffixes = (".csv", ".tsv")

    def __init__(self, columns: Sequence[str] | None = None, *, delimiter: str = ",") -> None:
        self._columns = None if columns is None else list(columns)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise ValueError(
                "`delimiter` must be one character, and no quote or end of a line, but got"
                f" {delimiter!r}."
            )
        self.delimiter = delimiter
        self._heads: dict[str, tuple[bytes, dict[str, Any]]] = {}

    def index_file(self, file: DataFile) -> IndexedFile:
        """Count the lines, and take the types of the first ones."""
        hasher = xxhash.xxh3_64()
        chunks: list[FileChunk] = []
        header, schema = b"", ""
        for start, data in blocks_of(file, hasher, has_quotes=True):
            if not header:
                header, data = _parted(data)
                start += len(header)
                if b"\r" in header.rstrip(b"\r\n"):
                    raise file.damaged("its lines end in \\r alone", "end them by \\n.")
                schema = self._schema(file, header)
            if data.strip():
                schema = schema if chunks else self._schema(file, header + data)
                chunks.append(FileChunk(_num_lines(data), start, len(data), 2 * len(data)))
        if not header:
            raise file.damaged("it has no line with the names of the columns")
        return IndexedFile(chunks, hasher.hexdigest(), schema)

    def _schema(self, file: DataFile, lines_of_file: bytes) -> str:
        schema = self._parse(file, lines_of_file).schema
        # A column without values in the first lines has no type of its own.
        return file.columns_of(schema, self._columns).replace(": null", ": string")

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Parse some lines."""
        header, types = self._head(file)
        data = file.read(chunk.start, chunk.size)
        table = self._parse(file, header + data, types, self._columns)
        if table.num_rows != chunk.rows:
            raise file.damaged(
                f"{table.num_rows} lines were read where {chunk.rows} were counted, from byte"
                f" {chunk.start} on"
            )
        return table_columns(table)

    def _head(self, file: DataFile) -> tuple[bytes, dict[str, Any]]:
        """Return the header line and the column types found by the index."""
        if file.name not in self._heads:
            hasher = xxhash.xxh3_64()
            blocks = blocks_of(file, hasher, has_quotes=True)
            header, data = _parted(next(blocks).data)
            while not data.strip():
                data = next(blocks).data
            schema = self._schema(file, header + data)
            pairs = (line.rpartition(": ") for line in schema.splitlines())
            types = {name: _TYPES.get(kind) for name, _, kind in pairs}
            self._heads[file.name] = header, {k: v for k, v in types.items() if v is not None}
        return self._heads[file.name]

    def _parse(
        self,
        file: DataFile,
        data: bytes,
        types: dict[str, Any] | None = None,
        columns: Sequence[str] | None = None,
    ) -> Any:
        try:
            table = csv.read_csv(
                io.BytesIO(data),
                read_options=csv.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                convert_options=csv.ConvertOptions(column_types=types, include_columns=columns),
            )
            # Names in another encoding are found when they are asked for.
            assert table.schema.names is not None
            return table
        except DataError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            hint = _TYPES_HINT if "conversion error" in str(error) else _FORM_HINT
            raise file.damaged(error, hint) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_heads": {}}


def _parted(data: bytes) -> tuple[bytes, bytes]:
    """Return the line of names and the other lines."""
    ends = line_ends(data, has_quotes=True)
    end = int(ends[0]) + 1 if len(ends) else len(data)
    header = data[:end]
    return (header if header.endswith(b"\n") else header + b"\n"), data[end:]


def _num_lines(data: bytes) -> int:
    """Return the number of non-empty lines."""
    ends = line_ends(data, has_quotes=True).tolist()
    if not ends or ends[-1] != len(data) - 1:
        ends.append(len(data))
    starts = [0, *(end + 1 for end in ends[:-1])]
    return sum(1 for a, b in zip(starts, ends, strict=True) if data[a:b] not in (b"", b"\r"))


# Objects of Python take several times the memory of their text.
_MEMORY_PER_BYTE = 4


class JsonLinesFormat(FileFormat):
    """Files with a JSON value on each line; each value is a sample."""

    kind = "json-lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder().decode

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._decode = msgspec.json.Decoder().decode

    def index_file(self, file: DataFile) -> IndexedFile:
        """Count the lines, and take the keys of the first line as the schema."""
        hasher, schema = xxhash.xxh3_64(), ""
        chunks: list[FileChunk] = []
        for block in blocks_of(file, hasher, has_quotes=False):
            lines = [line for line in block.data.split(b"\n") if line.strip()]
            if lines and not chunks:
                first = self._parse(file, lines[0])
                schema = (
                    "\n".join(f"{key}: any" for key in first) if isinstance(first, dict) else ""
                )
            if lines:
                size = len(block.data)
                chunks.append(FileChunk(len(lines), block.start, size, _MEMORY_PER_BYTE * size))
        return IndexedFile(chunks, hasher.hexdigest(), schema)

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Parse some lines."""
        lines = file.read(chunk.start, chunk.size).split(b"\n")
        samples = [self._parse(file, line) for line in lines if line.strip()]
        return FileRows(samples, chunk.num_bytes)

    def _parse(self, file: DataFile, line: bytes) -> Any:
        try:
            return self._decode(line)
        except msgspec.DecodeError as error:
            # Python writes NaN and infinite numbers, which other libraries refuse.
            with suppress(ValueError):
                return json.loads(line)
            raise file.damaged(
                f"{error}, in the line {line[:80]!r}",
                "each line must be a JSON value by itself; is the file cut off?",
            ) from error
