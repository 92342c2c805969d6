"""Records that the master cannot take: kept in a file, so that they do not hold up the rest."""

import logging
import time
from pathlib import Path

import msgspec

from paceline._private_files import open_private
from paceline.journal import RecordLost, encode_record
from paceline.messages.attempts import RawRecordBatch

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 300

Position = tuple[int, int, int]
"""Generation, rank and number of a record."""


class RefusedRecords:
    """Keep records beside the attempt, and hold what is sent in their place.

    Args:
        path: The file that gets one line of JSON for each of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._replaced: dict[Position, msgspec.Raw] = {}
        self._first: str | None = None

    @property
    def summary(self) -> str | None:
        """What is known of these records, None if there are none."""
        if self._first is None:
            return None
        num_others = len(self._replaced) - 1
        return self._first + (f" ({num_others} more were set aside.)" if num_others else "")

    def replace(self, position: Position, payload: bytes) -> msgspec.Raw:
        """Return what is sent for a record: the record itself, unless it was set aside."""
        return self._replaced.get(position) or msgspec.Raw(payload)

    def add(self, batch: RawRecordBatch, why: str) -> None:
        """Set the only record of a batch aside; `why` says what the master does with it."""
        [(sequence, payload)] = batch.records
        record = bytes(payload)
        line = {
            "generation": batch.generation,
            "rank": batch.rank,
            "sequence": sequence,
            "why": why,
            "record": msgspec.Raw(record),
        }
        place = f"it is set aside in {str(self._path)!r}"
        try:
            with open_private(self._path, "ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            place = f"it cannot be set aside ({error})"
        shown = record.decode(errors="replace")[:_SHOWN_CHARACTERS]
        reason = f"{why}, so {place}: {shown}"
        self._replaced[batch.generation, batch.rank, sequence] = msgspec.Raw(
            encode_record(RecordLost(time=time.time(), reason=reason))
        )
        text = f"Record {sequence} of rank {batch.rank} (generation {batch.generation}) is lost:"
        logger.error("%s %s", text, reason)
        self._first = self._first or f"{text} {reason}"
