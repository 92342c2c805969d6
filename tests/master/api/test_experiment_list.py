"""The experiment list: filters, columns, order and pages."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline._cluster.master.store.api_models_from_rows import encode_cursor


@pytest.fixture(scope="module")
def master(
    serve_master: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return a master with six experiments, four of which have a metric.

    Experiment n runs with lr = n / 10; the losses of 1 to 4 are 0.3, 0.1, NaN and 0.2.
    """
    served = serve_master(tmp_path_factory.mktemp("list") / "home", num_slots=6)
    losses: list[Any] = [0.3, 0.1, {"$float": "nan"}, 0.2]
    for number in range(1, 7):
        served.create(
            name=f"Run_{number % 2}",
            labels=["odd"] if number % 2 else ["even", 'a "b"'],
            hyperparameters={"model": {"lr": number / 10}},
            searcher={"name": "single", "metric": "loss"},
        )
    served.schedule()
    for attempt_id, loss in enumerate(losses, 1):
        metrics = {"loss": loss, "size": attempt_id}
        served.report(attempt_id, 0, ("validation", 1, metrics), ("validation", 2, {"size": 9}))
    served.http.post("/experiments/6/kill")
    served.attempt(6, "end", reason="killed", code=None, signal=9, time=1.0, detail=None)
    yield served
    served.close()


