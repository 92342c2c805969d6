"""Simulation of a search on slots: how long it takes, what it uses, how good it gets by when."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.search._hyperparameter_space import Rng, Space, SpaceError
from paceline.search._samplers import Ask, answers
from paceline.search._search import Search
from paceline.search._search_method import (
    Create,
    Exited,
    ExitReason,
    Input,
    Reported,
    SearchConfig,
    Started,
    Stop,
    Train,
)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the searched metric of a trial.

    Attributes:
        hparams: The trial's hyperparameters.
        points: Times in the unit of the search, rising, and the values there.
        seconds_per_unit: How long a unit takes.
    """

    hparams: dict[str, Any]
    points: list[tuple[float, float]]
    seconds_per_unit: float = 1.0

    def at(self, time: float) -> float:
        """Return the value of the newest point up to a time; the first one before it."""
        index = bisect_right(self.points, time, key=lambda point: point[0])
        return self.points[max(index, 1) - 1][1]


Curves = Callable[[Create], Curve]


def nearest_curves(space: Space, curves: Sequence[Curve]) -> Curves:
    """Return what gives trials the curve of the nearest hyperparameters.

    Raises:
        ValueError: There is no curve with points of the space.
    """
    known = []
    for curve in curves:
        with suppress(SpaceError):
            if curve.points:
                known.append((space.encode(space.check(curve.hparams)), curve))
    if not known:
        raise ValueError(
            "`curves` must have a trial with hyperparameters of the config's space, but got"
            f" {len(curves)} without. Hint: take curves of a search of the same hyperparameters."
        )

    def of(create: Create) -> Curve:
        place = space.encode(create.hparams)
        return min(known, key=lambda one: math.dist(place, one[0]))[1]

    return of


def imaginary_curves(length: float, *, smaller_is_better: bool) -> Curves:
    """Return what gives each trial a curve that falls to a level of its own, drawn by its seed."""

    def of(create: Create) -> Curve:
        rng, sign = Rng(create.trial_seed), 1.0 if smaller_is_better else -1.0
        level, speed = rng.real(), 2.0 + 6.0 * rng.real()
        times = [length * part / 20 for part in range(1, 21)]
        points = [
            (time, sign * (level + (1.0 - level) * math.exp(-speed * time / length)))
            for time in times
        ]
        return Curve(hparams=create.hparams, points=points)

    return of


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsResult:
    """What a simulated search used, in seconds of its curves, and the best values by time."""

    wall_s: float
    slot_s: float
    trained: dict[int, int]
    """How many trials trained for how long, in the unit of the search."""
    best: tuple[tuple[float, float], ...]
    """Each time a value was better than all before: the second, and the value."""

    def best_at(self, time_s: float) -> float | None:
        """Return the best value up to a time."""
        index = bisect_right(self.best, time_s, key=lambda one: one[0])
        return self.best[index - 1][1] if index else None


@dataclass(slots=True)
class _Trial:
    create: Create
    curve: Curve
    target: int = 0
    trained: int = 0
    is_stopped: bool = False


def simulate_slots(
    config: SearchConfig,
    hyperparameters: dict[str, Any],
    seed: int,
    curves: Curves,
    *,
    slots: int,
    unit: float = 1.0,
    ask: Ask | None = None,
    is_asking: bool = False,
) -> SlotsResult:
    """Run a search on imaginary trials, of which as many train at once as there are slots.

    Trials are placed in the order of their creation and keep their slot until they end. A trial
    reports at each of its targets.

    Args:
        config: The search method.
        hyperparameters: The space.
        seed: The seed of the search.
        curves: Gives each trial its curve.
        slots: How many trials train at once, at least 1.
        unit: How many units of the curves a unit of the search is.
        ask: Asks a sampler; None for draws at random.
        is_asking: Whether the search asks for hyperparameters.

    Raises:
        ValueError: If the hyperparameters or the seed are not valid.
        SearchMethodError: If the search method fails.
    """
    search = Search(config, hyperparameters, seed, is_asking=is_asking)
    trials: dict[str, _Trial] = {}
    waiting, best = deque[_Trial](), list[tuple[float, float]]()
    sign = 1.0 if config.smaller_is_better else -1.0

    def give(given: Input) -> None:
        inputs = [given]
        while inputs:
            for operation in search.apply(inputs.pop()):
                if isinstance(operation, Create):
                    trial = trials[operation.request_id] = _Trial(operation, curves(operation))
                    waiting.append(trial)
                elif isinstance(operation, Train):
                    trials[operation.request_id].target = operation.length
                elif isinstance(operation, Stop):
                    trials[operation.request_id].is_stopped = True
            if search.asks:
                inputs.append(answers(search, ask, "sampler")[0])

    give(Started())
    now = slot_s = 0.0
    order, training = 0, list[tuple[float, int, _Trial]]()
    while waiting or training:
        if waiting and len(training) < slots:
            trial = waiting.popleft()
        else:
            now, _, trial = heapq.heappop(training)
            trial.trained, request_id = trial.target, trial.create.request_id
            value = trial.curve.at(trial.trained * unit)
            if math.isfinite(value) and (not best or sign * (value - best[-1][1]) < 0):
                best.append((now, value))
            give(Reported(request_id=request_id, time=trial.trained, metric=value))
            if trial.is_stopped or trial.target <= trial.trained:
                give(Exited(request_id=request_id, reason=ExitReason.COMPLETED))
                continue
        seconds = (trial.target - trial.trained) * unit * trial.curve.seconds_per_unit
        slot_s, order = slot_s + seconds, order + 1
        heapq.heappush(training, (now + seconds, order, trial))
    trained = Counter(trial.trained for trial in trials.values())
    return SlotsResult(
        wall_s=now, slot_s=slot_s, trained=dict(sorted(trained.items())), best=tuple(best)
    )
