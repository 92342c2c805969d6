"""Facts that the first start of a run records: its seed and its hyperparameters."""

import logging
import secrets
from collections.abc import Mapping
from math import isfinite
from typing import Any

from paceline.journal import RunInfo

logger = logging.getLogger(__name__)

_MAX_SEED = 2**31
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def drawn_seed() -> int:
    """Return a new seed."""
    return secrets.randbelow(_MAX_SEED)


def recordable(value: Any) -> Any:
    """Return a copy of hyperparameters for JSON; what JSON cannot hold becomes text."""
    if isinstance(value, Mapping):
        return {str(key): recordable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [recordable(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        # A NumPy scalar or a 0-d tensor.
        value = value.item()
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int and _INT64_MIN <= value <= _INT64_MAX:
        return value
    if type(value) is float and isfinite(value):
        return value
    return str(value)


def tell_of_changes(info: RunInfo, hparams: Mapping[str, Any] | None) -> None:
    """Warn if a run goes on with other hyperparameters than it began with."""
    if hparams is None or info.hparams is None:
        return
    before, now = info.hparams, recordable(hparams)
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        logger.warning(
            "The run %r goes on with other hyperparameters than it began with, which stay on"
            " record: %s.",
            info.name,
            "; ".join(changed),
        )
