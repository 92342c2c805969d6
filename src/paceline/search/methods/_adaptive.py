"""Adaptive ASHA: several halving brackets side by side, and how to divide a search among them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar

from paceline.search._bracket_views import BracketPlan, BracketView
from paceline.search._exact_division import as_fraction, floor_log, floor_power, rung_units
from paceline.search._hyperparameter_space import Space
from paceline.search._inputs_and_operations import Create, ExitReason, Operation
from paceline.search._method_base import SearchMethod, TrialMaker, check_same_setup
from paceline.search._method_config import SearchConfig, check_integer
from paceline.search.methods._halving import HalvingMethod


class Mode(str, Enum):
    """Say how early adaptive ASHA dares to stop trials, by the brackets it runs."""

    STANDARD = "standard"
    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class _HalvingConfig(SearchConfig):
    max_trials: int
    max_time: int
    """The time, in units of the time metric, that the best trials train to."""
    time_metric: str
    divisor: float = 4
    """At each rung one of `divisor` trials goes on."""
    max_concurrent_trials: int = 16

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_integer("max_trials", self.max_trials, least=1)
        check_integer("max_time", self.max_time, least=1)
        check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
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

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return AdaptiveAshaMethod.of(self, maker)

    def num_planned(self, space: Space) -> int:
        """Return the configured number."""
        return self.max_trials


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncHalvingConfig(_HalvingConfig):
    """Stop weak trials early at rungs of one bracket."""

    num_rungs: int

    kind: ClassVar[str] = "async_halving"

    def __post_init__(self) -> None:
        _HalvingConfig.__post_init__(self)
        check_integer("num_rungs", self.num_rungs, least=1)

    def bracket_plans(self) -> tuple[BracketPlan, ...]:
        """Return the bracket that the search will run."""
        divisor = as_fraction(self.divisor)
        # Without a cap, just enough trials begin for one of them to reach the top.
        enough = floor_power(divisor, self.num_rungs - 1, self.max_trials)
        return (
            BracketPlan(
                units=rung_units(self.num_rungs, self.max_time, divisor),
                trials=self.max_trials,
                concurrent=self.max_concurrent_trials or enough,
                divisor=divisor,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveAshaConfig(_HalvingConfig):
    """Stop weak trials early in several brackets, which differ in how early they dare to."""

    mode: Mode = Mode.STANDARD
    max_rungs: int = 5
    bracket_rungs: tuple[int, ...] = ()
    """The number of rungs of each bracket; if given, `mode` and `max_rungs` have no say."""

    kind: ClassVar[str] = "adaptive_asha"

    def __post_init__(self) -> None:
        _HalvingConfig.__post_init__(self)
        check_integer("max_rungs", self.max_rungs, least=1)
        try:
            object.__setattr__(self, "mode", Mode(self.mode))
        except ValueError:
            raise ValueError(
                "`mode` must be one of `standard`, `conservative` and `aggressive`, "
                f"but got {self.mode!r}.\nHint: leave it out for `standard`."
            ) from None
        object.__setattr__(self, "bracket_rungs", tuple(self.bracket_rungs))
        for index, rungs in enumerate(self.bracket_rungs):
            check_integer(f"bracket_rungs[{index}]", rungs, least=1)

    def bracket_plans(self) -> tuple[BracketPlan, ...]:
        """Return the brackets that the search will run, the deepest first."""
        divisor = as_fraction(self.divisor)
        rungs = bracket_rungs(self)
        trials = bracket_trials(self.max_trials, divisor, rungs)
        concurrency = bracket_concurrency(self.max_concurrent_trials, divisor, trials)
        # Brackets that got no trials drop out here.
        return tuple(
            BracketPlan(
                units=rung_units(depth, self.max_time, divisor),
                trials=number,
                concurrent=cap,
                divisor=divisor,
            )
            for depth, number, cap in zip(rungs, trials, concurrency, strict=False)
        )


def bracket_rungs(config: AdaptiveAshaConfig) -> tuple[int, ...]:
    """Return the number of rungs of each bracket, the deepest first."""
    if config.bracket_rungs:
        return tuple(sorted(config.bracket_rungs, reverse=True))
    divisor = as_fraction(config.divisor)
    most = config.max_rungs - 1
    deepest = 1 + min(
        floor_log(config.max_time, divisor, most), floor_log(config.max_trials, divisor, most)
    )
    shallowest = {
        Mode.CONSERVATIVE: 1,
        Mode.STANDARD: (deepest - 1) // 2 + 1,
        Mode.AGGRESSIVE: deepest,
    }[config.mode]
    return tuple(range(deepest, shallowest - 1, -1))


def bracket_trials(max_trials: int, divisor: Fraction, rungs: tuple[int, ...]) -> tuple[int, ...]:
    """Divide the trials among brackets, at least one for each and never more in sum.

    When there are fewer trials than brackets, the last brackets get none.
    """
    rungs = rungs[:max_trials]
    weights = [divisor ** (depth - 1) / depth for depth in rungs]
    total = sum(weights)
    trials = [max(int(weight / total * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    while sum(trials) > max_trials:
        # The minimum of one has been given on credit: the largest bracket pays it back.
        trials[trials.index(max(trials))] -= 1
    return tuple(trials)


def bracket_concurrency(
    max_concurrent_trials: int, divisor: Fraction, trials: tuple[int, ...]
) -> tuple[int, ...]:
    """Divide the concurrent trials among brackets, at least one for each; 0 chooses a number."""
    num_brackets = len(trials)
    if max_concurrent_trials == 0:
        return (max(trials[-1], int(divisor)),) * num_brackets
    each, rest = divmod(max(max_concurrent_trials, num_brackets), num_brackets)
    return tuple(each + (index < rest) for index in range(num_brackets))


class AdaptiveAshaMethod(SearchMethod):
    """Run several brackets, each with its own trials."""

    def __init__(self, brackets: tuple[HalvingMethod, ...]) -> None:
        self._brackets = brackets
        self._owners: dict[str, HalvingMethod] = {}

    @classmethod
    def of(cls, config: _HalvingConfig, maker: TrialMaker) -> AdaptiveAshaMethod:
        """Make the method that a configuration asks for; async halving is its one-bracket form."""
        return cls(
            tuple(
                HalvingMethod(
                    maker,
                    plan,
                    smaller_is_better=config.smaller_is_better,
                )
                for plan in config.bracket_plans()
            )
        )

    def start(self) -> list[Operation]:
        """Return the operations that create the first trials, bracket by bracket."""
        operations: list[Operation] = []
        for bracket in self._brackets:
            operations += self._own(bracket, bracket.start())
        return operations

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Hand the report to the bracket that created the trial."""
        bracket = self._owners[request_id]
        return self._own(bracket, bracket.reported(request_id, time, metric))

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Hand the end to the bracket that created the trial."""
        bracket = self._owners[request_id]
        return self._own(bracket, bracket.exited(request_id, reason, is_stopped))

    def num_trials(self, num_invalid: int) -> int:
        """Return the number of trials of all brackets."""
        return sum(bracket.num_trials(0) for bracket in self._brackets)

    def trained_share(self, time: float) -> float:
        """Return the part of the longest time, to which the top rungs of all brackets train."""
        return self._brackets[0].trained_share(time)

    def brackets(self) -> tuple[BracketView, ...]:
        """Return a view of the brackets, the deepest first."""
        return tuple(view for bracket in self._brackets for view in bracket.brackets())

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {"brackets": [bracket.snapshot() for bracket in self._brackets]}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """
        check_same_setup("brackets", len(self._brackets), len(snapshot["brackets"]))
        self._owners = {}
        for bracket, stored in zip(self._brackets, snapshot["brackets"], strict=True):
            bracket.load(stored)
            self._owners |= dict.fromkeys(bracket.entrants(), bracket)

    def _own(self, bracket: HalvingMethod, operations: list[Operation]) -> list[Operation]:
        for operation in operations:
            if isinstance(operation, Create):
                self._owners[operation.request_id] = bracket
        return operations
