"""Trials of any experiments, metric names of many trials, groups with their spread."""

import json
import math
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.group_curves import CurvePart, part_of, spread_of
from paceline._cluster.master.store.series_reader import Curve


def curve(x: Any, y: Any, max_points: int = 100, *limits: float) -> CurvePart:
    xs, ys = np.array(x, float), np.array(y, float)
    return part_of(Curve(xs, ys, xs.astype(np.int64)), ys, max_points, *limits)


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
    parts = [curve(steps, y, 50), curve(steps, np.zeros(100_000), 50)]
    # A group keeps little of a long curve.
    assert max(len(one.x) for one in parts) <= 400
    spread = spread_of(parts, 50)
    assert len(spread.x) == 50
    assert (spread.highs.max(), spread.lows.min()) == (9.0, -3.0)
    assert set(spread.counts.tolist()) == {2}
    assert spread.means.sum() * 2 * 2000 == pytest.approx(6.0)


def test_what_is_not_finite_counts_nowhere_and_a_range_is_cut_with_its_neighbors() -> None:
    gone = curve([0, 1, 2], [math.nan, math.inf, math.nan])
    spread = spread_of([gone, curve([0, 1, 2, 3, 4], [1, math.nan, 3, 4, 5], 10, 2.5, 3.5)], 10)
    assert (spread.x.tolist(), spread.means.tolist()) == ([2, 3, 4], [3, 4, 5])
    assert spread.num_curves == 1
    assert spread_of([gone], 10).x.tolist() == []


def test_quantiles_are_between_the_curves_that_reach_a_place() -> None:
    curves = [curve([0, 1], [n, n]) for n in range(5)] + [curve([0], [100])]
    spread = spread_of(curves, 100, quantile=0.25)
    assert spread.counts.tolist() == [6, 5]
    assert spread.lows == pytest.approx([np.quantile([0, 1, 2, 3, 4, 100], 0.25), 1])
    assert spread.highs == pytest.approx([np.quantile([0, 1, 2, 3, 4, 100], 0.75), 3])


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
    assert listed(label="none")[1] == 0
    assert reported.http.get("/trials", params={"trial": 0}).status_code == 422


def test_numeric_metrics_are_counted_over_trials(reported: Any) -> None:
    reply = reported.http.post("/metric-names", json={"trial_ids": [1, 2, 77]})
    [loss] = reply.json()
    assert loss == {"group": "training", "name": "loss", "num_trials": 2, "x_axis": None}
    assert reported.http.post("/metric-names", json={"trial_ids": []}).status_code == 422


def test_a_group_has_the_mean_and_the_spread_of_its_trials(reported: Any) -> None:
    def read(**other: Any) -> Any:
        reply = reported.http.post("/metric-groups", json=body | other)
        return reply.json()["metrics"][0]["groups"]

    loss = {"group": "training", "name": "loss"}
    body: dict[str, Any] = {"metrics": [loss], "groups": [[1, 2, 2], [1], [77]]}
    both, alone, none = read()
    assert both == {
        "x": [1, 2, 3], "means": [2, 4, 6], "lows": [1, 2, 3], "highs": [3, 6, 9],
        "deviations": pytest.approx([math.sqrt(2) * n for n in (1, 2, 3)]),
        "counts": [2, 2, 2], "num_trials": 2,
    }  # fmt: skip
    assert (alone["means"], alone["deviations"]) == ([1, 2, 3], [0, 0, 0])
    assert (none["x"], none["num_trials"]) == ([], 0)
    smooth = read(smoothing_steps=1e9)
    assert smooth[0]["means"][-1] == pytest.approx(4)
    assert smooth[0]["highs"] == [3, 6, 9]
    assert read(x="time")[0]["x"][0] == 0
    assert read(quantile=0.25)[0]["lows"] == pytest.approx([1.5, 3, 4.5])
    assert reported.http.post("/metric-groups", json=body | {"quantile": 0.5}).status_code == 422
    several = body | {"metrics": [{"group": "training", "name": "none"}, loss]}
    missing, known = reported.http.post("/metric-groups", json=several).json()["metrics"]
    assert [one["num_trials"] for one in missing["groups"]] == [0, 0, 0]
    assert known["groups"] == [both, alone, none]
    assert reported.http.post("/metric-groups", json=body | {"metrics": []}).status_code == 422
    crowd = body | {"groups": [list(range(1, 502)), list(range(1, 502))]}
    reply = reported.http.post("/metric-groups", json=crowd)
    assert reply.status_code == 422
    assert "at most 1000 trials, but got 1002" in reply.text


