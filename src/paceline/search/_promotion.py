"""Halving in promotion form: trials pause at rungs and resume when promoted; Hyperband."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.search import _search_method as base
from paceline.search._adaptive_asha import AdaptiveAshaConfig, HalvingMethod, Mode, _Fate


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
    """

    def __init__(
        self,
        maker: base.TrialMaker,
        plan: base.BracketPlan,
        *,
        smaller_is_better: bool,
        waits_for_all: bool,
    ) -> None:
        super().__init__(maker, plan, smaller_is_better=smaller_is_better)
        self._waits_for_all = waits_for_all

    def resize(self, max_trials: int) -> list[base.Operation]:
        """Create more or fewer trials, which are compared to all before them."""
        self._num_trials = max_trials
        return self._go_on()

    def reported(self, request_id: str, time: float, metric: float) -> list[base.Operation]:
        """Let a trial that has reached its rung pause there, and decide who trains next."""
        entrant = self._entrants[request_id]
        rung = self._rungs[entrant.rung]
        # A trial that pauses may report until it has left.
        if entrant.fate is not _Fate.TRAINING or time < rung.units:
            return []
        rank = rung.insert(request_id, metric if self._smaller_is_better else -metric)
        rung.note_arrival(request_id, rank, base.keep_count(len(rung), self._divisor))
        if entrant.rung == len(self._rungs) - 1:
            entrant.fate = _Fate.STOPPED
            return [base.Stop(request_id=request_id), *self._go_on()]
        entrant.fate = _Fate.PAUSED
        return self._go_on()

    def exited(
        self, request_id: str, reason: base.ExitReason, is_stopped: bool
    ) -> list[base.Operation]:
        """Let another trial train in its place; a failed one ranks last where it was going."""
        entrant = self._entrants[request_id]
        if is_stopped:
            return []
        was_training = entrant.fate is _Fate.TRAINING
        if reason is base.ExitReason.COMPLETED:
            entrant.fate = _Fate.ENDED
        elif reason is base.ExitReason.INVALID_HP:
            num_entries = entrant.rung + (entrant.fate is _Fate.PAUSED)
            entrant.fate = _Fate.INVALID
            self._num_invalid += 1
            for rung in self._rungs[:num_entries]:
                rung.remove(request_id)
        else:
            if was_training:
                self._rungs[entrant.rung].insert(request_id, math.nan)
            entrant.fate = _Fate.FAILED
        return self._go_on()

    def _go_on(self) -> list[base.Operation]:
        """Promote trials and create others while there is room; stop those without a chance."""
        operations: list[base.Operation] = []
        room = self._plan.concurrent - self._count(_Fate.TRAINING)
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
                is_here = entrant.rung == index and entrant.fate is _Fate.PAUSED
                if is_here and request_id not in kept:
                    entrant.fate = _Fate.STOPPED
                    operations.append(base.Stop(request_id=request_id))
        return operations

    def _promotion(self) -> list[base.Operation]:
        for index in reversed(range(len(self._rungs) - 1)):
            found = self._promotable(index)
            if found:
                entrant = self._entrants[found[0]]
                entrant.rung += 1
                entrant.fate = _Fate.TRAINING
                return [base.Train(request_id=found[0], length=self._rungs[index + 1].units)]
        return []

    def _promotable(self, index: int) -> list[str]:
        """Return the trials that may leave a rung now, the best first."""
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
            if self._entrants[key].rung == index and self._entrants[key].fate is _Fate.PAUSED
        ]

    def _is_closed(self, index: int) -> bool:
        """Return whether no further trial can come to a rung."""
        if self.num_created < self._num_trials:
            return False
        below = (each for each in self._entrants.values() if each.rung <= index)
        if any(each.fate is _Fate.TRAINING for each in below):
            return False
        return all(not self._promotable(lower) for lower in range(index))

    def _count(self, fate: _Fate) -> int:
        return sum(each.fate is fate for each in self._entrants.values())


def bracket_method(config: Any, maker: base.TrialMaker, plan: base.BracketPlan) -> HalvingMethod:
    """Return the method of a bracket in the configured form."""
    if not config.promotes:
        return HalvingMethod(maker, plan, smaller_is_better=config.smaller_is_better)
    return PromotionMethod(
        maker,
        plan,
        smaller_is_better=config.smaller_is_better,
        waits_for_all=config.waits_for_all,
    )
