"""The five search configurations, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar


class Mode(str, Enum):
    """Say how early adaptive ASHA dares to stop trials, by the brackets it runs."""

    STANDARD = "standard"
    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Common:
    metric: str
    smaller_is_better: bool = True

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(
                f"`metric` must name a validation metric, but got {self.metric!r}.\n"
                'Hint: write for example `metric: "validation_loss"`.'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleConfig(_Common):
    """Train one trial."""

    max_length: int | None = None
    """The trial's length if it works by operations; None stands for 1."""

    kind: ClassVar[str] = "single"

    def __post_init__(self) -> None:
        _Common.__post_init__(self)
        _check_optional_length(self.max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomConfig(_Common):
    """Train trials with hyperparameters drawn at random."""

    max_trials: int
    max_concurrent_trials: int = 16
    """0 runs all trials at once."""
    max_length: int | None = None

    kind: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        _Common.__post_init__(self)
        _check_integer("max_trials", self.max_trials, least=1)
        _check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        _check_optional_length(self.max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridConfig(_Common):
    """Train one trial for each point of a grid."""

    max_concurrent_trials: int = 16
    """0 runs all trials at once."""
    max_length: int | None = None

    kind: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        _Common.__post_init__(self)
        _check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        _check_optional_length(self.max_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Halving(_Common):
    max_trials: int
    max_time: int
    """The time, in units of the time metric, that the best trials train to."""
    time_metric: str
    divisor: float = 4
    """At each rung one of `divisor` trials goes on."""
    max_concurrent_trials: int = 16

    def __post_init__(self) -> None:
        _Common.__post_init__(self)
        _check_integer("max_trials", self.max_trials, least=1)
        _check_integer("max_time", self.max_time, least=1)
        _check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        divisor: Any = self.divisor
        if (
            isinstance(divisor, bool)
            or not isinstance(divisor, int | float)
            or not 1 < divisor < math.inf
        ):
            raise ValueError(
                f"`divisor` must be a number greater than 1, but got {divisor!r}.\n"
                "Hint: 4 is the default; 3 stops fewer trials at each rung."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncHalvingConfig(_Halving):
    """Stop weak trials early at rungs of one bracket."""

    num_rungs: int

    kind: ClassVar[str] = "async_halving"

    def __post_init__(self) -> None:
        _Halving.__post_init__(self)
        _check_integer("num_rungs", self.num_rungs, least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveAshaConfig(_Halving):
    """Stop weak trials early in several brackets, which differ in how early they dare to."""

    mode: Mode = Mode.STANDARD
    max_rungs: int = 5
    bracket_rungs: tuple[int, ...] = ()
    """The number of rungs of each bracket; if given, `mode` and `max_rungs` have no say."""

    kind: ClassVar[str] = "adaptive_asha"

    def __post_init__(self) -> None:
        _Halving.__post_init__(self)
        _check_integer("max_rungs", self.max_rungs, least=1)
        try:
            object.__setattr__(self, "mode", Mode(self.mode))
        except ValueError:
            raise ValueError(
                "`mode` must be one of `standard`, `conservative` and `aggressive`, "
                f"but got {self.mode!r}.\nHint: leave it out for `standard`."
            ) from None
        object.__setattr__(self, "bracket_rungs", tuple(self.bracket_rungs))
        for index, rungs in enumerate(self.bracket_rungs):
            _check_integer(f"bracket_rungs[{index}]", rungs, least=1)


SearchConfig = SingleConfig | RandomConfig | GridConfig | AsyncHalvingConfig | AdaptiveAshaConfig


def _check_integer(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, but got {value!r}.\n"
            f"Hint: set `searcher.{name}` to {least} or more."
        )


def _check_optional_length(value: int | None) -> None:
    if value is not None:
        _check_integer("max_length", value, least=1)
