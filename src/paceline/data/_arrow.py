"""Arrow files, with or without a footer: a record batch is a piece."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import xxhash

from paceline.data._errors import DataError
from paceline.data._file_format import DataFile, FileChunk, FileFormat, FileSegments, IndexedFile
from paceline.data._sample_columns import columns_of_table


class ArrowFormat(FileFormat):
    """Arrow IPC files and streams, such as Feather 2 and those of Hugging Face.

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
        try:
            with _opened(file) as source:
                batches = _batches(source)
                schema = batches.schema
                for batch in batches:
                    chunks.append(FileChunk(batch.num_rows, 0, 0, batch.nbytes))
                    # The last sample stands for the content, so that no file is read as a whole.
                    last = batch.slice(max(0, batch.num_rows - 1)).to_pylist()
                    hasher.update(repr(last).encode())
        except DataError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise file.damaged(error) from error
        lines = file.columns_of(schema, self._columns)
        return IndexedFile(chunks, hasher.hexdigest(), lines)

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Read a batch."""
        try:
            with _opened(file) as source:
                batch = _arrow_batch(source, number)
        except DataError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise file.damaged(error) from error
        return columns_of_table(batch if self._columns is None else batch.select(self._columns))


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
