"""Records beside the database: an append-only file per experiment, from which it can be rebuilt."""

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from paceline._regular_files import regular_opener
from paceline.journal import frame_line
from paceline.master.store import RecordedRow, decode_row, encode_row
from paceline.master.upkeep._line_files import whole_lines

RECORDS = "records"
_ACCOUNTS_NAME = "accounts.jsonl"


def record_path(home: Path, experiment_id: int | None) -> Path:
    """Return the file of an experiment, or that of users and tokens for None."""
    name = _ACCOUNTS_NAME if experiment_id is None else f"experiment-{experiment_id}.jsonl"
    return home / RECORDS / name


def recorded_experiments(home: Path) -> list[int]:
    """Return the experiments that have a record, by number."""
    names = (path.stem.removeprefix("experiment-") for path in (home / RECORDS).glob("exp*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_record(path: Path) -> Iterator[tuple[int, RecordedRow | None]]:
    """Yield the number of each line, from 1, and its row; None if it is damaged.

    A last line without its end is being written, or was cut off: it is left out.
    """
    with open(path, "rb", opener=regular_opener) as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, _parse_record(line[:-1])


def _parse_record(line: bytes) -> RecordedRow | None:
    checksum, _, body = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(body):
            return None
        return decode_row(body.partition(b" ")[2])
    except (ValueError, KeyError, TypeError, msgspec.DecodeError):
        return None


def append_recovery_rows(
    path: Path, number: int, rows: Iterable[RecordedRow], *, anew: bool
) -> None:
    """Add rows to a record; `number` orders the changes.

    A line that was cut off by a crash is cut away first.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    end = whole_lines(path) if path.exists() and not anew else 0
    with os.fdopen(regular_opener(str(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC), "r+b") as file:
        file.truncate(end)
        file.seek(end)
        for row in rows:
            file.write(frame_line(number, encode_row(row)))
