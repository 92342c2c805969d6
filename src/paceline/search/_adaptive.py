"""Adaptive ASHA: several halving brackets side by side, and how to divide a search among them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from paceline.search._config import AdaptiveAshaConfig, AsyncHalvingConfig, Mode
from paceline.search._exact import as_fraction, floor_log, floor_power, rung_units
from paceline.search._halving import BracketPlan, HalvingMethod
from paceline.search._messages import Create, ExitReason, Operation
from paceline.search._method import SearchMethod, TrialMaker, check_same_setup
from paceline.search._views import BracketView


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


def plan_brackets(config: AsyncHalvingConfig | AdaptiveAshaConfig) -> tuple[BracketPlan, ...]:
    """Return the brackets that a halving search will run."""
    divisor = as_fraction(config.divisor)
    if isinstance(config, AsyncHalvingConfig):
        # Without a cap, just enough trials begin for one of them to reach the top.
        enough = floor_power(divisor, config.num_rungs - 1, config.max_trials)
        return (
            BracketPlan(
                units=rung_units(config.num_rungs, config.max_time, divisor),
                trials=config.max_trials,
                concurrent=config.max_concurrent_trials or enough,
            ),
        )
    rungs = bracket_rungs(config)
    trials = bracket_trials(config.max_trials, divisor, rungs)
    concurrency = bracket_concurrency(config.max_concurrent_trials, divisor, trials)
    # Brackets that got no trials drop out here.
    return tuple(
        BracketPlan(
            units=rung_units(depth, config.max_time, divisor), trials=number, concurrent=cap
        )
        for depth, number, cap in zip(rungs, trials, concurrency, strict=False)
    )


class AdaptiveAshaMethod(SearchMethod):
    """Run several brackets, each with its own trials."""

    def __init__(self, brackets: tuple[HalvingMethod, ...]) -> None:
        self._brackets = brackets
        self._owners: dict[str, HalvingMethod] = {}

    @classmethod
    def of(
        cls, config: AsyncHalvingConfig | AdaptiveAshaConfig, maker: TrialMaker
    ) -> AdaptiveAshaMethod:
        """Make the method that a configuration asks for; async halving is its one-bracket form."""
        return cls(
            tuple(
                HalvingMethod(
                    maker,
                    plan,
                    divisor=as_fraction(config.divisor),
                    smaller_is_better=config.smaller_is_better,
                )
                for plan in plan_brackets(config)
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
