from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Operation,
    Reported,
    Shutdown,
    SimulationResult,
    Started,
    Stop,
    Train,
    simulate,
)
from paceline.search._adaptive_asha import AsyncHalvingConfig
from paceline.search._search import Search
from paceline.search._search_method import Arrival, Decision

Trace = Callable[[SimulationResult], list[str]]
Halving = Callable[..., AsyncHalvingConfig]


class _Live:
    """A search whose trials are numbered from 1, driven by hand."""

    def __init__(self, config: AsyncHalvingConfig) -> None:
        self.search = Search(config, {}, 0)
        self.ids: list[str] = []
        self.first = self._take(self.search.apply(Started()))

    def report(self, number: int, time: float, metric: float) -> list[str]:
        request_id = self.ids[number - 1]
        given = Reported(request_id=request_id, time=time, metric=metric)
        return self._take(self.search.apply(given))

    def exit(self, number: int, reason: ExitReason = ExitReason.COMPLETED) -> list[str]:
        given = Exited(request_id=self.ids[number - 1], reason=reason)
        return self._take(self.search.apply(given))

    def rung(self, index: int) -> list[tuple[int, float | None, str]]:
        entries = self.search.rungs()[0].rungs[index].entries
        return [(self.ids.index(e.request_id) + 1, e.metric, e.decision.value) for e in entries]

    def _take(self, operations: list[Operation]) -> list[str]:
        words = []
        for operation in operations:
            if isinstance(operation, Create):
                self.ids.append(operation.request_id)
                words.append(f"C{len(self.ids)}")
            elif isinstance(operation, Shutdown):
                words.append("SHUTDOWN")
            else:
                number = self.ids.index(operation.request_id) + 1
                if isinstance(operation, Stop):
                    words.append(f"S{number}")
                else:
                    words.append(f"T{number}:{operation.length}")
        return words


def _by_order(better: float) -> Callable[[Create, int], float]:
    """Give each trial its place in the order of creation, times `better`, as its metric."""
    places: dict[str, int] = {}
    return lambda create, time: better * places.setdefault(create.request_id, len(places))


def test_improving_trials_all_reach_the_top(halving: Halving, trace: Trace) -> None:
    # S-41. A stop is followed by the trial's exit, which creates nothing.
    result = simulate(halving(), {}, 0, _by_order(-1))
    rounds = []
    for first, second in ((1, 2), (3, 4), (5, 6)):
        for time in (1, 3, 9):
            for number in (first, second):
                end = f" S{number}" if time == 9 else ""
                new = f" C{number + 2}" if time == 9 and number < 5 else ""
                rounds.append(f"t{number}@{time}{end}{new}")
    assert trace(result) == ["init C1 C2", *rounds, "x6 SHUTDOWN"]
    assert result.counts() == {9: 6}


def test_worsening_trials_stop_at_the_first_rung(halving: Halving, trace: Trace) -> None:
    # S-42.
    result = simulate(halving(), {}, 0, _by_order(1))
    assert trace(result) == [
        "init C1 C2",
        "t1@1",
        "t2@1 S2 C3",
        "t3@1 S3 C4",
        "t4@1 S4 C5",
        "t5@1 S5 C6",
        "t6@1 S6",
        "t1@3",
        "t1@9 S1",
        "x1 SHUTDOWN",
    ]
    assert result.counts() == {1: 5, 9: 1}


def test_no_cap_starts_enough_trials_for_one_to_reach_the_top(
    halving: Halving, trace: Trace
) -> None:
    # S-46: 3**2 = 9 would be enough, 6 are allowed.
    config = halving(max_concurrent_trials=0, smaller_is_better=False)
    result = simulate(config, {}, 0, _by_order(1))
    assert trace(result)[0] == "init C1 C2 C3 C4 C5 C6"
    assert result.counts() == {9: 6}
    assert len(_Live(halving(max_concurrent_trials=0, max_trials=20)).ids) == 9


def test_trials_that_end_by_themselves_are_replaced(halving: Halving, trace: Trace) -> None:
    # S-47: the original ends after 2 of 6.
    result = simulate(
        halving(),
        {},
        0,
        _by_order(-1),
        exit_of=lambda create, time: ExitReason.COMPLETED if time == 3 else None,
    )
    assert result.counts() == {3: 6}
    assert trace(result)[-1] == "x6 SHUTDOWN"


