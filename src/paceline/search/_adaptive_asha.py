"""Adaptive ASHA: configs of halving searches, and the division of a search among brackets.

Halving in promotion form: trials pause at rungs and resume when promoted; Hyperband.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar

from paceline.search import _search_messages as messages
from paceline.search import _search_method as base
from paceline.search._hyperparameter_space import Space
from paceline.search._rungs import Fate, HalvingMethod


class Mode(str, Enum):
    """Eagerness of adaptive ASHA to stop trials early, by its choice of brackets."""

    STANDARD = "standard"
    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"


@dataclass(frozen=True, kw_only=True, slots=True)
class _HalvingConfig(base.SearchConfig):
    max_trials: int
    max_time: int
    """The time, in units of the time metric, that the best trials train to."""
    time_metric: str
    divisor: float = 4
    """At each rung one of `divisor` trials continues."""
    max_concurrent_trials: int = 16
    promotes: bool = False
    """Trials pause at rungs until they are among the best, instead of being stopped."""
    waits_for_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        base.SearchConfig.__post_init__(self)
        base.check_integer("max_trials", self.max_trials, least=1)
        base.check_integer("max_time", self.max_time, least=1)
        base.check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
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

    @property
    def waits_at_targets(self) -> bool:
        """Return whether trials pause at rungs."""
        return self.promotes

    def make_method(self, maker: base.TrialMaker) -> base.SearchMethod:
        """Return the method."""
        return AdaptiveAshaMethod.of(self, maker)

    def num_planned(self, space: Space) -> int:
        """Return the configured number."""
        return self.max_trials


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncHalvingConfig(_HalvingConfig):
    """Configuration of async halving: weak trials stop early at the rungs of a single bracket."""

    num_rungs: int

    kind: ClassVar[str] = "async_halving"

    def __post_init__(self) -> None:
        _HalvingConfig.__post_init__(self)
        base.check_integer("num_rungs", self.num_rungs, least=1)

    def bracket_plans(self) -> tuple[base.BracketPlan, ...]:
        """Return the single bracket of the search."""
        divisor = base.as_fraction(self.divisor)
        # Without a cap, just enough trials begin for one of them to reach the top.
        enough = base.floor_power(divisor, self.num_rungs - 1, self.max_trials)
        return (
            base.BracketPlan(
                units=base.rung_units(self.num_rungs, self.max_time, divisor),
                trials=self.max_trials,
                concurrent=self.max_concurrent_trials or enough,
                divisor=divisor,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveAshaConfig(_HalvingConfig):
    """Configuration of adaptive ASHA: several brackets, some stopping weak trials earlier."""

    mode: Mode = Mode.STANDARD
    max_rungs: int = 5
    bracket_rungs: tuple[int, ...] = ()
    """The number of rungs of each bracket; if given, `mode` and `max_rungs` have no say."""

    kind: ClassVar[str] = "adaptive_asha"

    def __post_init__(self) -> None:
        _HalvingConfig.__post_init__(self)
        base.check_integer("max_rungs", self.max_rungs, least=1)
        try:
            object.__setattr__(self, "mode", Mode(self.mode))
        except ValueError:
            raise ValueError(
                "`mode` must be one of `standard`, `conservative` and `aggressive`, "
                f"but got {self.mode!r}.\nHint: leave it out for `standard`."
            ) from None
        object.__setattr__(self, "bracket_rungs", tuple(self.bracket_rungs))
        for index, rungs in enumerate(self.bracket_rungs):
            base.check_integer(f"bracket_rungs[{index}]", rungs, least=1)

    def bracket_plans(self) -> tuple[base.BracketPlan, ...]:
        """Return the brackets of the search, the deepest first."""
        divisor = base.as_fraction(self.divisor)
        rungs = bracket_rungs(self)
        trials = bracket_trials(self.max_trials, divisor, rungs)
        concurrency = bracket_concurrency(self.max_concurrent_trials, divisor, trials)
        # Brackets that got no trials drop out here.
        return tuple(
            base.BracketPlan(
                units=base.rung_units(depth, self.max_time, divisor),
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
    divisor = base.as_fraction(config.divisor)
    most = config.max_rungs - 1
    deepest = 1 + min(
        base.floor_log(config.max_time, divisor, most),
        base.floor_log(config.max_trials, divisor, most),
    )
    shallowest = {
        Mode.CONSERVATIVE: 1,
        Mode.STANDARD: (deepest - 1) // 2 + 1,
        Mode.AGGRESSIVE: deepest,
    }[config.mode]
    return tuple(range(deepest, shallowest - 1, -1))


def bracket_trials(max_trials: int, divisor: Fraction, rungs: tuple[int, ...]) -> tuple[int, ...]:
    """Divide the trials among brackets, at least 1 for each and never more in sum.

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
    """Divide the concurrent trials among brackets, at least 1 for each; 0 picks a default."""
    num_brackets = len(trials)
    if max_concurrent_trials == 0:
        return (max(trials[-1], int(divisor)),) * num_brackets
    each, rest = divmod(max(max_concurrent_trials, num_brackets), num_brackets)
    return tuple(each + (index < rest) for index in range(num_brackets))


