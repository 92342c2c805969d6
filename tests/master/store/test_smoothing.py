"""Smoothing belongs to the series: how it was sampled, and what is drawn of it, change nothing."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._cluster.master.store.series_reader import Curve, sample_curve, smooth_at


def curve_of(steps: Any, y: Any) -> Curve:
    steps = np.asarray(steps, np.int64)
    return Curve(x=steps.astype(np.float64), y=np.asarray(y, np.float64), steps=steps)


def smoothed(curve: Curve, time_constant: float, at: Any = None) -> list[float]:
    steps = curve.steps if at is None else np.asarray(at, np.int64)
    found: list[float] = smooth_at(curve, steps, time_constant).tolist()
    return found


def by_quadrature(curve: Curve, time_constant: float, step: int) -> float:
    """Return the mean that `smooth_at` promises, from its definition."""
    begin = curve.steps[0]
    places = np.linspace(begin, step, 400_001)
    weights = np.exp((places - step) / time_constant)
    values = np.interp(places, curve.steps, curve.y)
    # The trapezoidal rule; NumPy 1 has it by another name than NumPy 2.
    ends = (0, -1)
    total = (weights * values).sum() - (weights * values).take(ends).sum() / 2
    return float(total / (weights.sum() - weights.take(ends).sum() / 2))


def test_it_is_the_weighted_mean_over_the_steps_before() -> None:
    curve = curve_of([2, 3, 10, 11, 40], [1.0, -1.0, 5.0, 2.0, 0.0])
    for time_constant in (0.7, 4.0, 300.0):
        found = smoothed(curve, time_constant)
        assert found[0] == 1.0
        for step, value in zip(curve.steps[1:], found[1:], strict=True):
            expected = by_quadrature(curve, time_constant, int(step))
            assert value == pytest.approx(expected, abs=1e-4)


def test_two_samplings_of_one_line_are_one() -> None:
    """Of a function made of lines: every step, every tenth, and both in turns."""
    corners = [0, 100, 400, 410, 1000]
    heights = [1.0, 0.2, 0.5, 3.0, 0.1]
    every = np.arange(1001)
    tenth = np.arange(0, 1001, 10)
    mixed = np.union1d(tenth, np.arange(300, 700))
    curves = [
        curve_of(steps, np.interp(steps, corners, heights)) for steps in (every, tenth, mixed)
    ]
    for time_constant in (0.5, 30.0, 2000.0):
        first, second, third = (smoothed(curve, time_constant, tenth) for curve in curves)
        assert second == pytest.approx(first, abs=1e-9)
        assert third == pytest.approx(first, abs=1e-9)


def test_two_samplings_of_a_learning_curve_are_drawn_alike() -> None:
    def loss(steps: Any) -> Any:
        return np.exp(-steps / 20_000) + 0.05 * np.sin(steps / 500)

    fine, coarse = np.arange(0, 100_001, 1), np.arange(0, 100_001, 100)
    shown = [
        smoothed(curve_of(steps, loss(steps)), 1500.0, coarse) for steps in (fine, coarse)
    ]  # fmt: skip
    assert max(abs(a - b) for a, b in zip(*shown, strict=True)) < 1e-3


def test_how_many_points_are_drawn_changes_nothing() -> None:
    noise = np.random.default_rng(0).normal(size=200_000)
    curve = curve_of(np.arange(200_000), np.linspace(2, 1, 200_000) + noise)
    few, many = sample_curve(curve, 400), sample_curve(curve, 1500)
    common = np.intersect1d(few.steps, many.steps)
    assert len(common) > 100
    values = []
    for shown in (few, many):
        at = dict(zip(shown.steps.tolist(), smoothed(curve, 3000.0, shown.steps), strict=True))
        values.append([at[step] for step in common.tolist()])
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    # Not the mean of extremes that the drawn points alone would give.
    assert abs(values[0][-1] - np.mean(curve.y[-6000:])) < 0.1


def test_gaps_stay_and_the_rest_bridges_them() -> None:
    y = [1.0, math.nan, 3.0, math.inf, -math.inf, 6.0]
    found = smoothed(curve_of(range(6), y), 2.0)
    assert [math.isfinite(value) for value in found] == [True, False, True, False, False, True]
    whole = smoothed(curve_of([0, 2, 5], [1.0, 3.0, 6.0]), 2.0)
    assert [value for value in found if math.isfinite(value)] == pytest.approx(whole)


@pytest.mark.parametrize("steps", [[], [7]])
def test_none_and_one_point_are_themselves(steps: list[int]) -> None:
    assert smoothed(curve_of(steps, [2.5] * len(steps)), 3.0) == [2.5] * len(steps)
    assert smoothed(curve_of(steps, [math.nan] * len(steps)), 3.0) == pytest.approx(
        [math.nan] * len(steps), nan_ok=True
    )


def test_steps_may_be_asked_for_in_any_order() -> None:
    curve = curve_of(range(5), [1.0, 5.0, 2.0, 4.0, 3.0])
    whole = smoothed(curve, 2.0)
    assert smoothed(curve, 2.0, [3, 1, 4]) == pytest.approx([whole[3], whole[1], whole[4]])


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    st.floats(1e-300, 1e12),
    st.floats(-1e6, 1e6),
    st.data(),
)
def test_a_constant_stays_and_a_mean_lies_between_the_extremes(
    gaps: list[int], time_constant: float, level: float, data: Any
) -> None:
    steps = np.cumsum(gaps)
    flat = smoothed(curve_of(steps, [level] * len(steps)), time_constant)
    assert flat == pytest.approx([level] * len(steps), rel=1e-6, abs=1e-9)
    values = data.draw(st.lists(st.floats(-1, 1), min_size=len(gaps), max_size=len(gaps)))
    found = smoothed(curve_of(steps, values), time_constant)
    for number, value in enumerate(found):
        before = values[: number + 1]
        assert min(before) - 1e-6 <= value <= max(before) + 1e-6
