"""Smoothing of metric series by steps, not by points: it does not depend on their sampling."""

from typing import TYPE_CHECKING

from paceline.master.store._chart_series import Curve

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

# Below this ratio of a step to the time constant the closed form loses digits; a series does not.
_SMALL = 1e-4


def smooth_at(curve: Curve, steps: "Integers", time_constant: float) -> "Floats":
    """Return a curve's exponential moving average with respect to steps, at some of its steps.

    It is the mean of the lines between the points up to a step, where the weight of what lies
    before falls to 1/e every `time_constant` steps:

        S(t) = integral of f(u) exp((u - t) / T) du / integral of exp((u - t) / T) du

    with u from the first step to t (Zumbach and Müller, "Operators on inhomogeneous time series",
    2001, with linear interpolation; the division by the sum of weights is ours). Values that are
    not finite are left out, and NaN is returned in their place.

    Args:
        curve: A whole series, in the order of its steps.
        steps: Steps of the curve, in any order.
        time_constant: More than 0, in steps.
    """
    import numpy as np

    result = np.full(len(steps), np.nan)
    is_finite = np.isfinite(curve.y)
    known, values = curve.steps[is_finite], curve.y[is_finite]
    if not len(known):
        return result
    places = np.minimum(np.searchsorted(known, steps), len(known) - 1)
    is_there = known[places] == steps
    ends, index = np.unique(places[is_there], return_inverse=True)
    if len(ends):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            result[is_there] = _smoothed_means(known, values, ends, time_constant)[index]
    return result


def _smoothed_means(
    known: "Integers", values: "Floats", ends: "Integers", time_constant: float
) -> "Floats":
    """Return the means up to the points with the indices `ends`, which rise."""
    import numpy as np

    known, values = known[: ends[-1] + 1], values[: ends[-1] + 1]
    # What each line adds, weighted as its end sees it; then as the next wanted point sees it.
    parts = _line_integrals(np.diff(known) / time_constant, values)
    lengths = np.diff(ends, prepend=-1)
    to_end = (known - np.repeat(known[ends], lengths)) / time_constant
    sums = np.add.reduceat(parts * np.exp(to_end), np.concatenate([[0], ends[:-1] + 1]))
    decays = np.exp(-np.diff(known[ends], prepend=known[0]) / time_constant)
    total, totals = 0.0, []
    for decay, part in zip(decays.tolist(), sums.tolist(), strict=True):
        total = total * decay + part
        totals.append(total)
    masses = -np.expm1((known[0] - known[ends]) / time_constant)
    # At the first step there is no line yet.
    return np.where(masses > 0, np.divide(totals, np.where(masses > 0, masses, 1)), values[ends])


def _line_integrals(widths: "Floats", values: "Floats") -> "Floats":
    """Return the weighted integral over the line that ends at each point, 0 for the first."""
    import numpy as np

    decay = np.exp(-widths)
    mean = -np.expm1(-widths) / widths
    is_small = widths < _SMALL
    before = np.where(is_small, widths / 2 - widths**2 / 3, mean - decay)
    here = np.where(is_small, widths / 2 - widths**2 / 6, 1 - mean)
    return np.concatenate([[0.0], before * values[:-1] + here * values[1:]])
