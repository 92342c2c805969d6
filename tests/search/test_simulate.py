from __future__ import annotations

import pytest

from paceline.search import ExitReason, simulate
from paceline.search._grid_random_single import RandomConfig, SingleConfig
from paceline.search._search import replay

CONFIG = RandomConfig(metric="loss", max_trials=3, max_concurrent_trials=2, max_length=8)


def test_simulation_is_a_search_that_can_be_replayed() -> None:
    result = simulate(CONFIG, {}, 4, lambda create, time: 1.0)
    assert [tuple(ops) for ops in replay(CONFIG, {}, 4, result.inputs)] == list(result.operations)
    assert len(result.inputs) == len(result.operations) == len(result.progress) == 7
    assert result.counts() == {8: 3}


def test_simulation_asks_for_metrics_at_the_targets() -> None:
    asked = []

    def metric_of(create: object, time: int) -> float:
        asked.append(time)
        return 0.0

    simulate(SingleConfig(metric="loss", max_length=5), {}, 0, metric_of)
    assert asked == [5]


def test_trials_can_report_on_the_way_to_their_targets() -> None:
    asked = []

    def metric_of(create: object, time: int) -> float:
        asked.append(time)
        return 0.0

    config = SingleConfig(metric="loss", max_length=5)
    result = simulate(config, {}, 0, metric_of, report_every=2)
    assert asked == [2, 4, 5]
    assert result.counts() == {5: 1}
    with pytest.raises(ValueError, match="`report_every` must be at least 1, but got 0"):
        simulate(config, {}, 0, metric_of, report_every=0)


def test_simulation_without_end_is_broken_off() -> None:
    with pytest.raises(RuntimeError, match="must end within 50 inputs"):
        simulate(
            CONFIG,
            {},
            0,
            lambda create, time: 1.0,
            exit_of=lambda create, time: ExitReason.INVALID_HP,
            max_inputs=50,
        )
