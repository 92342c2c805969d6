"""What lists and views read: found by keys of an index, however much lies beside it."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, insert, text

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import encode_cursor

NUM_EXPERIMENTS, NUM_TRIALS = 12, 30
# Each table grows with what is stored; a row of them that is read must be one that is shown.
LARGE = {"experiments", "trials", "attempts", "checkpoints", "series", "chunks", "search_inputs",
         "metric_names", "events", "counts"}  # fmt: skip
ROUTES = [
    "experiments",
    "experiments?archived=only",
    *(
        f"experiments?sort_by={field}&order={order}"
        for field in ("name", "created_at", "ended_at", "best_metric", "progress")
        for order in ("asc", "desc")
    ),
    "experiments/1",
    "experiments/1/loss",
    "experiments/1/metric-names",
    "experiments/1/checkpoints",
    "experiments/1/search",
    "experiments/1/logs",
    "experiments/1/logs?tail=10",
    "experiments/1/hyperparameters",
    "experiments/1/hyperparameters?limit=10",
    *(
        f"experiments/1/trials?sort_by={field}&order={order}"
        for field in ("id", "metric", "steps", "restarts", "created_at", "ended_at")
        for order in ("asc", "desc")
    ),
    "experiments/1/trials?state=COMPLETED",
    "trials/1",
    "trials/1/checkpoints",
    "trials/1/metrics",
    "checkpoints/c1",
    "experiment-columns",
    "master",
    "slots",
]


@pytest.fixture
def stored(master: Any) -> Any:
    """Return a master with experiments that have ended; the first one has trials."""

    def job(transaction: Any) -> None:
        add = transaction.connection.execute
        searcher = {"name": "random", "metric": "loss", "max_trials": NUM_TRIALS}
        config = {"entrypoint": "x", "searcher": searcher, "hyperparameters": {"n": 1}}
        for number in range(1, NUM_EXPERIMENTS + 1):
            add(
                insert(tables.experiments).values(
                    id=number, name=f"e{number % 5}", state="COMPLETED", config=checked(config),
                    warnings=[], seed=0, created_at=float(number % 4), progress=1.0,
                    best_metric=None if number % 3 else float(number % 2), retention_done=True,
                    ended_at=float(number % 7), search_end="COMPLETED",
                )
            )  # fmt: skip
        for number in range(1, NUM_TRIALS + 1):
            known = {"id": number, "experiment_id": 1, "created_at": 1.0}
            add(
                insert(tables.trials).values(
                    **known, request_id=str(number), state="COMPLETED", seed=0,
                    hparams={"n": number},
                    steps_completed=number % 3, num_attempts=1, ended_at=float(number % 5),
                    best_metric=None if number % 4 == 0 else float(number % 6),
                )
            )  # fmt: skip
            add(
                insert(tables.attempts).values(
                    **known, trial_id=number, number=1, state="ENDED", slots=[]
                )
            )
            add(
                insert(tables.checkpoints).values(
                    uuid=f"c{number}", trial_id=number, experiment_id=1, attempt=1, metadata={},
                    steps_completed=number % 3, state="COMPLETED", resources={}, size=1,
                    storage="/nowhere", created_at=1.0, metric=float(number % 6),
                )
            )  # fmt: skip

    def checked(config: dict[str, Any]) -> dict[str, Any]:
        from paceline.config import validate_config

        return validate_config(config).to_json()

    master.core.database.write(job).result()
    return master


def pages(master: Any, path: str, limit: int, between: Any = None) -> Iterator[list[Any]]:
    """Yield pages of a list; `between` is called after each."""
    cursor = None
    while True:
        asked = {"limit": limit} | ({} if cursor is None else {"cursor": cursor})
        url = master.http.build_request("GET", f"/{path}").url.copy_merge_params(asked)
        page = master.http.get(url).json()
        yield [item.get("id") or item["uuid"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return
        if between is not None:
            between()


def test_no_list_reads_a_table_as_a_whole_or_sorts_one(stored: Any) -> None:
    engine = stored.core.database._reader._engine
    asked: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        for route in ROUTES:
            asked.clear()
            reply = stored.http.get(f"/{route}")
            assert reply.status_code == 200, (route, reply.text)
            if "items" in reply.json() and reply.json()["next_cursor"] is None:
                cursor = next_cursor(stored, route)
                assert cursor is None or stored.http.get(cursor).status_code == 200
            for statement, parameters in list(asked):
                problems = list(costs(engine, statement, parameters))
                assert not problems, (route, problems, statement)
    finally:
        event.remove(engine, "before_cursor_execute", note)


def next_cursor(stored: Any, route: str) -> Any:
    url = stored.http.build_request("GET", f"/{route}").url
    cursor = stored.http.get(url.copy_merge_params({"limit": 2})).json()["next_cursor"]
    return None if cursor is None else url.copy_merge_params({"limit": 2, "cursor": cursor})


def costs(engine: Any, statement: str, parameters: Any) -> Iterator[str]:
    """Yield the steps of a query that cost more the more is stored."""
    with engine.connect() as connection:
        driver = connection.connection.dbapi_connection
        plan = [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    one_of_each = "LIMIT" in statement and "metric_names" in statement
    newest_spaces = "$.hyperparameters" in str(parameters)
    few = any(table in statement for table in ("time_marks", "FROM series", "attempts.state IN"))
    for step in plan:
        words = step.split()
        if words[0] == "SCAN" and words[1] in LARGE and not (one_of_each or newest_spaces):
            yield step
        # A part of the order is sorted among rows that share what comes before.
        if step == "USE TEMP B-TREE FOR ORDER BY" and not few:
            yield step


def test_pages_join_to_the_whole_and_take_no_other_cursor(stored: Any) -> None:
    for path in (
        *(f"experiments?sort_by={name}&order=asc" for name in ("best_metric", "name", "ended_at")),
        "experiments?sort_by=best_metric&order=desc",
        "experiments/1/trials?sort_by=metric&order=asc",
        "experiments/1/trials?sort_by=steps&order=desc",
        "experiments/1/trials?sort_by=hparam:n&order=desc",
        "experiments/1/checkpoints?sort_by=steps",
        "experiments/1/checkpoints?sort_by=metric",
    ):
        check_pages(stored, path)


def check_pages(stored: Any, path: str) -> None:
    [whole] = pages(stored, path, 1000)
    is_of_trials = path.startswith("experiments/")
    assert len(whole) == len(set(whole)) == (NUM_TRIALS if is_of_trials else NUM_EXPERIMENTS), path
    for limit in (1, 5, len(whole)):
        assert [one for page in pages(stored, path, limit) for one in page] == whole, path
    url = stored.http.build_request("GET", f"/{path}").url
    other = url.copy_merge_params({"cursor": encode_cursor("another order", 1, 2)})
    number = url.copy_merge_params({"cursor": encode_cursor(4)})
    for cursor in (other, number, url.copy_merge_params({"cursor": encode_cursor("a", 2**70, 1)})):
        assert stored.http.get(cursor).status_code == 400


def test_rows_that_come_and_change_between_two_pages_repeat_none(stored: Any) -> None:
    def change() -> None:
        stored.core.database.write(
            lambda t: t.connection.execute(
                text("UPDATE trials SET best_metric = -1 WHERE id = (SELECT max(id) FROM trials)")
            )
        ).result()

    path = "experiments/1/trials?sort_by=metric&order=asc"
    found = [one for page in pages(stored, path, 4, change) for one in page]
    # By numbers of rows, the row that moves to the front would push others on to the next page.
    assert len(found) == len(set(found))
    assert set(range(1, NUM_TRIALS)) <= set(found)


def test_a_part_of_many_trials_is_told_as_such(stored: Any) -> None:
    read = stored.http.get
    table = read("/experiments/1/hyperparameters").json()
    assert (len(table["rows"]), table["num_trials"], table["is_sampled"]) == (30, 30, False)
    assert [axis["is_varied"] for axis in table["axes"]] == [True]
    part = read("/experiments/1/hyperparameters", params={"limit": 10}).json()
    assert (part["num_trials"], part["is_sampled"]) == (NUM_TRIALS, True)
    ids = [row["trial_id"] for row in part["rows"]]
    assert ids == sorted(set(ids))
    assert len(ids) <= 10
    ranked = read("/experiments/1/trials", params={"sort_by": "metric", "limit": 5}).json()
    best = {trial["id"] for trial in ranked["items"]}
    assert best < set(ids)
    assert part == read("/experiments/1/hyperparameters", params={"limit": 10}).json()


def halving(master: Any, look_after: int = 0) -> None:
    """Run a halving search of nine trials to its end; look at its rungs after some of them."""
    searcher = {"name": "adaptive_asha", "metric": "loss", "max_trials": 9, "max_time": 4,
                "time_metric": "batches", "divisor": 2, "mode": "aggressive",
                "max_concurrent_trials": 1, "sampler": "random"}  # fmt: skip
    master.create(searcher=searcher)
    for attempt in range(1, 10):
        master.schedule()
        master.attempt(attempt, "started")
        for number, step in enumerate((1, 2, 4)):
            master.report(attempt, number, ("validation", step, {"loss": attempt % 4 + 1 / step}))
        end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0, "detail": ""}
        reply = master.attempt(attempt, "end", **end)
        assert reply.status_code == 204, reply.text
        if attempt == look_after:
            assert master.http.get("/experiments/1/search").status_code == 200


def test_a_view_that_was_made_during_a_search_does_not_outlive_it(
    make_master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline._cluster.master.searches import stored_searches as _stored_search_views

    # As on a machine on which it takes long to make one.
    monkeypatch.setattr(_stored_search_views, "_REST", 1e9)
    looked, other = make_master(num_slots=1), make_master(num_slots=1, name="other")
    halving(looked, look_after=4)
    halving(other)
    found, expected = (one.http.get("/experiments/1/search").json() for one in (looked, other))
    decisions = [
        [rung["num_by_decision"] for bracket in view["brackets"] for rung in bracket]
        for view in (found, expected)
    ]
    assert decisions[0] == decisions[1]


def test_rungs_are_those_of_the_search_and_its_inputs_are_not_applied_again(
    make_master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline._cluster.master.searches import stored_searches as _stored_search_views
    from paceline._cluster.master.searches.stored_searches import load_search

    master = make_master(num_slots=1)
    halving(master)
    assert master.http.get("/experiments/1").json()["state"] == "COMPLETED"
    with master.core.database.read() as connection:
        loaded = load_search(connection, 1)
        requests = {
            row.request_id: row.id
            for row in connection.execute(text("SELECT request_id, id FROM trials"))
        }
    assert loaded.search is not None
    expected = [
        [
            [(requests[e.request_id], e.metric, e.decision.value) for e in rung.entries]
            for rung in bracket.rungs
        ]
        for bracket in loaded.search.rungs()
    ]

    def view(**query: Any) -> Any:
        return master.http.get("/experiments/1/search", params=query).json()["brackets"]

    def entries(**query: Any) -> Any:
        return [
            [[(e["trial_id"], e["metric"], e["decision"]) for e in rung["entries"]] for rung in one]
            for one in view(**query)
        ]

    assert max(len(rung) for bracket in expected for rung in bracket) > 4
    with monkeypatch.context() as patch:
        patch.setattr(_stored_search_views, "load_search", None)  # stored when the search ended
        assert entries() == expected
        for bracket, whole in zip(entries(limit=3), expected, strict=True):
            for rung, all_of_it in zip(bracket, whole, strict=True):
                assert len(rung) == min(3, len(all_of_it))
                assert [rung[0], rung[-1]] == [all_of_it[0], all_of_it[-1]]
        counted = [[sum(rung["num_by_decision"].values()) for rung in one] for one in view(limit=1)]
        assert counted == [[len(rung) for rung in one] for one in expected]
    # The first look makes it anew.
    master.core.database.write(
        lambda t: t.connection.execute(text("DELETE FROM search_views"))
    ).result()
    assert entries() == expected
    with monkeypatch.context() as patch:
        patch.setattr(_stored_search_views, "load_search", None)
        assert entries() == expected


def test_rungs_of_a_search_that_goes_on_follow_its_inputs(
    make_master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline._cluster.master.searches import stored_searches as _stored_search_views

    monkeypatch.setattr(_stored_search_views, "_REST", 0)
    master = make_master(num_slots=1)
    searcher = {"name": "adaptive_asha", "metric": "loss", "max_trials": 4, "max_time": 4,
                "time_metric": "batches", "max_concurrent_trials": 1,
                "sampler": "random"}  # fmt: skip
    master.create(searcher=searcher)
    master.schedule()
    seen = []
    for number, step in enumerate((1, 4)):
        master.report(1, number, ("validation", step, {"loss": 0.5}))
        brackets = master.http.get("/experiments/1/search").json()["brackets"]
        seen.append([rung["num_by_decision"] for bracket in brackets for rung in bracket])
    assert seen[0] != seen[1]
