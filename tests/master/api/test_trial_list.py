"""The list of an experiment's trials: every order, every page, and what it refuses."""

from typing import Any

import pytest

LOSSES: list[Any] = [0.3, 0.1, {"$float": "nan"}]


@pytest.fixture
def measured(make_master: Any) -> Any:
    """Return a master with three trials: the third has no metric but NaN, the second has most."""
    master = make_master(num_slots=3)
    searcher = {"name": "grid", "metric": "loss"}
    hparams = {
        "size": {"type": "categorical", "vals": [3, 1, 2]},
        "has_bias": {"type": "const", "val": True},
    }
    master.create(searcher=searcher, hyperparameters=hparams)
    master.schedule()
    for attempt, loss in enumerate(LOSSES, 1):
        steps = [0, 7, 9, 8][attempt]
        master.attempt(attempt, "started")
        master.report(attempt, 0, ("validation", steps, {"loss": loss}))
    return master


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [1, 2, 3]),
        ({"order": "desc"}, [3, 2, 1]),
        ({"sort_by": "metric"}, [2, 1, 3]),
        ({"sort_by": "metric", "order": "desc"}, [1, 2, 3]),
        ({"sort_by": "latest", "order": "asc"}, [2, 1, 3]),
        ({"sort_by": "steps", "order": "desc"}, [2, 3, 1]),
        ({"state": ["COMPLETED"]}, []),
    ],
)
def test_pages_join_to_the_whole_in_any_order(
    measured: Any, query: dict[str, Any], expected: list[int], limit: int
) -> None:
    found, cursor = [], None
    while True:
        asked = query | {"limit": limit} | ({"cursor": cursor} if cursor else {})
        page = measured.http.get("/experiments/1/trials", params=asked).json()
        assert page["total"] == (None if cursor else len(expected))
        found += [one["id"] for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == expected


def test_trials_are_sorted_by_hyperparameters(measured: Any) -> None:
    page = measured.http.get("/experiments/1/trials", params={"sort_by": "hparam:size"}).json()
    assert [one["hparams"]["size"] for one in page["items"]] == [1, 2, 3]


def test_a_column_that_is_not_there_is_refused(measured: Any) -> None:
    reply = measured.http.get("/experiments/1/trials", params={"sort_by": "colour"})
    assert reply.status_code == 422
    assert "must be one of id, metric" in reply.json()["detail"]


def test_a_column_of_truth_values_holds_truth_values(measured: Any) -> None:
    query = {
        "column": ["hparam:has_bias", "hparam:size"],
        "where": '["hparam:has_bias", "=", true]',
    }
    (one,) = measured.http.get("/experiments", params=query).json()["items"]
    assert one["values"]["hparam:has_bias"] is True
    assert type(one["values"]["hparam:size"]) is int
