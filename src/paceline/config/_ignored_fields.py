"""Fields of older configs that are accepted and ignored."""

from typing import Any

from pydantic import Field


def without_effect(reason: str) -> Any:
    """Return a field of older configs that is accepted and ignored.

    Args:
        reason: Why it has no effect.
    """
    return Field(
        default=None,
        description=f"Has no effect: {reason}.",
        json_schema_extra={"deprecated": True},
    )
