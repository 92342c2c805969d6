"""Sizes and times as people write them: "20GB", "7d"."""

import math
import re

_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")
_MAX = 2**53 - 1

SIZE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_BYTES)})$"
AGE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_SECONDS)})$"
SIZE_FORMS = 'an integer of bytes, or text such as "20GB" or "512MiB"'
AGE_FORMS = 'seconds, or text such as "7d", "12h" or "30min"'


def bytes_of(value: object) -> int | None:
    """Return a size in bytes, None if the value is none.

    Args:
        value: An integer of at least 1, or a number with B, KB (1000 bytes), KiB (1024 bytes) and
            so on.
    """
    number = _number(value, _BYTES) if not isinstance(value, float) else None
    return None if number is None or number < 1 else int(number)


def seconds_of(value: object) -> float | None:
    """Return a time in seconds, None if the value is none.

    Args:
        value: A number above 0, or one with s, min, h, d or w.
    """
    number = _number(value, _SECONDS)
    return None if number is None or number <= 0 else float(number)


def _number(value: object, units: dict[str, int]) -> float | None:
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value.strip())
        if found is None or found[2] not in units:
            return None
        value = float(found[1]) * units[found[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if value <= _MAX else None
