"""Checkpoints that follow each other: when the next one begins."""

import time
from typing import Literal, TypeAlias

ContinuousPeriod: TypeAlias = Literal["continuous"]
"""A checkpoint period: the next checkpoint begins when the last one is stored."""

CONTINUOUS: ContinuousPeriod = "continuous"

_HOUR_S = 3600.0
# Where storing fails at once, the next two failures would follow within the same moment, and the
# third one ends training.
_RETRY_S = 60.0


class ContinuousSaves:
    """Pace checkpoints, so that they take no more bytes than allowed, and do not fail in a row.

    Args:
        bytes_per_hour: How many bytes to store in an hour at most, on average since the last
            checkpoint: each begins later by the share of the hour that the last one has used. None
            for no limit.
    """

    def __init__(self, bytes_per_hour: int | None = None) -> None:
        self._seconds_per_byte = 0.0 if bytes_per_hour is None else _HOUR_S / bytes_per_hour
        self._begun_s = self._next_s = 0.0
        self._retry_s: float | None = None

    def carry_on(self, num_bytes: int, stored_s: float) -> None:
        """Take in the last checkpoint of an earlier process of the run.

        Args:
            num_bytes: Its size.
            stored_s: When it was stored, in seconds since the epoch.
        """
        self._next_s = time.monotonic() + num_bytes * self._seconds_per_byte
        self._next_s -= max(time.time() - stored_s, 0.0)

    def is_due(self, *, is_newest_lost: bool) -> bool:
        """Tell whether the next one begins, where none is being stored.

        Args:
            is_newest_lost: Whether the newest one could not be stored.
        """
        now = time.monotonic()
        if is_newest_lost:
            if self._retry_s is None:
                self._retry_s = now + _RETRY_S
            if now < self._retry_s:
                return False
        return now >= self._next_s

    def note_begun(self) -> None:
        """Take in that a checkpoint begins, also one that was due for another reason."""
        self._begun_s, self._retry_s = time.monotonic(), None

    def note_stored(self, num_bytes: int) -> None:
        """Take in the size of the checkpoint that was stored."""
        self._next_s = max(self._next_s, self._begun_s) + num_bytes * self._seconds_per_byte
