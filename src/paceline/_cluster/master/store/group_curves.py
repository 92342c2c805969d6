"""Curves of a group of trials: the spread of a metric along steps or time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline._cluster.master.store.series_reader import Curve, cut_curve

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


@dataclass(frozen=True, slots=True)
class CurvePart:
    """Finite points of a curve in a range, long ones summed up: each stands for `sizes` points."""

    x: "Floats"
    smoothed: "Floats"
    lows: "Floats"
    highs: "Floats"
    sizes: "NDArray[np.int64]"


# A long curve is summed up at so many places for each of its group's.
_FINENESS = 8


def part_of(
    curve: Curve,
    smoothed: "Floats",
    max_points: int,
    low: float | None = None,
    high: float | None = None,
) -> CurvePart:
    """Return a curve's part for `spread_of`, which takes little memory and keeps all extremes.

    Args:
        curve: All points.
        smoothed: Their smoothed values, for means and deviations.
        max_points: Those of `spread_of`.
        low: The least x, None for all.
        high: The greatest x, None for all.
    """
    import numpy as np

    is_used = np.isfinite(curve.y) & np.isfinite(smoothed)
    known = Curve(curve.x[is_used], curve.y[is_used], np.flatnonzero(is_used))
    cut = cut_curve(known, low, high)
    x, y, smoothed = cut.x, cut.y, smoothed[cut.steps]
    if len(x) <= _FINENESS * max_points:
        return CurvePart(x, smoothed, y, y, np.ones(len(x), np.int64))
    edges = np.linspace(x[0], x[-1], _FINENESS * max_points + 1)[:-1]
    starts = np.unique(np.searchsorted(x, edges))
    sizes = np.diff(starts, append=len(x))
    places = np.add.reduceat(x, starts) / sizes
    places[0], places[-1] = x[0], x[-1]
    return CurvePart(
        places,
        np.add.reduceat(smoothed, starts) / sizes,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
        sizes,
    )


def spread_of(
    curves: Sequence[CurvePart], max_points: int, quantile: float | None = None
) -> Spread:
    """Return the spread of curves at about `max_points` places at most.

    Between its first and its last value each curve counts at every place, with the line between
    its neighbors where it has no value.

    Args:
        curves: Parts made for as many points.
        max_points: With more places than these, the span is cut into equal parts: there a curve
            counts with its mean, and with its least and greatest value.
        quantile: Below 0.5: `lows` and `highs` are this quantile of the curves' means and the
            opposite one, not the extremes.
    """
    import numpy as np

    used = [one for one in curves if len(one.x)]
    if not used:
        none = np.empty(0)
        return Spread(none, none, none, none, none, np.empty(0, np.int64), 0)
    # Most curves of a group have the same places: what depends on these is found once.
    alike: dict[bytes, list[CurvePart]] = {}
    for one in used:
        alike.setdefault(one.x.tobytes() + one.sizes.tobytes(), []).append(one)
    grid = np.unique(np.concatenate([some[0].x for some in alike.values()]))
    edges = grid
    if len(grid) > max_points:
        edges = np.linspace(grid[0], grid[-1], max_points + 1)[:-1]
        parts = np.searchsorted(edges, grid, "right") - 1
        sizes = np.bincount(parts, minlength=max_points)
        is_used = sizes > 0
        grid = (np.bincount(parts, weights=grid, minlength=max_points)[is_used]) / sizes[is_used]
        edges = edges[is_used]
    rows = [_along_grid(some, grid, edges) for some in alike.values()]
    means, lows, highs = (np.concatenate(column) for column in zip(*rows, strict=True))
    is_there = ~np.isnan(means)
    counts = is_there.sum(axis=0)
    mean = np.where(is_there, means, 0).sum(axis=0) / counts
    squares = np.where(is_there, means - mean, 0) ** 2
    deviations = np.sqrt(squares.sum(axis=0) / np.maximum(counts - 1, 1))
    if quantile is None:
        ends = np.nanmin(lows, axis=0), np.nanmax(highs, axis=0)
    else:
        # NaN sorts last.
        rising = np.sort(means, axis=0)
        ends = _quantile(rising, counts, quantile), _quantile(rising, counts, 1 - quantile)
    return Spread(grid, mean, deviations, *ends, counts, len(used))


def _quantile(rising: "Floats", counts: "NDArray[np.int64]", share: float) -> "Floats":
    """Return a quantile of the first `counts` values of each column, with linear interpolation."""
    import numpy as np

    place = (counts - 1) * share
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    columns = np.arange(len(counts))
    low, high = rising[below, columns], rising[above, columns]
    found: Floats = low + (high - low) * (place - below)
    return found


def _along_grid(
    parts: Sequence[CurvePart], grid: "Floats", edges: "Floats"
) -> "tuple[Floats, Floats, Floats]":
    """Return means, least and greatest values of curves with the same x, NaN beyond its ends."""
    import numpy as np

    x, sizes = parts[0].x, parts[0].sizes
    places = np.searchsorted(edges, x, "right") - 1
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    own = places[starts]
    gaps = np.setdiff1d(np.arange(own[0], own[-1] + 1), own)

    def along(name: str, join: Callable[["Floats"], "Floats"]) -> "Floats":
        values = np.stack([getattr(one, name) for one in parts])
        found = np.full((len(parts), len(grid)), np.nan)
        found[:, own] = join(values)
        if len(gaps):
            found[:, gaps] = [np.interp(grid[gaps], x, one) for one in values]
        return found

    total = np.add.reduceat(sizes, starts)
    return (
        along("smoothed", lambda y: np.add.reduceat(y * sizes, starts, axis=1) / total),
        along("lows", lambda y: np.minimum.reduceat(y, starts, axis=1)),
        along("highs", lambda y: np.maximum.reduceat(y, starts, axis=1)),
    )
