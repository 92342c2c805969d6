"""How long an upload may take."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

_DEFAULTS_S = {"PART": 60.0, "FILE": 1800.0, "CHECKPOINT": 3600.0}


class UploadLimits(NamedTuple):
    """The seconds that a part of a file, a file, and one rank's files of a checkpoint have.

    A part that takes longer is sent again for twice as long; then it has failed.
    """

    part_s: float
    file_s: float
    checkpoint_s: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "UploadLimits":
        """Return what PACELINE_STORE_PART_TIMEOUT_S and its like say.

        Raises:
            ValueError: One is no number above 0.
        """
        variables = os.environ if environment is None else environment
        return cls(*(_seconds(variables, _name(what), _DEFAULTS_S[what]) for what in _DEFAULTS_S))


def _name(what: str) -> str:
    return f"PACELINE_STORE_{what}_TIMEOUT_S"


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"`{name}` must be a number of seconds above 0, but got {text!r}.")
    return value


def limit_hint(what: str) -> str:
    """Return how to allow more time for a "part", a "file" or a "checkpoint"."""
    return f"Hint: {_name(what.upper())} allows more time."
