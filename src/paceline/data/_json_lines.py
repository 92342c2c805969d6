"""Files of JSON lines: some lines are a piece."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import xxhash

from paceline.data._file_format import DataFile, FileChunk, FileFormat, FileRows, IndexedFile
from paceline.data._text_blocks import blocks_of

# Objects of Python take several times the memory of their text.
_MEMORY_PER_BYTE = 4


class JsonLinesFormat(FileFormat):
    """Files with a JSON value on each line, which is a sample as it is."""

    kind = "json-lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder().decode

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._decode = msgspec.json.Decoder().decode

    def index_file(self, file: DataFile) -> IndexedFile:
        """Count the lines, and take the keys of the first one."""
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
