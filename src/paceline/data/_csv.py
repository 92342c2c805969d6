"""CSV files with a line of names: some lines are a piece."""

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import xxhash
from pyarrow import csv

from paceline.data._errors import DataError
from paceline.data._file_format import DataFile, FileChunk, FileFormat, IndexedFile
from paceline.data._sample_columns import columns_of_table
from paceline.data._text_blocks import blocks_of, line_ends

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
    """CSV files; the types of the columns are those of the first lines of each file.

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
    """Return the number of lines that are not empty."""
    ends = line_ends(data, has_quotes=True).tolist()
    if not ends or ends[-1] != len(data) - 1:
        ends.append(len(data))
    starts = [0, *(end + 1 for end in ends[:-1])]
    return sum(1 for a, b in zip(starts, ends, strict=True) if data[a:b] not in (b"", b"\r"))