class AdaptiveAshaMethod(base.SearchMethod):
    """Run several brackets, each with its own trials."""

    def __init__(self, brackets: tuple[HalvingMethod, ...]) -> None:
        self._brackets = brackets
        self._owners: dict[str, HalvingMethod] = {}

    @classmethod
    def of(cls, config: _HalvingConfig, maker: base.TrialMaker) -> AdaptiveAshaMethod:
        """Make the configured method; async halving is the form with a single bracket."""

        return cls(tuple(bracket_method(config, maker, plan) for plan in config.bracket_plans()))

    def start(self) -> list[messages.Operation]:
        """Return the operations to create the first trials, bracket by bracket."""
        operations: list[messages.Operation] = []
        for bracket in self._brackets:
            operations += self._own(bracket, bracket.start())
        return operations

    def resize(self, max_trials: int) -> list[messages.Operation]:
        """Divide future trials among the brackets as in the plan."""
        created = [bracket.num_created for bracket in self._brackets]
        planned = [bracket.num_planned for bracket in self._brackets]
        left = max(max_trials - sum(created), 0)
        shares = [number * left // sum(planned) for number in planned]
        shares[0] += left - sum(shares)
        operations: list[messages.Operation] = []
        for bracket, number, share in zip(self._brackets, created, shares, strict=True):
            operations += self._own(bracket, bracket.resize(number + share))
        return operations

    def reported(self, request_id: str, time: float, metric: float) -> list[messages.Operation]:
        """Pass the report to the bracket owning the trial."""
        bracket = self._owners[request_id]
        return self._own(bracket, bracket.reported(request_id, time, metric))

    def reported_several(
        self, request_id: str, time: float, losses: Any
    ) -> list[messages.Operation]:
        """Pass the report to the bracket owning the trial."""
        bracket = self._owners[request_id]
        return self._own(bracket, bracket.reported_several(request_id, time, losses))

    def exited(
        self, request_id: str, reason: messages.ExitReason, is_stopped: bool
    ) -> list[messages.Operation]:
        """Pass the exit to the bracket owning the trial."""
        bracket = self._owners[request_id]
        return self._own(bracket, bracket.exited(request_id, reason, is_stopped))

    def num_trials(self, num_invalid: int) -> int:
        """Return the number of trials of all brackets."""
        return sum(bracket.num_trials(0) for bracket in self._brackets)

    def trained_share(self, time: float) -> float:
        """Return `time` as part of the longest time, the top rung of every bracket."""
        return self._brackets[0].trained_share(time)

    def brackets(self) -> tuple[base.BracketView, ...]:
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
        base.check_same_setup("brackets", len(self._brackets), len(snapshot["brackets"]))
        self._owners = {}
        for bracket, stored in zip(self._brackets, snapshot["brackets"], strict=True):
            bracket.load(stored)
            self._owners |= dict.fromkeys(bracket.entrants(), bracket)

    def _own(
        self, bracket: HalvingMethod, operations: list[messages.Operation]
    ) -> list[messages.Operation]:
        for operation in operations:
            if isinstance(operation, messages.Create):
                self._owners[operation.request_id] = bracket
        return operations


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperbandConfig(AdaptiveAshaConfig):
    """Configuration of Hyperband: brackets of every depth, whose rungs decide once complete.

    After Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization" (JMLR
    2018). The trials are divided among its brackets as there; their number is given.
    """

    mode: Mode = Mode.CONSERVATIVE
    promotes: bool = True
    waits_for_all: ClassVar[bool] = True

    kind: ClassVar[str] = "hyperband"


class PromotionMethod(HalvingMethod):
    """Runs a bracket whose trials pause at each rung, until they are among its best.

    Args:
        maker: Makes trials.
        plan: The bracket.
        smaller_is_better: Whether smaller values are better.
        waits_for_all: Whether a rung promotes trials only once all that can come have come.
        num_objectives: How many losses a report has.
    """

    def __init__(
        self,
        maker: base.TrialMaker,
        plan: base.BracketPlan,
        *,
        smaller_is_better: bool,
        waits_for_all: bool,
        num_objectives: int = 1,
    ) -> None:
        super().__init__(
            maker, plan, smaller_is_better=smaller_is_better, num_objectives=num_objectives
        )
        self._waits_for_all = waits_for_all

    def resize(self, max_trials: int) -> list[messages.Operation]:
        """Create more or fewer trials, compared to all earlier ones."""
        self._num_trials = max_trials
        return self._go_on()

    def reported_several(
        self, request_id: str, time: float, losses: Any
    ) -> list[messages.Operation]:
        """Let a trial at its rung pause there, and decide who trains next."""
        entrant = self._entrants[request_id]
        rung = self._rungs[entrant.rung]
        # A trial that pauses may report until it has left.
        if entrant.fate is not Fate.TRAINING or time < rung.units:
            return []
        rank = rung.insert(request_id, losses)
        rung.note_arrival(request_id, rank, base.keep_count(len(rung), self._divisor))
        if entrant.rung == len(self._rungs) - 1:
            entrant.fate = Fate.STOPPED
            return [messages.Stop(request_id=request_id), *self._go_on()]
        entrant.fate = Fate.PAUSED
        return self._go_on()

    def exited(
        self, request_id: str, reason: messages.ExitReason, is_stopped: bool
    ) -> list[messages.Operation]:
        """Let another trial train in its place; a failed one ranks last where it was going."""
        entrant = self._entrants[request_id]
        if is_stopped:
            return []
        was_training = entrant.fate is Fate.TRAINING
        if reason is messages.ExitReason.COMPLETED:
            entrant.fate = Fate.ENDED
        elif reason is messages.ExitReason.INVALID_HP:
            num_entries = entrant.rung + (entrant.fate is Fate.PAUSED)
            entrant.fate = Fate.INVALID
            self._num_invalid += 1
            for rung in self._rungs[:num_entries]:
                rung.remove(request_id)
        else:
            if was_training:
                self._rungs[entrant.rung].insert_last(request_id)
            entrant.fate = Fate.FAILED
        return self._go_on()

    def _go_on(self) -> list[messages.Operation]:
        """Promote trials and create others while there is room; stop those without a chance."""
        operations: list[messages.Operation] = []
        room = self._plan.concurrent - self._count(Fate.TRAINING)
        while room > 0:
            given = self._promotion() or self._refill()
            if not given:
                break
            operations += given
            room -= 1
        for index in range(len(self._rungs) - 1):
            if not self._is_closed(index):
                break
            kept = set(self._promotable(index))
            for request_id, _ in self._rungs[index]:
                entrant = self._entrants[request_id]
                is_here = entrant.rung == index and entrant.fate is Fate.PAUSED
                if is_here and request_id not in kept:
                    entrant.fate = Fate.STOPPED
                    operations.append(messages.Stop(request_id=request_id))
        return operations

    def _promotion(self) -> list[messages.Operation]:
        for index in reversed(range(len(self._rungs) - 1)):
            found = self._promotable(index)
            if found:
                entrant = self._entrants[found[0]]
                entrant.rung += 1
                entrant.fate = Fate.TRAINING
                return [messages.Train(request_id=found[0], length=self._rungs[index + 1].units)]
        return []

    def _promotable(self, index: int) -> list[str]:
        """Return the trials to leave a rung now, the best first."""
        rung = self._rungs[index]
        num_kept = len(rung) * self._divisor.denominator // self._divisor.numerator
        if self._is_closed(index):
            num_kept = base.keep_count(len(rung), self._divisor)
        elif self._waits_for_all:
            return []
        best = [key for key, value in list(rung)[:num_kept] if math.isfinite(value)]
        return [
            key
            for key in best
            if self._entrants[key].rung == index and self._entrants[key].fate is Fate.PAUSED
        ]

    def _is_closed(self, index: int) -> bool:
        """Return whether no further trial can come to a rung."""
        if self.num_created < self._num_trials:
            return False
        below = (each for each in self._entrants.values() if each.rung <= index)
        if any(each.fate is Fate.TRAINING for each in below):
            return False
        return all(not self._promotable(lower) for lower in range(index))

    def _count(self, fate: Fate) -> int:
        return sum(each.fate is fate for each in self._entrants.values())


def bracket_method(config: Any, maker: base.TrialMaker, plan: base.BracketPlan) -> HalvingMethod:
    """Return the method of a bracket in the configured form."""
    common = {
        "smaller_is_better": config.smaller_is_better,
        "num_objectives": len(config.metrics),
    }
    if not config.promotes:
        return HalvingMethod(maker, plan, **common)
    return PromotionMethod(maker, plan, waits_for_all=config.waits_for_all, **common)
