"""Lines of logs, and filters that choose among them."""

from dataclasses import dataclass

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_USUAL_LEVEL = "INFO"
ATTEMPT_SHIFT = 40


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line of a trial's log; `id` orders the lines of the trial."""

    id: int
    attempt: int
    time: float
    rank: int | None
    stream: str
    level: str | None
    text: str


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines to return; None means all.

    `level` is the lowest one; `since` and `until` are seconds since 1970, both included.
    """

    rank: int | None = None
    level: str | None = None
    stream: str | None = None
    search: str | None = None
    since: float | None = None
    until: float | None = None

    def matches(self, line: StoredLine) -> bool:
        """Tell whether a line passes."""
        if self.rank is not None and line.rank != self.rank:
            return False
        if self.stream is not None and line.stream != self.stream:
            return False
        if self.level is not None and _level_number(line.level) < _level_number(self.level):
            return False
        if self.since is not None and line.time < self.since:
            return False
        if self.until is not None and line.time > self.until:
            return False
        return self.search is None or self.search.lower() in line.text.lower()


def log_levels() -> tuple[str, ...]:
    """Return the names of the levels, lowest first."""
    return _LEVELS


def levels_from(level: str) -> tuple[str, ...]:
    """Return a level and those above it; none if lines without a level are among them."""
    number = _level_number(level)
    return _LEVELS[number:] if number > _level_number(_USUAL_LEVEL) else ()


def line_id(attempt: int, number: int) -> int:
    """Return the id of a line of an attempt."""
    return (attempt << ATTEMPT_SHIFT) + number


def _level_number(level: str | None) -> int:
    return _LEVELS.index(level if level in _LEVELS else _USUAL_LEVEL)