def test_worsening_trials_of_a_long_search(halving: Halving) -> None:
    # S-48.
    config = halving(max_time=900, max_trials=10, max_concurrent_trials=3)
    assert simulate(config, {}, 0, _by_order(1)).counts() == {100: 9, 900: 1}


def test_constant_metric_still_halves(halving: Halving) -> None:
    # S-81: the original trains all nine to the top.
    config = halving(max_trials=9, max_concurrent_trials=0)
    assert simulate(config, {}, 0, lambda create, time: 0.5).counts() == {1: 8, 9: 1}


def test_report_after_the_stop_changes_nothing(halving: Halving) -> None:
    # S-82: the original inserts it again and creates one more.
    live = _Live(halving())
    assert live.report(1, 1, 0.1) == ["T1:3"]
    assert live.report(2, 1, 0.9) == ["S2", "C3", "T3:1"]
    assert live.report(2, 2, 0.95) == []
    assert live.rung(0) == [(1, 0.1, "continued"), (2, 0.9, "stopped"), (3, None, "waiting")]


def test_better_newcomer_continues_and_worse_one_stops(halving: Halving) -> None:
    # S-38, S-39, S-40.
    live = _Live(halving(max_concurrent_trials=3))
    assert live.first == ["C1", "T1:1", "C2", "T2:1", "C3", "T3:1"]
    assert live.report(1, 1, 0.5) == ["T1:3"]
    assert live.report(2, 1, 0.4) == ["T2:3"]
    assert live.report(3, 1, 0.6) == ["S3", "C4", "T4:1"]


def test_larger_is_better_turns_the_ranking_around(halving: Halving) -> None:
    # S-34, S-35: the metric is given as reported, in either direction.
    live = _Live(halving(smaller_is_better=False, max_concurrent_trials=3))
    live.report(1, 1, 0.2)
    assert live.report(2, 1, 0.3) == ["T2:3"]
    assert live.report(3, 1, 0.1)[0] == "S3"
    assert live.rung(0)[:3] == [(2, 0.3, "continued"), (1, 0.2, "continued"), (3, 0.1, "stopped")]


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_decisions_are_told_with_what_they_were_made_from(
    halving: Halving, smaller_is_better: bool
) -> None:
    config = halving(
        smaller_is_better=smaller_is_better, max_trials=9, max_concurrent_trials=4, divisor=2
    )
    live = _Live(config)
    sign = 1 if smaller_is_better else -1
    for number, value in enumerate((2.4, 2.3, 2.35, math.nan), 1):
        live.report(number, live.search.rungs()[0].rungs[0].units, sign * value)
    twin = Search.restore(config, {}, live.search.snapshot())
    for search in (live.search, twin):
        entries = search.rungs()[0].rungs[0].entries
        told = {live.ids.index(e.request_id) + 1: e.arrival for e in entries}
        # The third has a better metric than the first, which continues as it came alone.
        assert told[1] == Arrival(order=1, rank=1, num_kept=1, cutoff=sign * 2.4)
        assert told[2] == Arrival(order=2, rank=1, num_kept=1, cutoff=sign * 2.3)
        assert told[3] == Arrival(order=3, rank=2, num_kept=1, cutoff=sign * 2.3)
        assert told[4] == Arrival(order=4, rank=4, num_kept=2, cutoff=sign * 2.35)
        assert told[5] is None


def test_too_short_training_decides_nothing(halving: Halving) -> None:
    live = _Live(halving())
    assert live.report(1, 0.5, 0.1) == []
    assert live.rung(0) == [(1, None, "waiting"), (2, None, "waiting")]


def test_one_report_may_clear_several_rungs(halving: Halving) -> None:
    live = _Live(halving())
    assert live.report(1, 4, 0.5) == ["T1:9"]
    assert live.rung(0)[0] == live.rung(1)[0] == (1, 0.5, "continued")
    assert live.report(2, 9, 0.4) == ["S2", "C3", "T3:1"]
    assert live.rung(2) == [(2, 0.4, "finished"), (1, None, "waiting")]


def test_repeated_reports_after_a_restart_are_not_inserted_again(halving: Halving) -> None:
    live = _Live(halving())
    live.report(1, 1, 0.5)
    live.report(1, 3, 0.4)
    before = live.search.snapshot()["method"]
    assert live.report(1, 1, 0.7) == []
    assert live.report(1, 3, 0.1) == []
    assert live.search.snapshot()["method"] == before


