"""Tree-structured Parzen estimator: the sampler that learns and needs no other library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.search._hyperparameter_space import Space
from paceline.search._rungs import FrontRung
from paceline.search._samplers import Observation, Proposal, Sampler

if TYPE_CHECKING:
    from numpy.random import Generator

    from paceline.search._hyperparameter_kinds import Parameter

Points = NDArray[np.float64]
"""Hyperparameters as numbers from 0 to 1, of shape [point, hyperparameter]."""
Kind = NDArray[np.bool_]
"""Which of the hyperparameters are of one kind."""

_FIRST_AT_RANDOM, _SHARE_AT_RANDOM = 10, 0.2
_BEST_SHARE, _MOST_BEST = 0.15, 25
_NUM_CANDIDATES = 24
# The density of the others has the newest of them, so a proposal takes as long in a long search.
_MOST_OTHERS = 1000
# It works in the master, whose memory and time are not for anyone's space of any size; and products
# over more hyperparameters leave the range of floats.
_MOST_PARAMETERS = 100
# An integer with more values than these is like a real number.
_MOST_CELLS = 1000
# A logistic kernel of this steepness has the standard deviation 1. NumPy has no error function.
_STEEPNESS = math.pi / math.sqrt(12)
_WIDTH = 0.2


class TpeSampler(Sampler):
    """Proposes what is likely among the best trials and unlikely among the others.

    The estimator is that of Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011),
    with one density over all hyperparameters and a share of draws at random, as in Falkner et al.,
    "BOHB" (2018). The first ten trials are drawn at random. A trial counts by its best loss, for
    however long it has trained; with several objectives, by how many others dominate it. Running
    trials count among the others, so that no two trials try one place, and so do those that ran out
    of memory or refused their hyperparameters. Failed ones count for nothing. Where no
    hyperparameter is a real number, only draws at random repeat what was tried. More than 100
    hyperparameters are drawn at random.
    """

    def __init__(self) -> None:
        self._encoded: dict[str, list[float]] = {}

    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Generator
    ) -> Sequence[Proposal]:
        """Return proposals by the densities of the best and the other trials."""
        known = [seen for seen in observations if seen.state != "failed"]
        ranked = _ranked(known)
        best = ranked[: min(math.ceil(_BEST_SHARE * len(ranked)), _MOST_BEST)]
        ids_of_best = {seen.id for seen in best}
        cube = _Cube(space.parameters)
        good = self._points(space, best)
        rest = [seen for seen in known if seen.id not in ids_of_best]
        # Where all points are counted, each one matters: see `_untried`.
        others = self._points(space, rest[-_MOST_OTHERS:] if cube.is_real.any() else rest)
        found = []
        is_random = len(ranked) < _FIRST_AT_RANDOM or cube.size > _MOST_PARAMETERS
        for _ in range(n):
            if is_random or rng.random() < _SHARE_AT_RANDOM:
                point, why = cube.snapped(rng.random((1, cube.size)))[0], "at random"
            else:
                point = _untried(cube, good, others, rng)
                why = f"like the best {len(best)} of {len(ranked)} trials, unlike the others"
            others = np.vstack([others, point])
            found.append(Proposal(hparams=space.decode(point.tolist()), by="tpe", why=why))
        return found

    def _points(self, space: Space, trials: Sequence[Observation]) -> Points:
        for seen in trials:
            if seen.id not in self._encoded:
                self._encoded[seen.id] = space.encode(seen.hparams)
        rows = [self._encoded[seen.id] for seen in trials]
        return np.array(rows, dtype=float).reshape(len(rows), len(space.parameters))


def _ranked(trials: Sequence[Observation]) -> list[Observation]:
    """Return the trials that have ended with a loss, the best first."""
    ended = [
        seen for seen in trials if seen.state in ("completed", "stopped") and seen.loss is not None
    ]
    if not (ended and ended[0].losses):
        return sorted(ended, key=lambda seen: seen.loss or 0.0)
    # Each insertion compares with all others.
    ended = ended[-_MOST_OTHERS:]
    rung = FrontRung(0, len(ended[0].losses))
    for seen in ended:
        rung.insert(seen.id, seen.losses)
    by_id = {seen.id: seen for seen in ended}
    return [by_id[id_] for id_, _ in rung]


def _untried(cube: _Cube, good: Points, others: Points, rng: Generator) -> Any:
    """Return the candidate with the largest ratio of densities among those not tried before."""
    density = _Density(cube, good)
    candidates = density.draw(_NUM_CANDIDATES, rng)
    if not cube.is_real.any():
        tried = {row.tobytes() for row in np.vstack([good, others])}
        candidates = candidates[[row.tobytes() not in tried for row in candidates]]
        if not len(candidates):
            return cube.snapped(rng.random((1, cube.size)))[0]
    gain = density.log(candidates) - _Density(cube, others[-_MOST_OTHERS:]).log(candidates)
    return candidates[int(gain.argmax())]


class _Cube:
    """Unit cube of the hyperparameters, of which some have cells in the place of real numbers."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.size = len(parameters)
        counts = np.array([_num_cells(each) for each in parameters], dtype=float)
        self.counts = np.maximum(counts, 1.0)
        self.is_real = counts == 0
        self.is_choice = np.array([bool(each.choices) for each in parameters], dtype=bool)
        self.is_integer = ~self.is_real & ~self.is_choice

    def snapped(self, points: Points) -> Points:
        """Return the points with the middle of the cell for each number that has one."""
        cell = np.minimum(np.floor(points * self.counts), self.counts - 1)
        return np.where(self.is_real, points, (cell + 0.5) / self.counts)


