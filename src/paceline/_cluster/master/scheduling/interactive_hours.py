"""Hours of a week in which interactive trials come first."""

import re
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
HOURS_FORM = "hours, days and a time zone as in '09:00-18:00 mon-fri Europe/Berlin'"
_PATTERN = re.compile(
    r"(?P<begin>\d\d:\d\d)-(?P<end>\d\d:\d\d)"
    r"(?: (?P<days>[a-z]{3}(?:[-,][a-z]{3})*))?(?: (?P<zone>[A-Z][A-Za-z0-9_+/-]{1,60}))?"
)


@dataclass(frozen=True, slots=True)
class InteractiveHours:
    """Hours from `begin` up to `end`, in minutes of a day, on some `days` in a time zone.

    Hours over midnight are those of the day on which they begin. Wall clocks count: on the day of
    a change of time, they have an hour more or less.
    """

    begin: int
    end: int
    days: frozenset[int]
    zone: str
    text: str

    def has(self, now: float) -> bool:
        """Return whether a moment, in seconds since the epoch, is in these hours."""
        if (zone := _zone(self.zone)) is None:
            return False
        at = datetime.fromtimestamp(now, zone)
        minute, day = 60 * at.hour + at.minute, at.weekday()
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        if minute >= self.begin:
            return day in self.days
        return minute < self.end and (day - 1) % 7 in self.days


def parse_hours(text: str) -> InteractiveHours:
    """Return hours from a text; without days they are of each day, without a zone of UTC.

    Raises:
        ValueError: The text has another form, or there is no such hour, day or time zone.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise ValueError(f"must be {HOURS_FORM}, but got {text!r}.")
    begin, end = (_minute(found[name]) for name in ("begin", "end"))
    days = _days(found["days"] or "mon-sun")
    zone = found["zone"] or "UTC"
    if begin is None or end is None or begin in (end, _DAY) or days is None:
        raise ValueError(f"must be {HOURS_FORM}, two times and days of a week, but got {text!r}.")
    if _zone(zone) is None:
        raise ValueError(
            f"must name a time zone that the machine of the master has, but got {zone!r}. Hint:"
            " names are as in /usr/share/zoneinfo; `pip install tzdata` brings them."
        )
    return InteractiveHours(begin, end, days, zone, text)


def _minute(text: str) -> int | None:
    hour, minute = (int(one) for one in text.split(":"))
    is_time = minute < 60 and 60 * hour + minute <= _DAY
    return 60 * hour + minute if is_time else None


def _days(text: str) -> frozenset[int] | None:
    found: set[int] = set()
    for part in text.split(","):
        names = part.split("-")
        if len(names) > 2 or not set(names) <= set(_DAYS):
            return None
        first, last = (_DAYS.index(name) for name in (names[0], names[-1]))
        found |= {(first + n) % 7 for n in range((last - first) % 7 + 1)}
    return frozenset(found)


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo | None:
    if name == "UTC":
        return timezone.utc
    # Only names that are known: others would be looked up as paths.
    return ZoneInfo(name) if name in available_timezones() else None