@pytest.mark.parametrize("reason", [ExitReason.ERROR, ExitReason.CANCELED])
def test_failed_trial_ranks_last_and_is_replaced(halving: Halving, reason: ExitReason) -> None:
    live = _Live(halving())
    live.report(1, 1, 0.5)
    assert live.exit(1, reason) == ["C3", "T3:1"]
    assert live.rung(0)[0] == (1, 0.5, "continued")
    assert live.rung(1) == [(1, None, "failed")]
    assert live.report(2, 3, 0.3) == ["T2:9"]
    assert live.rung(1)[1] == (1, None, "failed")


def test_failed_trial_is_not_replaced_beyond_the_budget(halving: Halving) -> None:
    live = _Live(halving(max_trials=2))
    assert live.exit(1, ExitReason.ERROR) == []
    assert live.exit(2, ExitReason.ERROR) == ["SHUTDOWN"]


def test_invalid_trial_leaves_no_trace_and_does_not_count(halving: Halving) -> None:
    live = _Live(halving(max_trials=2))
    live.report(1, 4, 0.1)
    assert live.exit(1, ExitReason.INVALID_HP) == ["C3", "T3:1"]
    assert live.rung(0) == [(2, None, "waiting"), (3, None, "waiting")]
    assert live.rung(1) == live.rung(2) == []
    assert live.exit(3, ExitReason.INVALID_HP) == ["C4", "T4:1"]
    bracket = live.search.rungs()[0]
    assert (bracket.num_created, bracket.num_invalid, bracket.max_trials) == (4, 2, 2)


@pytest.mark.parametrize("reason", list(ExitReason))
def test_end_of_a_stopped_trial_changes_nothing(halving: Halving, reason: ExitReason) -> None:
    live = _Live(halving())
    live.report(1, 1, 0.1)
    live.report(2, 1, 0.9)
    before = live.rung(0)
    assert live.exit(2, reason) == []
    assert live.rung(0) == before


@pytest.mark.parametrize("smaller_is_better", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_passes_a_rung(
    halving: Halving, value: float, smaller_is_better: bool
) -> None:
    live = _Live(
        halving(max_trials=9, max_concurrent_trials=9, smaller_is_better=smaller_is_better)
    )
    # Not even an empty one, nor several at once.
    assert live.report(1, 9, value) == ["S1"]
    assert live.report(2, 1, 0.1) == ["T2:3"]
    assert live.report(2, 3, value) == ["S2"]
    for number in range(3, 9):
        live.report(number, 1, 0.1)
    # Nine entries keep three: even so it is not among them.
    assert live.report(9, 1, value) == ["S9"]
    assert [number for number, _, _ in live.rung(0)] == [2, 3, 4, 5, 6, 7, 8, 1, 9]
    assert [decision for _, _, decision in live.rung(1)] == ["stopped"]


@pytest.mark.parametrize("time", [math.nan, math.inf])
def test_a_time_that_is_not_finite_reaches_no_rung(halving: Halving, time: float) -> None:
    live = _Live(halving())
    assert live.report(1, time, 0.1) == []
    assert live.rung(0) == [(1, None, "waiting"), (2, None, "waiting")]


def test_trials_that_diverge_train_no_further_than_to_the_first_rung(halving: Halving) -> None:
    values = {True: math.nan, False: 0.5}
    diverging: dict[str, bool] = {}
    result = simulate(
        halving(max_trials=40, max_concurrent_trials=4),
        {},
        0,
        lambda create, time: values[
            diverging.setdefault(create.request_id, len(diverging) % 2 == 0)
        ],
    )
    assert {result.trained[key] for key, is_diverging in diverging.items() if is_diverging} == {1}


def test_operations_have_the_documented_types(halving: Halving) -> None:
    search = Search(halving(), {"lr": 0.1}, 0)
    create, train, *_ = search.apply(Started())
    assert isinstance(create, Create)
    assert create.hparams == {"lr": 0.1}
    assert train == Train(request_id=create.request_id, length=1)
    finished = search.apply(Reported(request_id=create.request_id, time=9, metric=0))
    assert finished[0] == Stop(request_id=create.request_id)


@pytest.mark.parametrize("decision", [one for one in Decision if one is not Decision.PAUSED])
def test_decisions_are_plain_words(decision: Decision, halving: Halving) -> None:
    live: Any = _Live(halving(max_concurrent_trials=4))
    live.report(1, 9, 0.1)
    live.report(2, 1, 0.9)
    live.exit(3, ExitReason.ERROR)
    seen = {word for index in range(3) for _, _, word in live.rung(index)}
    assert decision.value in seen