def _num_cells(each: Parameter) -> int:
    if each.choices:
        return len(each.choices)
    if each.kind != "int" or each.low is None or each.high is None:
        return 0
    count = int(each.high - each.low) + 1
    return count if count <= _MOST_CELLS else 0


class _Density:
    """Mixture of a kernel around each point and one that covers the cube, all of the same weight.

    A choice has the same probability for all other choices. The width of the others follows
    Scott's rule.
    """

    def __init__(self, cube: _Cube, points: Points) -> None:
        self._cube, count = cube, len(points)
        self._centers = np.vstack([points, np.full((1, cube.size), 0.5)])
        width = _WIDTH * max(count, 1) ** (-1 / (cube.size + 4))
        self._widths = np.append(np.full(count, width), 1.0)[:, None]
        # The last kernel knows no choice.
        self._stays = np.append(np.ones(count), 0.0)[:, None] * count / (count + cube.counts)

    def draw(self, count: int, rng: Generator) -> Points:
        """Return points drawn from the density, of shape [count, hyperparameter]."""
        kernel, shape = rng.integers(len(self._centers), size=count), (count, self._cube.size)
        centers, widths = self._centers[kernel], self._widths[kernel]
        low, high = _below(0.0, centers, widths), _below(1.0, centers, widths)
        share = np.clip(low + rng.random(shape) * (high - low), 1e-12, 1 - 1e-12)
        near = centers + widths / _STEEPNESS * np.arctanh(2 * share - 1)
        stays = rng.random(shape) < self._stays[kernel]
        chosen = np.where(stays, centers, rng.random(shape))
        points = np.where(self._cube.is_choice, chosen, near)
        return self._cube.snapped(np.clip(points, 0.0, 1.0))

    def log(self, points: Points) -> Points:
        """Return the logarithm of the density at some points, but for a constant."""
        # The kernel that covers the cube is nowhere near 0, so no sum needs logarithms.
        product = np.ones((len(points), len(self._centers)))
        for kind, kernel in (
            (self._cube.is_real, self._real),
            (self._cube.is_integer, self._integer),
            (self._cube.is_choice, self._choice),
        ):
            if kind.any():
                product *= kernel(points[:, None, kind], kind).prod(-1)
        found: Points = np.log(product.sum(1) / len(self._centers))
        return found

    def _mass(self, kind: Kind) -> Points:
        centers = self._centers[:, kind]
        return _below(1.0, centers, self._widths) - _below(0.0, centers, self._widths)

    def _real(self, at: Points, kind: Kind) -> Points:
        slope = 1 - np.tanh(_STEEPNESS * (at - self._centers[:, kind]) / self._widths) ** 2
        found: Points = slope * (_STEEPNESS / 2 / self._widths / self._mass(kind))
        return found

    def _integer(self, at: Points, kind: Kind) -> Points:
        centers, counts = self._centers[:, kind], self._cube.counts[kind]
        high = _below(at + 0.5 / counts, centers, self._widths)
        low = _below(at - 0.5 / counts, centers, self._widths)
        found: Points = (high - low) * counts / self._mass(kind)
        return found

    def _choice(self, at: Points, kind: Kind) -> Points:
        stays, counts = self._stays[:, kind], self._cube.counts[kind]
        found: Points = np.where(at == self._centers[:, kind], stays * counts, 0.0) + 1 - stays
        return found


def _below(at: Any, centers: Points, widths: Points) -> Points:
    """Return how much of each kernel is below a point."""
    found: Points = 0.5 + 0.5 * np.tanh(_STEEPNESS * (at - centers) / widths)
    return found
