"""Checks of what users give as JSON."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.journal import MAX_DEPTH, is_too_deep


def plain_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `metadata` as JSON holds it.

    Raises:
        TypeError: It is no dictionary, is nested too deep, or holds what JSON does not.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"`metadata` must be a dictionary, but got {metadata!r}.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(metadata, allow_nan=False))
        msgspec.json.encode(copy)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"`metadata` must be JSON-able, but {error}. Hint: use strings, finite numbers,"
            " booleans, lists and dictionaries."
        ) from error
    if is_too_deep(copy):
        raise TypeError(f"`metadata` must not be nested more than {MAX_DEPTH} times.")
    return copy