def test_runs_are_chosen_by_their_own_hyperparameters_and_metrics(master: Any) -> None:
    """The list of experiments compares the best trial's; here each trial stands for itself."""
    searcher = {"name": "grid", "metric": "loss"}
    space = {"lr": {"type": "categorical", "vals": [0.1, 0.2]}}
    body = {"config": {"entrypoint": "x", "searcher": searcher, "hyperparameters": space}}
    assert master.http.post("/experiments", json=body).status_code == 201
    master.schedule()
    for trial, loss in ((1, 0.5), (2, 0.25)):
        master.report(trial, 0, ("validation", 1, {"loss": loss}))

    def found(*conditions: list[Any]) -> list[int]:
        where = [json.dumps(one) for one in conditions]
        reply = master.http.get("/trials", params={"where": where})
        assert reply.status_code == 200, reply.text
        return [one["id"] for one in reply.json()["items"]]

    rates = {one["id"]: one["hparams"]["lr"] for one in master.http.get("/trials").json()["items"]}
    assert sorted(rates) == [1, 2]
    assert [rates[one] for one in found(["hparam:lr", "=", 0.2])] == [0.2]
    assert found(["last:validation/loss", "<", 0.4]) == [2]
    assert found(["best_metric", ">", 0.4]) == [1]
    assert found(["best_metric", ">", 0.1], ["min:validation/loss", ">", 0.3]) == [1]
    assert found(["searcher", "=", "grid"]) == [2, 1]
    assert found(["hparam:none", "empty"]) == [2, 1]


def test_a_view_that_another_window_has_changed_is_replaced_by_choice_only(master: Any) -> None:
    http = master.http
    made = http.post("/views", json={"name": " lr sweep ", "search": "group=%5B%22*%22%5D"})
    assert made.status_code == 201, made.text
    view = made.json()
    assert (view["name"], view["version"], view["is_default"]) == ("lr sweep", 1, False)
    path = f"/views/{view['id']}"
    edit = {"name": "lr sweep", "search": "x=time", "version": 1}
    assert http.put(path, json=edit).json()["version"] == 2
    late = http.put(path, json=edit | {"search": "x=epoch"})
    assert (late.status_code, late.json()["code"]) == (409, "view_changed")
    assert "version, 2, but got 1" in late.json()["detail"]
    assert http.get("/views").json()[0]["search"] == "x=time"
    assert http.put(path, json=edit | {"search": "x=epoch", "version": 2}).json()["version"] == 3
    taken = http.post("/views", json={"name": "lr sweep", "search": ""})
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    for wrong in ({"name": " "}, {"name": "a\nb"}, {"search": "x" * 60_001}, {"search": {}}):
        body = {"name": "new", "search": ""} | wrong
        assert http.post("/views", json=body).status_code == 422, wrong
    assert http.delete(path, params={"version": 1}).status_code == 409
    assert http.delete(path, params={"version": 3}).status_code == 204
    assert http.put(path, json=edit).status_code == 404
    # Ids stand in links, so another view never gets one again.
    assert http.post("/views", json={"name": "next", "search": ""}).json()["id"] > view["id"]


def test_one_view_at_most_is_the_default(master: Any) -> None:
    for name in ("a", "b"):
        body = {"name": name, "search": "", "is_default": True}
        assert master.http.post("/views", json=body).status_code == 201
    found = {
        one["name"]: (one["is_default"], one["version"]) for one in master.http.get("/views").json()
    }
    # Whoever still has the first as the default begins from an old version.
    assert found == {"a": (False, 2), "b": (True, 1)}
