"""Parquet files: a row group is a piece."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from paceline.data._errors import DataError
from paceline.data._file_format import DataFile, FileChunk, FileFormat, FileSegments, IndexedFile
from paceline.data._sample_columns import columns_of_table

_TAIL_BYTES = 64 * 1024
# A file of one row group is read by one request, footer and all, up to this size.
_WHOLE_BYTES = 64 * 1024 * 1024
_FOOTERS_KEPT = 32


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
        try:
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
                table = opened.read_row_group(number, columns=self._columns, use_threads=False)
        except DataError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise file.damaged(error) from error
        return columns_of_table(table)

    def _metadata(self, file: DataFile, pieces: dict[int, bytes]) -> Any:
        if file.name not in self._footers:
            if not any(start + len(data) == file.size for start, data in pieces.items()):
                start, footer = _footer_of(file)
                pieces = {start: footer}
            try:
                metadata = pq.read_metadata(pa.PythonFile(FileSegments(file, pieces)))
            except DataError:
                raise
            except (pa.ArrowException, OSError) as error:
                raise file.damaged(error) from error
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
    """Return where the end of a file begins that has its metadata, and that end."""
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
