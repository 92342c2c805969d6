"""Halving in promotion form, Hyperband and population based training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paceline.search import Create, Exited, ExitReason, Proposed, Reported, Started, Stop, simulate
from paceline.search._adaptive_asha import AsyncHalvingConfig, HyperbandConfig
from paceline.search._median_stopping import MedianStoppingConfig
from paceline.search._population import PbtConfig
from paceline.search._preview_and_simulation import preview
from paceline.search._search import Search
from paceline.search._search_messages import Train
from paceline.search._search_method import Decision

SPACE: dict[str, Any] = {
    "lr": {"type": "double", "minval": 0, "maxval": 1},
    "net": {"kind": {"type": "categorical", "vals": ["a", "b"]}},
}


def test_a_complete_rung_promotes_its_best_together_and_stops_the_others() -> None:
    config = HyperbandConfig(
        metric="loss", max_trials=4, max_time=4, time_metric="t", divisor=2, max_rungs=2,
        bracket_rungs=(2,), max_concurrent_trials=4,
    )  # fmt: skip
    search = Search(config, SPACE, 0)
    ids = [o.request_id for o in search.apply(Started()) if isinstance(o, Create)]
    for request_id, loss in zip(ids[:3], (3.0, 1.0, float("nan")), strict=True):
        assert search.apply(Reported(request_id=request_id, time=2.0, metric=loss)) == []
    decisions = [entry.decision for entry in search.rungs()[0].rungs[0].entries]
    assert decisions == [Decision.PAUSED] * 3 + [Decision.WAITING]
    # A trial that pauses may report further values until it has left.
    assert search.apply(Reported(request_id=ids[0], time=3.0, metric=0.0)) == []
    assert search.apply(Exited(request_id=ids[3], reason=ExitReason.ERROR)) == [
        Train(request_id=ids[1], length=4),
        Train(request_id=ids[0], length=4),
        Stop(request_id=ids[2]),
    ]
    for request_id in ids[:2]:
        found = search.apply(Reported(request_id=request_id, time=4.0, metric=1.0))
        assert found == [Stop(request_id=request_id)]


def test_a_paused_trial_resumes_as_soon_as_it_is_among_the_best_so_far() -> None:
    config = AsyncHalvingConfig(
        metric="loss", max_trials=4, max_time=4, time_metric="t", divisor=2, num_rungs=2,
        max_concurrent_trials=1, promotes=True,
    )  # fmt: skip
    search = Search(config, SPACE, 0)
    [first, _] = search.apply(Started())
    assert isinstance(first, Create)
    # One of one is not among the best half: another trial comes.
    [second, _] = search.apply(Reported(request_id=first.request_id, time=2.0, metric=1.0))
    assert isinstance(second, Create)
    assert search.apply(Reported(request_id=second.request_id, time=2.0, metric=2.0)) == [
        Train(request_id=first.request_id, length=4)
    ]


@pytest.mark.parametrize("concurrent", [1, 3, 16])
def test_hyperband_trains_as_many_trials_as_its_preview_says(concurrent: int) -> None:
    config = HyperbandConfig(
        metric="loss", max_trials=20, max_time=27, time_metric="t", divisor=3,
        max_concurrent_trials=concurrent,
    )  # fmt: skip
    result = simulate(
        config, SPACE, 5, lambda create, time: create.hparams["lr"], exit_of=lambda c, t: None
    )
    planned = {row.units: row.trials for row in preview(config, SPACE).rows}
    assert result.counts() == planned


def test_population_copies_strong_trials_in_the_place_of_weak_ones() -> None:
    config = PbtConfig(metric="loss", max_trials=8, max_time=20, interval=5)
    result = simulate(config, SPACE, 2, lambda create, time: create.hparams["lr"], report_every=1)
    created = {
        o.request_id: o for group in result.operations for o in group if isinstance(o, Create)
    }
    copies = {key: one for key, one in created.items() if one.parent is not None}
    assert len(created) - len(copies) == 8
    assert copies
    losses = {key: one.hparams["lr"] for key, one in created.items()}
    # Each copy stands for one trial that was stopped before its end.
    ended = Counter(
        o.request_id for group in result.operations for o in group if isinstance(o, Stop)
    )
    assert max(ended.values()) == 1
    assert len(ended) == len(created)
    for one in copies.values():
        parent = created[one.parent or ""]
        assert losses[parent.request_id] < sorted(losses.values())[len(losses) // 2]
        moved = abs(one.hparams["lr"] - parent.hparams["lr"])
        assert 0 <= one.hparams["lr"] <= 1
        assert moved > 0 or parent.hparams["lr"] in (0, 1)
    # A line of copies trains as long as one trial.
    assert max(result.trained[key] for key in copies) < 20


HALVING: dict[str, Any] = {
    "metric": "loss",
    "max_trials": 16,
    "max_time": 8,
    "time_metric": "t",
    "divisor": 2,
}
METHODS: dict[str, Any] = {
    "asynchronous": AsyncHalvingConfig(**HALVING, num_rungs=3, max_concurrent_trials=4),
    "promotion": AsyncHalvingConfig(**HALVING, num_rungs=3, max_concurrent_trials=4, promotes=True),
    "hyperband": HyperbandConfig(**HALVING, max_concurrent_trials=4),
    "population": PbtConfig(metric="loss", max_trials=16, max_time=8, interval=2),
    "population of 3": PbtConfig(metric="loss", max_trials=3, max_time=8, interval=2),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", METHODS)
def test_trials_that_diverge_are_stopped_at_once_and_never_copied(
    method: str, value: float
) -> None:
    """Half of the space diverges, so that there are more such trials than weak ones."""
    config = METHODS[method]
    result = simulate(
        config,
        SPACE,
        4,
        lambda create, time: value if create.hparams["lr"] > 0.5 else create.hparams["lr"],
        report_every=1,
        exit_of=lambda create, time: None,
    )
    created = {
        o.request_id: o for group in result.operations for o in group if isinstance(o, Create)
    }
    diverging = {key for key, one in created.items() if one.hparams["lr"] > 0.5}
    assert 0 < len(diverging) < len(created)
    # Its first rung, or its first comparison.
    first = {"asynchronous": 2, "promotion": 2, "hyperband": 8}.get(method, 2)
    assert max(result.trained[key] for key in diverging) <= first
    assert not {one.parent for one in created.values()} & diverging
    assert max(result.trained[key] for key in created.keys() - diverging) >= 4


@pytest.mark.parametrize("is_asking", [True, False])
def test_a_copy_is_near_the_hyperparameters_that_a_trial_was_given(*, is_asking: bool) -> None:
    """Whoever chose them, a sampler or a person."""
    config = PbtConfig(
        metric="loss", max_trials=4, max_time=8, interval=2, resample=0.0, spread=0.01
    )
    search = Search(config, SPACE, 3, is_asking=is_asking)
    found = search.apply(Started())
    ids = [
        each.request_id
        for each in (search.asks if is_asking else found)
        if isinstance(each, Create)
    ]
    given = {"lr": 0.5, "net": {"kind": "a"}}
    for number, request_id in enumerate(ids):
        hparams = {**given, "lr": 0.1 + 0.2 * number}
        search.apply(Proposed(request_id=request_id, hparams=hparams, by="a test"))
    search = Search.restore(config, SPACE, search.snapshot())
    operations = []
    for request_id, loss in zip(reversed(ids), (1.0, 2.0, 3.0, 4.0), strict=True):
        operations += search.apply(Reported(request_id=request_id, time=2.0, metric=loss))
    copies = [one for one in operations if isinstance(one, Create)]
    assert copies
    parents = {request_id: 0.1 + 0.2 * number for number, request_id in enumerate(ids)}
    for one in copies:
        assert one.parent is not None
        assert one.hparams["lr"] == pytest.approx(parents[one.parent], abs=0.011)


@pytest.mark.parametrize("method", [*METHODS, "median"])
def test_reports_told_again_or_backwards_change_no_decision(method: str) -> None:
    """An attempt that is started again repeats what the one before it has told."""
    median = MedianStoppingConfig(metric="loss", max_trials=9, max_time=8)
    config = METHODS.get(method, median)
    result = simulate(
        config, SPACE, 4, lambda create, time: create.hparams["lr"] / time, report_every=1
    )
    search, decided = Search(config, SPACE, 4), []
    for given in result.inputs:
        decided.append(tuple(search.apply(given)))
        if isinstance(given, Reported) and not search.is_over:
            for time, metric in ((given.time, -9.0), (given.time / 2, -9.0), (0.0, 9.0)):
                told = Reported(request_id=given.request_id, time=time, metric=metric)
                assert search.apply(told) == []
    assert tuple(decided) == result.operations
