"""Curves of groups of trials: means and spreads along an x axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline._cluster.master.store.metric_series import Curve, cut_curve

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, sample standard deviation, least and greatest value of `counts` curves at each `x`."""

    x: "Floats"
    means: "Floats"
    deviations: "Floats"
    lows: "Floats"
    highs: "Floats"
    counts: "NDArray[np.int64]"
    num_curves: int


def spread_of(
    curves: Sequence[tuple[Curve, "Floats"]],
    max_points: int,
    low: float | None = None,
    high: float | None = None,
) -> Spread:
    """Return the spread of curves in a range, at about `max_points` places at most.

    Between its first and its last value each curve counts at every place, with the line between
    its neighbors where it has no value.

    Args:
        curves: Each a curve with the smoothed values of its points, for means and deviations.
        max_points: With more places than these, the span is cut into equal parts: there a curve
            counts with its mean, and with its least and greatest value.
        low: The least x, None for all.
        high: The greatest x, None for all.
    """
    import numpy as np

    finite = [_finite_part(curve, smoothed, low, high) for curve, smoothed in curves]
    used = [one for one in finite if len(one.x)]
    if not used:
        none = np.empty(0)
        return Spread(none, none, none, none, none, np.empty(0, np.int64), 0)
    grid = np.unique(np.concatenate([one.x for one in used]))
    edges = grid
    if len(grid) > max_points:
        edges = np.linspace(grid[0], grid[-1], max_points + 1)[:-1]
        parts = np.searchsorted(edges, grid, "right") - 1
        sizes = np.bincount(parts, minlength=max_points)
        is_used = sizes > 0
        grid = (np.bincount(parts, weights=grid, minlength=max_points)[is_used]) / sizes[is_used]
        edges = edges[is_used]
    rows = [_along_grid(one, grid, edges) for one in used]
    means, lows, highs = (np.stack(column) for column in zip(*rows, strict=True))
    is_there = ~np.isnan(means)
    counts = is_there.sum(axis=0)
    mean = np.where(is_there, means, 0).sum(axis=0) / counts
    squares = np.where(is_there, means - mean, 0) ** 2
    deviations = np.sqrt(squares.sum(axis=0) / np.maximum(counts - 1, 1))
    return Spread(
        grid, mean, deviations, np.nanmin(lows, axis=0), np.nanmax(highs, axis=0), counts, len(used)
    )


@dataclass(frozen=True, slots=True)
class _Part:
    x: "Floats"
    y: "Floats"
    smoothed: "Floats"


def _finite_part(curve: Curve, smoothed: "Floats", low: float | None, high: float | None) -> _Part:
    import numpy as np

    is_used = np.isfinite(curve.y) & np.isfinite(smoothed)
    known = Curve(curve.x[is_used], curve.y[is_used], np.flatnonzero(is_used))
    cut = cut_curve(known, low, high)
    return _Part(cut.x, cut.y, smoothed[cut.steps])


def _along_grid(part: _Part, grid: "Floats", edges: "Floats") -> "tuple[Floats, Floats, Floats]":
    """Return means, least and greatest values of a curve at each place, NaN beyond its ends."""
    import numpy as np

    places = np.searchsorted(edges, part.x, "right") - 1
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    own = places[starts]
    sizes = np.diff(starts, append=len(places))
    means = np.interp(grid, part.x, part.smoothed)
    lows = np.interp(grid, part.x, part.y)
    highs = lows.copy()
    means[own] = np.add.reduceat(part.smoothed, starts) / sizes
    lows[own] = np.minimum.reduceat(part.y, starts)
    highs[own] = np.maximum.reduceat(part.y, starts)
    for values in (means, lows, highs):
        values[: own[0]] = values[own[-1] + 1 :] = np.nan
    return means, lows, highs
