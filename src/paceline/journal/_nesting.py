"""How deep JSON may be nested: what shows it has limits of its own."""

from typing import Any

MAX_DEPTH = 64


def is_too_deep(value: Any) -> bool:
    """Tell whether dictionaries and lists are in each other more than `MAX_DEPTH` times."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return False
        level = [
            item for each in level for item in (each.values() if isinstance(each, dict) else each)
        ]
    return True
