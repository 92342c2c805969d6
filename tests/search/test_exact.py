from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.search._search_method import (
    as_fraction,
    floor_log,
    floor_power,
    keep_count,
    rung_units,
)


@pytest.mark.parametrize(
    ("number", "base", "expected"),
    [
        # A float logarithm gives 2, 4 and 2 for the first three.
        (1000, 10, 3),
        (243, 3, 5),
        (125, 5, 3),
        (242, 3, 4),
        (1, 4, 0),
        (3, 1.5, 2),
        (2, 1.1, 7),
        (10**30, 10, 30),
    ],
)
def test_logarithm_is_exact(number: int, base: float, expected: int) -> None:
    assert floor_log(number, as_fraction(base), 100) == expected


def test_logarithm_stops_at_its_limit() -> None:
    assert floor_log(10**9, as_fraction(1.000001), 4) == 4


@given(number=st.integers(1, 10**12), base=st.integers(2, 12))
def test_logarithm_is_the_largest_fitting_exponent(number: int, base: int) -> None:
    exponent = floor_log(number, Fraction(base), 100)
    assert base**exponent <= number < base ** (exponent + 1)


@pytest.mark.parametrize(
    ("num_rungs", "max_time", "divisor", "expected"),
    [
        pytest.param(3, 9, 3, (1, 3, 9), id="S-26"),
        pytest.param(4, 10, 2, (1, 2, 5, 10), id="S-27"),
        pytest.param(1, 9, 3, (9,), id="S-28"),
        pytest.param(3, 900, 3, (100, 300, 900), id="S-29"),
        pytest.param(3, 9, 1.5, (4, 6, 9), id="real-divisor"),
        pytest.param(4, 2, 4, (1, 1, 1, 2), id="never-below-one"),
    ],
)
def test_rung_units(
    num_rungs: int, max_time: int, divisor: float, expected: tuple[int, ...]
) -> None:
    assert rung_units(num_rungs, max_time, as_fraction(divisor)) == expected


@pytest.mark.parametrize(
    ("num_entries", "divisor", "expected"),
    [(1, 4, 1), (7, 4, 1), (8, 4, 2), (11, 1.1, 10), (3, 1.5, 2), (5, 2.5, 2), (4, 100, 1)],
)
def test_keep_count(num_entries: int, divisor: float, expected: int) -> None:
    assert keep_count(num_entries, as_fraction(divisor)) == expected


@pytest.mark.parametrize(
    ("base", "exponent", "at_most", "expected"),
    [(3, 2, 6, 6), (3, 2, 100, 9), (1.5, 2, 100, 2), (4, 0, 9, 1), (4, 10**6, 9, 9)],
)
def test_power_is_capped(base: float, exponent: int, at_most: int, expected: int) -> None:
    assert floor_power(as_fraction(base), exponent, at_most) == expected
