"""What a check of a home finds."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference.

    Attributes:
        kind: ``home``, ``database``, ``record``, ``context``, ``log``, ``journal`` or
            ``checkpoint``.
        where: The file or the row, by name.
        problem: What is wrong with it.
        fix: What was done, None if nothing was.
        hint: What to do, None if that is said elsewhere.
    """

    kind: str
    where: str
    problem: str
    fix: str | None = None
    hint: str | None = None

    @property
    def text(self) -> str:
        """The finding in one sentence."""
        hint = "" if self.hint is None else f" Hint: {self.hint}."
        done = hint if self.fix is None else f" Fixed: {self.fix}."
        return f"{self.where} {self.problem}.{done}"


Report = Callable[[Finding], None]


class CheckPace:
    """Keep reads of files to a number of bytes per second; without one, they are not slowed.

    Args:
        bytes_per_s: The rate.
        wait: Sleeps for a number of seconds.
    """

    def __init__(
        self, bytes_per_s: float | None = None, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._wait = wait

    def spend(self, num_bytes: int) -> None:
        """Wait for as long as reading so much may take."""
        if self._bytes_per_s is not None:
            self._wait(num_bytes / self._bytes_per_s)
