"""Asynchronous successive halving, the variant that stops trials.

After Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020), with one
change: a trial is never paused to be promoted later. At each rung it is compared with all that
reached the rung before it, and goes on or is stopped for good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.search._bracket_views import BracketPlan, BracketView, Decision, RungEntry, RungView
from paceline.search._exact_division import keep_count
from paceline.search._inputs_and_operations import ExitReason, Operation, Stop, Train
from paceline.search._method_base import SearchMethod, TrialMaker, check_same_setup
from paceline.search.methods._rung import Rung


class _Fate(str, Enum):
    TRAINING = "training"
    STOPPED = "stopped"
    ENDED = "ended"
    """It completed by itself below the top rung."""
    FAILED = "failed"
    INVALID = "invalid"


@dataclass(slots=True)
class _Entrant:
    rung: int = 0
    """The rung that the trial trains towards, or at which it ended."""
    fate: _Fate = _Fate.TRAINING


class HalvingMethod(SearchMethod):
    """Run one bracket."""

    def __init__(
        self,
        maker: TrialMaker,
        plan: BracketPlan,
        *,
        smaller_is_better: bool,
    ) -> None:
        self._maker = maker
        self._plan = plan
        self._divisor = plan.divisor
        self._smaller_is_better = smaller_is_better
        self._rungs = [Rung(units) for units in plan.units]
        self._entrants: dict[str, _Entrant] = {}
        self._num_invalid = 0

    def start(self) -> list[Operation]:
        """Return the operations that create the first trials."""
        operations: list[Operation] = []
        for _ in range(min(self._plan.concurrent, self._plan.trials)):
            operations += self._refill()
        return operations

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Decide at each rung that the trial has reached, once for each.

        A metric that is not finite never passes a rung, not even an empty one.
        """
        entrant = self._entrants[request_id]
        rung_before = entrant.rung
        value = metric if self._smaller_is_better else -metric
        # One report of a trial that reports rarely may clear several rungs.
        while time >= self._rungs[entrant.rung].units:
            rung = self._rungs[entrant.rung]
            rank = rung.insert(request_id, value)
            is_top = entrant.rung == len(self._rungs) - 1
            is_kept = math.isfinite(value) and rank < keep_count(len(rung), self._divisor)
            if is_top or not is_kept:
                entrant.fate = _Fate.STOPPED
                return [Stop(request_id=request_id), *self._refill()]
            entrant.rung += 1
        if entrant.rung == rung_before:
            return []
        return [Train(request_id=request_id, length=self._rungs[entrant.rung].units)]

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Replace a trial that was not stopped, as far as the budget allows.

        A failed trial ranks last in the rung that it was training towards. Invalid
        hyperparameters take no part: their entries go, and they do not count.
        """
        if is_stopped:
            return []
        entrant = self._entrants[request_id]
        if reason is ExitReason.COMPLETED:
            entrant.fate = _Fate.ENDED
        elif reason is ExitReason.INVALID_HP:
            entrant.fate = _Fate.INVALID
            self._num_invalid += 1
            for rung in self._rungs[: entrant.rung]:
                rung.remove(request_id)
        else:
            entrant.fate = _Fate.FAILED
            self._rungs[entrant.rung].insert(request_id, math.nan)
        return self._refill()

    def num_trials(self, num_invalid: int) -> int:
        """Return the bracket's number: trials with invalid hyperparameters are replaced."""
        return self._plan.trials

    def trained_share(self, time: float) -> float:
        """Return the part of the time at the top rung."""
        return time / self._plan.units[-1]

    def brackets(self) -> tuple[BracketView, ...]:
        """Return a view of the bracket."""
        waiting: list[list[str]] = [[] for _ in self._rungs]
        for request_id, entrant in self._entrants.items():
            if entrant.fate is _Fate.TRAINING:
                waiting[entrant.rung].append(request_id)
        return (
            BracketView(
                max_trials=self._plan.trials,
                max_concurrent_trials=self._plan.concurrent,
                num_created=len(self._entrants),
                num_invalid=self._num_invalid,
                rungs=tuple(self._rung_view(i, ids) for i, ids in enumerate(waiting)),
            ),
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {
            "rungs": [rung.snapshot() for rung in self._rungs],
            "entrants": [[key, e.rung, e.fate.value] for key, e in self._entrants.items()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from a bracket with other rungs.
        """
        theirs = [rung["units"] for rung in snapshot["rungs"]]
        check_same_setup("rungs", list(self._plan.units), theirs)
        for rung, stored in zip(self._rungs, snapshot["rungs"], strict=True):
            rung.load(stored)
        self._entrants = {
            request_id: _Entrant(rung=rung, fate=_Fate(fate))
            for request_id, rung, fate in snapshot["entrants"]
        }
        self._num_invalid = sum(e.fate is _Fate.INVALID for e in self._entrants.values())

    def entrants(self) -> tuple[str, ...]:
        """Return the request ids of all trials of the bracket."""
        return tuple(self._entrants)

    def _refill(self) -> list[Operation]:
        if len(self._entrants) - self._num_invalid >= self._plan.trials:
            return []
        create = self._maker.sampled()
        self._entrants[create.request_id] = _Entrant()
        return [create, Train(request_id=create.request_id, length=self._rungs[0].units)]

    def _rung_view(self, index: int, waiting: list[str]) -> RungView:
        ranked = []
        for request_id, value in self._rungs[index]:
            decision = self._decision(self._entrants[request_id], index)
            metric = value if self._smaller_is_better else -value
            ranked.append(
                RungEntry(
                    request_id=request_id,
                    metric=None if decision is Decision.FAILED else metric,
                    decision=decision,
                )
            )
        ahead = [RungEntry(request_id=i, metric=None, decision=Decision.WAITING) for i in waiting]
        return RungView(units=self._rungs[index].units, entries=(*ranked, *ahead))

    def _decision(self, entrant: _Entrant, index: int) -> Decision:
        if entrant.rung > index:
            return Decision.CONTINUED
        if entrant.fate is _Fate.FAILED:
            return Decision.FAILED
        return Decision.FINISHED if index == len(self._rungs) - 1 else Decision.STOPPED
