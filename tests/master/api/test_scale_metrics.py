"""Trials with very many metric names."""

from typing import Any

import pytest

from paceline._cluster.master.store.metric_summaries import MAX_NAMES
from paceline.client import Client


def report_names(master: Any, number: int) -> None:
    """Let a trial report so many names of metrics, in several groups."""
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    master.schedule()
    many = {f"a{key:06d}": float(key) for key in range(number)}
    master.report(
        1, 1, ("training", 1, many), ("validation", 1, many | {"loss": 0.5}), ("zzz", 1, {"x": 1.0})
    )


def test_a_trial_shows_the_first_metrics_each_group_and_the_searched_one(
    master: Any, count_reads: Any
) -> None:
    report_names(master, 3 * MAX_NAMES)
    with count_reads(master.core.database._reader._engine) as reads:
        trial = master.http.get("/trials/1").json()
    assert trial["has_more_metrics"]
    summary = trial["summary"]
    assert summary["validation"]["loss"]["last"] == 0.5
    assert summary["training"]["a000007"]["last"] == 7.0
    assert summary["zzz"]["x"]["count"] == 1
    assert sum(len(group) for group in summary.values()) <= MAX_NAMES + 3
    assert reads.num_rows < 3 * MAX_NAMES


def test_a_trial_with_fewer_metrics_shows_all(master: Any) -> None:
    report_names(master, 20)
    trial = master.http.get("/trials/1").json()
    assert not trial["has_more_metrics"]
    assert {name: len(group) for name, group in trial["summary"].items()} == {
        "training": 20, "validation": 21, "zzz": 1,
    }  # fmt: skip


def test_a_page_of_rows_with_many_metrics_ends_earlier(
    master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline._cluster.master.api.trial_and_series_routes._MAX_VALUES", 100)
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    master.schedule()
    names = {f"a{key}": float(key) for key in range(20)}
    master.report(1, 1, *(("training", step, names) for step in range(1, 13)))
    steps, sizes, cursor = [], [], None
    while not sizes or cursor is not None:
        params = {"group": "training", "limit": 100} | ({"cursor": cursor} if cursor else {})
        page = master.http.get("/trials/1/metrics", params=params).json()
        assert all(row["metrics"] == names for row in page["items"])
        steps += [row["steps_completed"] for row in page["items"]]
        sizes.append(len(page["items"]))
        cursor = page["next_cursor"]
    assert steps == list(range(1, 13))
    assert sizes == [5, 5, 2]


def test_names_of_metrics_come_in_pages_and_a_client_reads_the_groups_of_all(
    master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline._cluster.master.store.metric_summaries.MAX_GROUPS", 2)
    report_names(master, 30)
    path, names, cursor = "/experiments/1/metric-names", [], None
    while not names or cursor is not None:
        params = {"limit": 7} | ({"cursor": cursor} if cursor else {})
        page = master.http.get(path, params=params).json()
        assert len(page["items"]) <= 7
        names += [(one["group"], one["name"]) for one in page["items"]]
        cursor = page["next_cursor"]
    assert names == sorted(set(names))
    assert len(names) == 62
    with Client(master.url.removesuffix("/api/v1"), master.home.token) as client:
        trial = client.get_trial(1)
        assert set(trial.data.summary) == {"training", "validation"}
        assert {row.group for row in trial.iter_metrics()} == {"training", "validation", "zzz"}
