"""`--config key=value` as nested fields, for requests that send changes only."""

from collections.abc import Sequence
from typing import Any


def nested_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return changes such as `searcher.max_length=5` as nested fields.

    Raises:
        ConfigError: A change is not of the form `key=value`.
    """
    from paceline.config import apply_overrides

    return apply_overrides({}, overrides)
