"""CSV files with a line of names: some lines are a piece."""

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import xxhash
from pyarrow import csv

from paceline.data._errors import DataError
from paceline.data._file_format import Chunk, DataFile, FileFormat, IndexedFile
from paceline.data._sample_columns import columns_of_table
from paceline.data._text_blocks import blocks_of, line_ends

# Text takes about as much memory as in the file, numbers less.
_TYPES = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string(), "bool": pa.bool_()}


class CsvFormat(FileFormat):
    """CSV files; the types of the columns are those of the first lines of each file.

    Args:
        columns: The columns to read; None for all.
        delimiter: What stands between the values of a line.
    """

    kind = "csv"
    suffixes = (".csv", ".tsv")

    def __init__(self, columns: Sequence[str] | None = None, *, delimiter: str = ",") -> None:
        self._columns = None if columns is None else list(columns)
        self._delimiter = delimiter
        self._heads: dict[str, tuple[bytes, dict[str, Any]]] = {}

    def index_file(self, file: DataFile) -> IndexedFile:
        """Count the lines, and take the types of the first ones."""
        hasher = xxhash.xxh3_64()
        chunks: list[Chunk] = []
        header, schema = b"", ""
        for start, data in blocks_of(file, hasher, has_quotes=True):
            if not header:
                header, data = _parted(data)
                start += len(header)
                schema = self._schema(file, header)
            if data.strip():
                schema = schema if chunks else self._schema(file, header + data)
                chunks.append(Chunk(_num_lines(data), start, len(data), 2 * len(data)))
        if not header:
            raise file.damaged("it has no line with the names of the columns")
        return IndexedFile(chunks, hasher.hexdigest(), schema)

    def _schema(self, file: DataFile, lines_of_file: bytes) -> str:
        table = self._parse(file, lines_of_file, None)
        if self._columns is not None:
            missing = set(self._columns) - set(table.schema.names)
            if missing:
                raise file.damaged(f"it has no column {sorted(missing)}")
        # A column without values in the first lines has no type of its own.
        kinds = [str(field.type).replace("null", "string") for field in table.schema]
        lines = [f"{name}: {kind}" for name, kind in zip(table.schema.names, kinds, strict=True)]
        return "\n".join(lines)

    def read_chunk(self, file: DataFile, number: int, chunk: Chunk) -> Any:
        """Parse some lines."""
        header, types = self._head(file)
        data = file.read(chunk.start, chunk.size)
        table = self._parse(file, header + data, types)
        if table.num_rows != chunk.rows:
            raise file.damaged(
                f"{table.num_rows} lines were read where {chunk.rows} were counted, from byte"
                f" {chunk.start} on"
            )
        return columns_of_table(table)

    def _head(self, file: DataFile) -> tuple[bytes, dict[str, Any]]:
        """Return the line of names and the types that the index has found."""
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

    def _parse(self, file: DataFile, data: bytes, types: dict[str, Any] | None) -> Any:
        try:
            return csv.read_csv(
                io.BytesIO(data),
                read_options=csv.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                convert_options=csv.ConvertOptions(
                    column_types=types, include_columns=self._columns
                ),
            )
        except DataError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise file.damaged(error) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_heads": {}}


def _parted(data: bytes) -> tuple[bytes, bytes]:
    """Return the line of names and the other lines."""
    ends = line_ends(data, has_quotes=True)
    end = int(ends[0]) + 1 if len(ends) else len(data)
    header = data[:end]
    return (header if header.endswith(b"\n") else header + b"\n"), data[end:]


def _num_lines(data: bytes) -> int:
    """Return the number of lines that are not empty."""
    ends = line_ends(data, has_quotes=True).tolist()
    if not ends or ends[-1] != len(data) - 1:
        ends.append(len(data))
    starts = [0, *(end + 1 for end in ends[:-1])]
    return sum(1 for a, b in zip(starts, ends, strict=True) if data[a:b] not in (b"", b"\r"))
