import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline._cluster.master.store import series_reader
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_rows import add_metrics, read_series
from paceline._cluster.master.store.series_reader import (
    Curve,
    Selection,
    cut_curve,
    read_curve,
    read_curves,
    sample_curve,
)
from paceline.journal import MetricsReported


def store(database: Database, trial: int, attempt: int, resumed: int, rows: list[Any]) -> None:
    records = [
        MetricsReported(time=float(step), group="training", steps_completed=step, metrics=metrics)
        for step, metrics in rows
    ]
    database.write(
        lambda transaction: add_metrics(
            transaction.connection, trial_id=trial, attempt=attempt, resumed_steps=resumed,
            records=records,
        )
    ).result()  # fmt: skip


def read(database: Database, trial: int, key: str = "loss", x: str = "batches") -> Curve:
    with database.read() as connection:
        found, _ = read_curve(connection, Selection(trial_id=trial, group="training", key=key), x=x)
    return found


def test_a_curve_has_the_points_that_rows_have(
    database: Database, add_trial: Callable[..., int]
) -> None:
    """Attempt 2 resumed at step 1500, so the first attempt's later points are superseded."""
    trial = add_trial(0, 1500)
    store(database, trial, 1, 0, [(step, {"loss": float(step)}) for step in range(1, 3001)])
    store(database, trial, 2, 1500, [(step, {"loss": -1.0}) for step in range(1501, 2001)])
    curve = read(database, trial)
    with database.read() as connection:
        expected = read_series(connection, trial, "training", "loss")
    assert list(zip(curve.steps.tolist(), curve.y.tolist(), strict=True)) == expected
    assert len(expected) == 2000


def test_many_curves_are_read_in_bounded_batches_as_each_one_alone(
    database: Database, add_trial: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [add_trial(0, 1500), add_trial(0), add_trial(0)]
    for trial in trials[:2]:
        rows = [(n, {"loss": float(trial * n), "epoch": n / 10}) for n in range(1, 2500)]
        store(database, trial, 1, 0, rows)
    store(database, trials[0], 2, 1500, [(1501, {"loss": -1.0, "epoch": 9.0})])
    monkeypatch.setattr(series_reader, "_POINTS_AT_ONCE", 1)
    order = [trials[2], trials[0], trials[1], 10_000]
    for x in ("batches", "time", "epoch"):
        with database.read() as connection:
            selection = Selection(trial_id=0, group="training", key="loss")
            found = list(read_curves(connection, order, selection, x=x))
        for trial, (curve, _) in zip(order, found, strict=True):
            alone = read(database, trial, x=x)
            assert curve.x.tolist() == alone.x.tolist()
            assert curve.y.tolist() == alone.y.tolist()
        assert [len(curve.x) for curve, _ in found] == [0, 1501, 2499, 0]


def test_what_is_no_finite_number_is_a_gap(
    database: Database, add_trial: Callable[..., int]
) -> None:
    values = [1, 2.5, {"$float": "nan"}, {"$float": "inf"}, "text", True]
    trial = add_trial(0)
    store(database, trial, 1, 0, [(n, {"loss": value}) for n, value in enumerate(values)])
    found = read(database, trial).y.tolist()
    assert found[:2] == [1.0, 2.5]
    assert not any(math.isfinite(value) for value in found[2:])


def test_the_x_axis_may_be_time_or_another_metric(
    database: Database, add_trial: Callable[..., int]
) -> None:
    trial = add_trial(0)
    rows = [(1, {"loss": 3.0, "epoch": 0.5}), (2, {"loss": 2.0}), (3, {"loss": 1.0, "epoch": 0.1})]
    store(database, trial, 1, 0, rows)
    assert read(database, trial, x="time").x.tolist() == [1.0, 2.0, 3.0]
    by_epoch = read(database, trial, x="epoch")
    assert by_epoch.x.tolist() == [0.1, 0.5]
    assert by_epoch.y.tolist() == [1.0, 3.0]
    assert by_epoch.steps.tolist() == [3, 1]
    assert len(read(database, trial, x="colour").x) == 0


def curve_of(y: Any) -> Curve:
    steps = np.arange(len(y), dtype=np.int64)
    return Curve(steps.astype(np.float64), np.asarray(y, np.float64), steps)


@pytest.mark.parametrize("seed", range(5))
def test_no_spike_is_lost_and_both_ends_stay(seed: int) -> None:
    """Ten spikes up and ten down, farther apart than one of the 500 parts."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=100_000)
    places = np.arange(20) * 5000 + rng.integers(0, 4000, 20)
    y[places[::2]], y[places[1::2]] = 100.0, -100.0
    shown = sample_curve(curve_of(y), 1000)
    assert len(shown.x) <= 1002
    assert set(places) <= set(shown.steps.tolist())
    assert (shown.steps[0], shown.steps[-1]) == (0, 99_999)
    assert (np.diff(shown.x) > 0).all()


def test_gaps_stay_gaps() -> None:
    y = np.sin(np.arange(50_000))
    y[20_000:20_100] = np.nan
    y[40_000] = np.inf
    shown = sample_curve(curve_of(y), 200)
    gaps = shown.steps[~np.isfinite(shown.y)].tolist()
    assert gaps == [20_000, 40_000]
    y[::2] = np.nan
    assert len(sample_curve(curve_of(y), 200).x) <= 252
    assert len(sample_curve(curve_of(np.full(5000, np.nan)), 200).x) == 1


def test_a_cut_keeps_a_point_beyond_each_end() -> None:
    curve = curve_of(np.arange(10))
    assert cut_curve(curve, 3.5, 5.0).x.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert cut_curve(curve, None, 0.0).x.tolist() == [0.0, 1.0]
    assert cut_curve(curve, 100.0, None).x.tolist() == [9.0]
    assert len(cut_curve(curve_of([]), 1.0, 2.0).x) == 0
