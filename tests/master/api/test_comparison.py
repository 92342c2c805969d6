"""Trials of any experiments, metric names of many trials, groups with their spread."""

import math
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.group_curves import spread_of
from paceline._cluster.master.store.metric_series import Curve


def curve(x: Any, y: Any) -> tuple[Curve, Any]:
    xs, ys = np.array(x, float), np.array(y, float)
    return Curve(xs, ys, xs.astype(np.int64)), ys


def test_the_spread_of_curves_with_other_steps_is_taken_between_their_ends() -> None:
    spread = spread_of([curve([0, 2, 4], [0, 2, 4]), curve([1, 2], [3, 6])], 100)
    assert spread.x.tolist() == [0, 1, 2, 4]
    assert spread.means.tolist() == [0, 2, 4, 4]
    assert spread.counts.tolist() == [1, 2, 2, 1]
    assert spread.deviations == pytest.approx([0, math.sqrt(2), math.sqrt(8), 0])
    assert (spread.lows.tolist(), spread.highs.tolist()) == ([0, 1, 2, 4], [0, 3, 6, 4])
    assert spread.num_curves == 2


def test_a_spike_of_one_point_survives_any_number_of_places() -> None:
    y = np.zeros(100_000)
    y[77_777], y[5] = 9.0, -3.0
    steps = range(100_000)
    spread = spread_of([curve(steps, y), curve(steps, np.zeros(100_000))], 50)
    assert len(spread.x) == 50
    assert (spread.highs.max(), spread.lows.min()) == (9.0, -3.0)
    assert set(spread.counts.tolist()) == {2}


def test_what_is_not_finite_counts_nowhere_and_a_range_is_cut_with_its_neighbors() -> None:
    gone = curve([0, 1, 2], [math.nan, math.inf, math.nan])
    spread = spread_of([gone, curve([0, 1, 2, 3, 4], [1, math.nan, 3, 4, 5])], 10, 2.5, 3.5)
    assert (spread.x.tolist(), spread.means.tolist()) == ([2, 3, 4], [3, 4, 5])
    assert spread.num_curves == 1
    assert spread_of([gone], 10).x.tolist() == []


@pytest.fixture
def reported(master: Any) -> Any:
    """Return a master with two experiments of two trials; three of them have reported."""
    master.create()
    master.create()
    master.schedule()
    for trial, scale in ((1, 1), (2, 3)):
        points = [("training", n, {"loss": scale * n, "note": "x"}) for n in range(1, 4)]
        master.report(trial, 0, *points)
    return master


def test_trials_of_any_experiments_are_listed_with_their_experiments(reported: Any) -> None:
    def listed(**query: Any) -> tuple[list[int], int, list[int]]:
        reply = reported.http.get("/trials", params=query)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        ids = [[one["id"] for one in found[name]] for name in ("items", "experiments")]
        return ids[0], found["total"], ids[1]

    everything, total, experiments = listed()
    assert everything == sorted(everything, reverse=True)
    assert (total, experiments) == (len(everything), [1, 2])
    assert listed(limit=1) == (everything[:1], total, [2])
    assert listed(trial=[1, 999]) == ([1], 1, [1])
    assert set(listed(experiment=1)[0]) | set(listed(search="2")[0]) == set(everything)
    archive = update(tables.experiments).where(tables.experiments.c.id == 2)
    reported.core.database.write(
        lambda transaction: transaction.connection.execute(archive.values(is_archived=True))
    ).result()
    assert listed()[2] == [1]
    assert listed(experiment=2)[2] == [2]
    assert reported.http.get("/trials", params={"where": "no"}).status_code == 422
    assert reported.http.get("/trials", params={"trial": 0}).status_code == 422


def test_numeric_metrics_are_counted_over_trials(reported: Any) -> None:
    reply = reported.http.post("/metric-names", json={"trial_ids": [1, 2, 77]})
    assert reply.json() == [{"group": "training", "name": "loss", "num_trials": 2}]
    assert reported.http.post("/metric-names", json={"trial_ids": []}).status_code == 422


def test_a_group_has_the_mean_and_the_spread_of_its_trials(reported: Any) -> None:
    body = {"group": "training", "name": "loss", "groups": [[1, 2, 2], [1], [77]]}
    both, alone, none = reported.http.post("/metric-groups", json=body).json()["groups"]
    assert both == {
        "x": [1, 2, 3], "means": [2, 4, 6], "lows": [1, 2, 3], "highs": [3, 6, 9],
        "deviations": pytest.approx([math.sqrt(2) * n for n in (1, 2, 3)]),
        "counts": [2, 2, 2], "num_trials": 2,
    }  # fmt: skip
    assert (alone["means"], alone["deviations"]) == ([1, 2, 3], [0, 0, 0])
    assert (none["x"], none["num_trials"]) == ([], 0)
    smooth = reported.http.post("/metric-groups", json=body | {"smoothing_steps": 1e9}).json()
    assert smooth["groups"][0]["means"][-1] == pytest.approx(4)
    assert smooth["groups"][0]["highs"] == [3, 6, 9]
    by_time = reported.http.post("/metric-groups", json=body | {"x": "time"}).json()
    assert by_time["groups"][0]["x"][0] == 0
    crowd = body | {"groups": [list(range(1, 502)), list(range(1, 502))]}
    reply = reported.http.post("/metric-groups", json=crowd)
    assert reply.status_code == 422
    assert "at most 1000 trials, but got 1002" in reply.text
