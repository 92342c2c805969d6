"""Arithmetic with divisors that never rounds the wrong way."""

from __future__ import annotations

from fractions import Fraction


def as_fraction(number: float) -> Fraction:
    """Return the number that was written: 1.1 means 11/10, not its nearest binary float."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(float(number)))


def floor_log(number: int, base: Fraction, at_most: int) -> int:
    """Return the largest k <= `at_most` with base**k <= number, for number >= 1 and base > 1."""
    exponent = 0
    power = base
    while exponent < at_most and power <= number:
        exponent += 1
        power *= base
    return exponent


def floor_power(base: Fraction, exponent: int, at_most: int) -> int:
    """Return base**exponent rounded down, but no more than `at_most`."""
    power = Fraction(1)
    for _ in range(exponent):
        power *= base
        if power >= at_most:
            return at_most
    return min(int(power), at_most)


def keep_count(num_entries: int, divisor: Fraction) -> int:
    """Return how many of a rung's entries are good enough to go on, at least one."""
    return max(num_entries * divisor.denominator // divisor.numerator, 1)


def rung_units(num_rungs: int, max_time: int, divisor: Fraction) -> tuple[int, ...]:
    """Return the absolute training time at which each rung decides, shortest first."""
    units = []
    time = Fraction(max_time)
    for _ in range(num_rungs):
        units.append(max(int(time), 1))
        if time >= 1:
            time /= divisor
    return tuple(reversed(units))
