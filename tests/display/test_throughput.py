"""Rates over the last minute."""

import pytest

from paceline._base.progress_display import Throughput


def test_nothing_is_told_before_there_is_something_to_tell() -> None:
    throughput = Throughput()
    assert throughput.rates() == ()
    throughput.add(100.0, 5, 50)
    throughput.add(100.1, 6, 60)
    assert throughput.rates() == (0.0, 0.0)


def test_rates_do_not_count_what_was_there_at_the_start() -> None:
    throughput = Throughput()
    throughput.add(100.0, 1000, 32_000)
    throughput.add(102.0, 1010, 32_320)
    assert throughput.rates() == (5.0, 160.0)
    assert throughput.elapsed_s == 2.0


def test_only_the_last_minute_counts() -> None:
    """A batch a second for five minutes, then ten a second for a minute and a half."""
    throughput = Throughput()
    completed = 0
    for second in range(300):
        completed += 1
        throughput.add(second, completed, 4 * completed)
    assert throughput.rates()[0] == pytest.approx(1.0)
    for tenth in range(3000, 3900):
        completed += 1
        throughput.add(tenth / 10, completed, 4 * completed)
    assert throughput.rates() == pytest.approx((10.0, 40.0))


def test_a_long_pause_between_two_additions_counts() -> None:
    throughput = Throughput()
    throughput.add(0.0, 0, 0)
    throughput.add(1.0, 10, 10)
    throughput.add(201.0, 20, 20)
    assert throughput.rates()[0] == pytest.approx(10 / 200)
