"""Rungs: trials in ranked order; the Pareto front; a bracket of asynchronous halving."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from paceline.search import _search_messages as messages
from paceline.search import _search_method as base

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Losses = tuple[float, ...]
"""A value for each objective, negated where larger ones are better."""


class Rung:
    """Hold a rung's entries in ranked order, where smaller values are better.

    Numbers are kept in two parallel lists, so that a search among 100,000 entries compares plain
    floats. Entries without a finite number (NaN, infinity, or a trial that failed) rank behind all
    of them.
    """

    __slots__ = ("_arrivals", "_ids", "_unranked", "_values", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self._values: list[float] = []
        self._ids: list[str] = []
        self._unranked: list[str] = []
        # By request id: order, rank, number kept, and the cut-off as a value.
        self._arrivals: dict[str, tuple[int, int, int, float]] = {}

    def __len__(self) -> int:
        return len(self._ids) + len(self._unranked)

    @property
    def num_ranked(self) -> int:
        """Return the number of entries ranked by their numbers, before all others."""
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Iterate over request ids and values, the best first; the last ones may be NaN."""
        yield from zip(self._ids, self._values, strict=True)
        for request_id in self._unranked:
            yield request_id, math.nan

    def insert(self, request_id: str, value: Any) -> int:
        """Insert an entry behind equal and better entries; return its rank from 0.

        `value` is a loss, or one for each of several objectives.
        """
        if not math.isfinite(value):
            return self.insert_last(request_id)
        rank = bisect_right(self._values, value)
        self._values.insert(rank, value)
        self._ids.insert(rank, request_id)
        return rank

    def insert_last(self, request_id: str) -> int:
        """Insert an entry without a finite number; return its rank from 0."""
        self._unranked.append(request_id)
        return len(self) - 1

    def note_arrival(self, request_id: str, rank: int, num_kept: int) -> None:
        """Keep what a newcomer was compared to: its rank from 0, and how many could continue."""
        # A cut-off is one number: several objectives have none.
        cutoff = self._values[num_kept - 1] if num_kept <= len(self._values) else math.nan
        self._arrivals[request_id] = (len(self), rank + 1, num_kept, cutoff)

    def arrival(self, request_id: str) -> tuple[int, int, int, float] | None:
        """Return a trial's order, rank, number kept and cut-off when it arrived, if known."""
        return self._arrivals.get(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a trial's entry; the time is in proportion to the rung's size."""
        self._arrivals.pop(request_id, None)
        if request_id in self._unranked:
            self._unranked.remove(request_id)
            return
        rank = self._ids.index(request_id)
        del self._ids[rank], self._values[rank]

    def snapshot(self) -> dict[str, Any]:
        """Return the entries as JSON-able data."""
        return {
            "units": self.units,
            "values": [messages.encode_search_float(value) for value in self._values],
            "ids": list(self._ids),
            "unranked": list(self._unranked),
            "arrivals": {
                request_id: [*counts, messages.encode_search_float(cutoff)]
                for request_id, (*counts, cutoff) in self._arrivals.items()
            },
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the entries over from a snapshot."""
        self._values = [float(value) for value in snapshot["values"]]
        self._ids = list(snapshot["ids"])
        self._unranked = list(snapshot["unranked"])
        # Earlier versions did not keep them.
        self._arrivals = {
            request_id: (order, rank, num_kept, float(cutoff))
            for request_id, (order, rank, num_kept, cutoff) in snapshot.get("arrivals", {}).items()
        }


class FrontRung(Rung):
    """Rung of a search of several objectives.

    An entry ranks by how many others dominate it, as in Fonseca and Fleming's ranks ("Genetic
    Algorithms for Multiobjective Optimization", 1993). Among equals, it ranks by the crowding
    distance of NSGA-II, so that those that are alone somewhere continue; then the earlier one does.
    """

    __slots__ = ("_counts", "_points")

    def __init__(self, units: int, num_objectives: int) -> None:
        import numpy as np

        super().__init__(units)
        self._points: Array = np.empty((0, num_objectives))
        # By how many others each is dominated.
        self._counts: Array = np.empty(0, dtype=int)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Iterate over request ids and first losses, the best first; the last ones may be NaN."""
        import numpy as np

        spreads = np.zeros(len(self._ids))
        for count in np.unique(self._counts):
            group = self._counts == count
            spreads[group] = _crowding(self._points[group])
        for index in np.lexsort((np.arange(len(spreads)), -spreads, self._counts)):
            yield self._ids[index], float(self._points[index, 0])
        for request_id in self._unranked:
            yield request_id, math.nan

    def insert(self, request_id: str, value: Any) -> int:
        """Insert an entry; return its rank from 0."""
        import numpy as np

        if not all(map(math.isfinite, value)):
            return self.insert_last(request_id)
        better, worse = self._compared(value)
        self._counts[worse] += 1
        self._ids.append(request_id)
        self._points = np.vstack([self._points, [value]])
        self._counts = np.append(self._counts, better.sum())
        spreads = _crowding(self._points[self._counts == self._counts[-1]])
        num_ahead = (self._counts < self._counts[-1]).sum() + (spreads[:-1] >= spreads[-1]).sum()
        return int(num_ahead)

    def remove(self, request_id: str) -> None:
        """Remove a trial's entry; dominated entries move up."""
        import numpy as np

        if request_id in self._unranked:
            return super().remove(request_id)
        self._arrivals.pop(request_id, None)
        index = self._ids.index(request_id)
        gone = self._points[index]
        del self._ids[index]
        self._points = np.delete(self._points, index, axis=0)
        self._counts = np.delete(self._counts, index)
        self._counts[self._compared(gone)[1]] -= 1
        return None

    def _compared(self, point: Any) -> tuple[Array, Array]:
        """Return which entries dominate a point, and which it dominates."""
        is_less, is_more = (self._points < point).any(1), (self._points > point).any(1)
        return is_less & ~is_more, is_more & ~is_less

    def snapshot(self) -> dict[str, Any]:
        """Return the entries as JSON-able data."""
        several = {"points": self._points.tolist(), "counts": self._counts.tolist()}
        return super().snapshot() | several

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the entries over from a snapshot."""
        import numpy as np

        super().load(snapshot)
        self._points = np.array(snapshot["points"]).reshape(-1, self._points.shape[1])
        self._counts = np.array(snapshot["counts"], dtype=int)


def make_rung(units: int, num_objectives: int) -> Rung:
    """Return an empty rung."""
    return Rung(units) if num_objectives == 1 else FrontRung(units, num_objectives)


def _crowding(points: Array) -> Array:
    """Return the crowding distance of each point, after Deb et al., "NSGA-II" (2002)."""
    import numpy as np

    distances = np.zeros(len(points))
    for losses in points.T:
        order = np.argsort(losses, kind="stable")
        # Halves: the difference of two large numbers may be too large for one.
        ranked = losses[order] / 2
        width = ranked[-1] - ranked[0]
        # Where all are equal nobody is at an end.
        if width > 0:
            distances[order[[0, -1]]] = math.inf
            distances[order[1:-1]] += (ranked[2:] - ranked[:-2]) / width
    return distances


def newer_point(point: Losses, losses: Losses) -> Losses:
    """Return what stands for a trial after a report: its newest values that none of it dominates.

    They are of one report: nobody can have the best values of different moments at once. A report
    in which a value is not finite changes nothing; an empty point is that of no report.
    """
    is_finite = all(map(math.isfinite, losses))
    is_dominated = all(old <= new for old, new in zip(point, losses, strict=False))
    return point if not is_finite or (point and is_dominated and point != losses) else losses


def pareto_front(points: Sequence[tuple[str, Losses]]) -> list[tuple[str, Losses]]:
    """Return the points without a dominating point, the least first loss in front."""
    import numpy as np

    losses, left = np.array([point for _, point in points]), np.arange(len(points))
    place = 0
    while place < len(left):
        one, others = losses[left[place]], losses[left]
        is_left = (others < one).any(1) | (others == one).all(1)
        left = left[is_left]
        place = int(is_left[: place + 1].sum())
    return sorted((points[index] for index in left.tolist()), key=lambda point: point[1])


class Fate(str, Enum):
    """State of a trial in its bracket."""

    TRAINING = "training"
    PAUSED = "paused"
    STOPPED = "stopped"
    ENDED = "ended"
    """It completed by itself below the top rung."""
    FAILED = "failed"
    INVALID = "invalid"


@dataclass(slots=True)
class _Entrant:
    rung: int = 0
    """The rung that the trial trains towards, or at which it ended."""
    fate: Fate = Fate.TRAINING


class HalvingMethod(base.SearchMethod):
    """Runs a single bracket of asynchronous halving."""

    def __init__(
        self,
        maker: base.TrialMaker,
        plan: base.BracketPlan,
        *,
        smaller_is_better: bool,
        num_objectives: int = 1,
    ) -> None:
        self._maker = maker
        self._plan = plan
        self._num_trials = plan.trials
        self._divisor = plan.divisor
        self._smaller_is_better = smaller_is_better
        self._rungs = [make_rung(units, num_objectives) for units in plan.units]
        self._entrants: dict[str, _Entrant] = {}
        self._num_invalid = 0

    def start(self) -> list[messages.Operation]:
        """Return the operations to create the first trials."""
        return self.resize(self._num_trials)

    def resize(self, max_trials: int) -> list[messages.Operation]:
        """Create more or fewer trials, compared to all earlier ones."""
        self._num_trials = max_trials
        num_open = sum(each.fate is Fate.TRAINING for each in self._entrants.values())
        operations: list[messages.Operation] = []
        for _ in range(self._plan.concurrent - num_open):
            operations += self._refill()
        return operations

    @property
    def num_planned(self) -> int:
        """Return how many trials were planned."""
        return self._plan.trials

    def reported(self, request_id: str, time: float, metric: float) -> list[messages.Operation]:
        """Decide at each rung reached by the trial, once per rung.

        A metric that is not finite never passes a rung, not even an empty one.
        """
        loss = metric if self._smaller_is_better else -metric
        return self.reported_several(request_id, time, loss)

    def reported_several(
        self, request_id: str, time: float, losses: Any
    ) -> list[messages.Operation]:
        """Decide by several objectives, or by a single loss."""
        entrant = self._entrants[request_id]
        rung_before = entrant.rung
        # Several rungs in one call: a trial with rare reports may clear several at once.
        while time >= self._rungs[entrant.rung].units:
            rung = self._rungs[entrant.rung]
            rank = rung.insert(request_id, losses)
            is_top = entrant.rung == len(self._rungs) - 1
            num_kept = base.keep_count(len(rung), self._divisor)
            rung.note_arrival(request_id, rank, num_kept)
            is_kept = rank < min(num_kept, rung.num_ranked)
            if is_top or not is_kept:
                entrant.fate = Fate.STOPPED
                return [messages.Stop(request_id=request_id), *self._refill()]
            entrant.rung += 1
        if entrant.rung == rung_before:
            return []
        return [messages.Train(request_id=request_id, length=self._rungs[entrant.rung].units)]

    def exited(
        self, request_id: str, reason: messages.ExitReason, is_stopped: bool
    ) -> list[messages.Operation]:
        """Replace an ended trial, unless stopped by the method, as far as the budget allows.

        A failed trial ranks last in the rung that it was training towards. Invalid
        hyperparameters take no part: their entries go, and they do not count.
        """
        if is_stopped:
            return []
        entrant = self._entrants[request_id]
        if reason is messages.ExitReason.COMPLETED:
            entrant.fate = Fate.ENDED
        elif reason is messages.ExitReason.INVALID_HP:
            entrant.fate = Fate.INVALID
            self._num_invalid += 1
            for rung in self._rungs[: entrant.rung]:
                rung.remove(request_id)
        else:
            entrant.fate = Fate.FAILED
            self._rungs[entrant.rung].insert_last(request_id)
        return self._refill()

    def num_trials(self, num_invalid: int) -> int:
        """Return the bracket's number: trials with invalid hyperparameters are replaced."""
        return max(self._num_trials, self.num_created)

    @property
    def num_created(self) -> int:
        """Return the number of trials, without those with refused hyperparameters."""
        return len(self._entrants) - self._num_invalid

    def trained_share(self, time: float) -> float:
        """Return the part of the time at the top rung."""
        return time / self._plan.units[-1]

    def brackets(self) -> tuple[base.BracketView, ...]:
        """Return a view of the bracket."""
        waiting: list[list[str]] = [[] for _ in self._rungs]
        for request_id, entrant in self._entrants.items():
            if entrant.fate is Fate.TRAINING:
                waiting[entrant.rung].append(request_id)
        return (
            base.BracketView(
                max_trials=self._num_trials,
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
            "num_trials": self._num_trials,
            "entrants": [[key, e.rung, e.fate.value] for key, e in self._entrants.items()],
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from a bracket with other rungs.
        """
        theirs = [rung["units"] for rung in snapshot["rungs"]]
        base.check_same_setup("rungs", list(self._plan.units), theirs)
        for rung, stored in zip(self._rungs, snapshot["rungs"], strict=True):
            rung.load(stored)
        self._num_trials = snapshot.get("num_trials", self._plan.trials)
        self._entrants = {
            request_id: _Entrant(rung=rung, fate=Fate(fate))
            for request_id, rung, fate in snapshot["entrants"]
        }
        self._num_invalid = sum(e.fate is Fate.INVALID for e in self._entrants.values())

    def entrants(self) -> tuple[str, ...]:
        """Return the request ids of all trials of the bracket."""
        return tuple(self._entrants)

    def _refill(self) -> list[messages.Operation]:
        if self.num_created >= self._num_trials:
            return []
        create = self._maker.sampled()
        self._entrants[create.request_id] = _Entrant()
        return [
            create,
            messages.Train(request_id=create.request_id, length=self._rungs[0].units),
        ]

    def _rung_view(self, index: int, waiting: list[str]) -> base.RungView:
        ranked = []
        for request_id, value in self._rungs[index]:
            decision = self._decision(self._entrants[request_id], index)
            metric = value if self._smaller_is_better else -value
            ranked.append(
                base.RungEntry(
                    request_id=request_id,
                    metric=None if decision is base.Decision.FAILED else metric,
                    decision=decision,
                    arrival=self._arrival(self._rungs[index], request_id),
                )
            )
        ahead = [
            base.RungEntry(request_id=i, metric=None, decision=base.Decision.WAITING)
            for i in waiting
        ]
        return base.RungView(units=self._rungs[index].units, entries=(*ranked, *ahead))

    def _arrival(self, rung: Rung, request_id: str) -> base.Arrival | None:
        found = rung.arrival(request_id)
        if found is None:
            return None
        order, rank, num_kept, value = found
        sign = 1 if self._smaller_is_better else -1
        cutoff = sign * value if math.isfinite(value) else None
        return base.Arrival(order=order, rank=rank, num_kept=num_kept, cutoff=cutoff)

    def _decision(self, entrant: _Entrant, index: int) -> base.Decision:
        if entrant.rung > index:
            return base.Decision.CONTINUED
        if entrant.fate is Fate.PAUSED:
            return base.Decision.PAUSED
        if entrant.fate is Fate.FAILED:
            return base.Decision.FAILED
        return base.Decision.FINISHED if index == len(self._rungs) - 1 else base.Decision.STOPPED