def ids(master: Any, **query: Any) -> list[int]:
    reply = master.http.get("/experiments", params=query)
    assert reply.status_code == 200, reply.text
    return [one["id"] for one in reply.json()["items"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [6, 5, 4, 3, 2, 1]),
        ({"state": ["CANCELED", "PAUSED"]}, [6]),
        ({"search": "run_1"}, [5, 3, 1]),
        ({"search": "un%"}, []),
        ({"search": "3"}, [3]),
        ({"experiment": [2, 5, 77]}, [5, 2]),
        ({"experiment": [2, 5], "label": "even"}, [2]),
        ({"experiment": 0}, []),
        ({"search": "EVE"}, [6, 4, 2]),
        ({"label": ["even", 'a "b"']}, [6, 4, 2]),
        ({"label": "eve"}, []),
        ({"where": '["last:validation/loss", "<", 0.25]'}, [4, 2]),
        ({"where": '["last:validation/loss", "empty"]'}, [6, 5, 3]),
        ({"where": ['["min:validation/size", ">", 1]', '["hparam:model.lr", "<=", 0.3]']}, [3, 2]),
        ({"where": '["state", "=", "canceled"]'}, [6]),
        ({"where": '["name", "!=", "RUN_0"]'}, [5, 3, 1]),
        ({"archived": "only"}, []),
        ({"sort_by": "hparam:model.lr", "order": "asc"}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_filter_keeps_what_fits(master: Any, query: Any, expected: list[int]) -> None:
    assert ids(master, **query) == expected


@pytest.mark.parametrize("limit", [1, 2, 4, 100])
@pytest.mark.parametrize(
    ("sort_by", "order", "expected"),
    [
        ("best_metric", "asc", [2, 4, 1, 3, 5, 6]),
        ("best_metric", "desc", [1, 4, 2, 6, 5, 3]),
        ("last:validation/loss", "asc", [2, 4, 1, 3, 5, 6]),
        ("max:validation/size", "desc", [4, 3, 2, 1, 6, 5]),
        ("name", "asc", [2, 4, 6, 1, 3, 5]),
        ("name", "desc", [5, 3, 1, 6, 4, 2]),
    ],
)
def test_pages_in_any_order_join_to_the_whole_with_the_unmeasured_last(
    master: Any, sort_by: str, order: str, limit: int, expected: list[int]
) -> None:
    if sort_by.startswith("max:"):
        expected = [4, 3, 2, 1, 6, 5]
    found, cursor, total = [], None, None
    while True:
        query = {"sort_by": sort_by, "order": order, "limit": limit, "cursor": cursor}
        page = master.http.get(
            "/experiments", params={k: v for k, v in query.items() if v is not None}
        ).json()
        found += [one["id"] for one in page["items"]]
        total = page["total"] if cursor is None else total
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert total == 6
    assert found == expected


def test_columns_are_told_as_they_were_reported(master: Any) -> None:
    columns = ["last:validation/loss", "last:validation/size", "min:validation/size",
               "hparam:model.lr", "hparam:none", "last:validation/none"]  # fmt: skip
    page = master.http.get("/experiments", params={"column": columns, "brief": True}).json()
    third = page["items"][3]
    assert third["config"] == {}
    assert third["values"] == {
        "last:validation/loss": {"$float": "nan"}, "last:validation/size": 9,
        "min:validation/size": 3.0, "hparam:model.lr": 0.3, "hparam:none": None,
        "last:validation/none": None,
    }  # fmt: skip
    known = master.http.get("/experiment-columns").json()
    assert known["hparams"] == ["model.lr"]
    assert known["metrics"] == [
        {"group": "validation", "name": "loss", "x_axis": None},
        {"group": "validation", "name": "size", "x_axis": None},
    ]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"sort_by": "colour"}, 422, "A column must be one of id, name"),
        ({"column": "last:loss"}, 422, "but got 'last:loss'"),
        ({"where": "loss < 1"}, 422, "must be a JSON list"),
        ({"where": '["id", "<", [1]]'}, 422, "to a scalar"),
        ({"where": '["id", "contains", 1]'}, 422, "must be one of <, <=,"),
        ({"where": '["name", "<", "a"]'}, 422, "must be one of =, !=, contains"),
        ({"cursor": encode_cursor("name asc", "a", 1)}, 400, "another list"),
        # What SQLite cannot look for is no failure of the database.
        ({"search": "é" * 2000}, 422, "at most 1000 characters"),
        ({"search": "a\0b"}, 422, "no NUL"),
        ({"label": "x" * 2000}, 422, "at most 1000 characters"),
        ({"where": f'["name", "contains", "{"x" * 2000}"]'}, 422, "at most 1000 characters"),
        ({"column": "hparam:a\0"}, 422, "no NUL"),
        ({"sort_by": "hparam:a\0"}, 422, "no NUL"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(
    master: Any, query: Any, status: int, message: str
) -> None:
    reply = master.http.get("/experiments", params=query)
    assert reply.status_code == status
    assert message in reply.json()["detail"]


def test_hyperparameters_are_told_flat_with_their_axes(master: Any) -> None:
    table = master.http.get("/experiments/2/hyperparameters").json()
    assert [row["hparams"] for row in table["rows"]] == [{"model.lr": 0.2}]
    assert [row["metric"] for row in table["rows"]] == [0.1]
    assert table["axes"][0] | {"name": "model.lr", "type": "const"} == table["axes"][0]
    other = master.http.get(
        "/experiments/2/hyperparameters", params={"metric": "validation/size"}
    ).json()
    assert [row["metric"] for row in other["rows"]] == [2.0]
    assert other["metric"] == {"group": "validation", "name": "size", "x_axis": None}


@pytest.mark.parametrize(
    ("condition", "is_listed"),
    [
        (["hparam:lr", "<", 0.01], True),
        (["hparam:lr", ">", 0.4], True),
        (["hparam:lr", "<", 0.001], False),
        (["hparam:kind", "contains", "lo"], True),
        (["hparam:kind", "=", "other"], False),
        (["hparam:lr", "empty"], False),
        (["hparam:none", "empty"], True),
        (["hparam:none", "not empty"], False),
    ],
)
def test_a_filter_on_a_hyperparameter_looks_at_every_trial(
    searched: Any, condition: list[Any], is_listed: bool
) -> None:
    assert ids(searched, where=json.dumps(condition)) == [1] * is_listed


@pytest.fixture(scope="module")
def searched(
    serve_master: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return a master with one search of two trials; the one with the larger rate is better."""
    served = serve_master(tmp_path_factory.mktemp("searched") / "home", num_slots=2)
    served.create(
        name="grid",
        hyperparameters={"lr": {"type": "categorical", "vals": [0.5, 0.005]}, "kind": "slow"},
        searcher={"name": "grid", "metric": "loss"},
    )
    served.schedule()
    trials = served.http.get("/experiments/1/trials?sort_by=id").json()["items"]
    assert sorted(one["hparams"]["lr"] for one in trials) == [0.005, 0.5]
    for attempt_id, trial in enumerate(trials, 1):
        loss = 1 - trial["hparams"]["lr"]
        served.report(attempt_id, 0, ("validation", 1, {"loss": loss}))
    yield served
    served.close()
