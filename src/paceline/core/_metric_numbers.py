"""Numbers among metrics, for what shows nothing else."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.journal import decode_value


def numbers_of(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers among metrics; those of nested dictionaries have names such as "a/b".

    Args:
        metrics: The metrics, also as a journal has them.
        prefix: What to put before each name.
    """
    for name, value in metrics.items():
        number = decode_value(value)
        if isinstance(number, Mapping):
            yield from numbers_of(number, f"{prefix}{name}/")
        elif isinstance(number, (int, float)):
            yield f"{prefix}{name}", float(number)
