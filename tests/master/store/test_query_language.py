"""The query language of people, through the lists that take it."""

import itertools
import time
from typing import Any

import pytest
from sqlalchemy import update

from paceline._cluster.master.store import tables
from paceline._cluster.messages.states import STOPPED_BY_SEARCH


@pytest.fixture
def filled(master: Any) -> Any:
    """Return a master with trials 1 and 2 of rates 0.1 and 0.2, and trial 3, a baseline."""
    searcher = {"name": "grid", "metric": "loss"}
    space = {
        "lr": {"type": "categorical", "vals": [0.1, 0.2]},
        "net": {"depth": 3, "kind": "ResNet", "has_bias": True},
        "kind of noise": "0.15",
    }
    body = {"entrypoint": "x", "searcher": searcher, "hyperparameters": space, "name": "sweep"}
    assert master.http.post("/experiments", json={"config": body}).status_code == 201
    master.create(
        name="big model", labels=["baseline", "über"],
        searcher={"name": "single", "metric": "loss"},
        hyperparameters={"lr": 0.001, "later": "x"},
        environment={"variables": {"PASSWORD": "hush"}},
    )  # fmt: skip
    master.schedule()
    rates = {one["id"]: one["hparams"]["lr"] for one in trials(master)["items"]}
    for trial in (1, 2):
        reports = [
            ("validation", 1, {"loss": rates[trial], "val_acc": 1 - rates[trial]}),
            ("training", 1, {"loss": 7.0}),
        ]
        if rates[trial] == 0.1:
            reports.append(("validation", 2, {"val_acc": {"$float": "nan"}}))
        master.report(trial, 0, *reports)
    now = time.time()
    trial = tables.trials
    moments = update(trial).where(trial.c.id == 3).values(
        state="ERROR", created_at=now - 10 * 86400, ended_at=now - 86400
    )  # fmt: skip
    master.core.database.write(lambda job: job.connection.execute(moments)).result()
    return master


def trials(master: Any, query: str | None = None) -> Any:
    params = {} if query is None else {"query": query}
    reply = master.http.get("/trials", params=params)
    assert reply.status_code == 200, reply.text
    return reply.json()


FOUND: list[tuple[str, list[float]]] = [
    ("lr < 0.15", [0.001, 0.1]),
    ("lr<0.15 and lr>0.01", [0.1]),
    ("lr < 0.15 lr > 0.01", [0.1]),
    ("lr = 0.1 or lr == 0.2 and not val_acc > 0", [0.1]),
    ("(lr = 0.1 or lr = 0.2) and val_acc > 0", [0.2]),
    ("val_acc > 0.5", [0.2]),
    ("max:val_acc > 0.85", [0.1]),
    ("validation/loss < 0.15", [0.1]),
    ("last:training/loss = 7", [0.1, 0.2]),
    ("not lr = 0.1", [0.001, 0.2]),
    ("lr != 0.1", [0.001, 0.2]),
    ("not not lr = 0.1", [0.1]),
    ("tag:baseline", [0.001]),
    ("label = ÜBER or tag:über", [0.001]),
    ("tag:base", []),
    ("not tag:baseline", [0.1, 0.2]),
    ("tag = none", [0.1, 0.2]),
    ("state:error", [0.001]),
    ("not state:ERROR", [0.1, 0.2]),
    ("state:running", [0.1, 0.2]),
    ("state != RUNNING", [0.001]),
    ("state:QUEUED", []),
    ("state:STOPPED", []),
    ("state != STOPPED", [0.001, 0.1, 0.2]),
    ("ended > -7d", [0.001]),
    ("ended = none", [0.1, 0.2]),
    ("created < -7d and ended < -1h", [0.001]),
    ("created > 2020-01-01T00:00+01:00 and created > -1w", [0.1, 0.2]),
    ("net.depth = 3 and net.kind:resn", [0.1, 0.2]),
    ("net.kind = resnet and net.has_bias = true", [0.1, 0.2]),
    ("net.has_bias = 1", []),
    ("net.has_bias != true", []),
    ('"kind of noise" = 0.15', []),
    ('hparam:"kind of noise" = "0.15"', [0.1, 0.2]),
    ('"kind of noise" < 0.2 or "kind of noise" > 0', []),
    ("hparam:later = none", [0.1, 0.2]),
    ("later != none", [0.001]),
    ("searcher:grid", [0.1, 0.2]),
    ("config:searcher.name = single", [0.001]),
    ("resources.slots_per_trial = 1", [0.001, 0.1, 0.2]),
    ("owner = admin and project:default", [0.001, 0.1, 0.2]),
    ("big model", [0.001]),
    ('"g mod"', [0.001]),
    ("sweep and lr > 0.15", [0.2]),
    ("experiment = 2", [0.001]),
    ('settings:"kind of noise" and settings:slots_per_trial', [0.1, 0.2]),
    ("settings:hush", []),
    ("name:swe and name != big", [0.1, 0.2]),
    ("description = none and error = none", [0.001, 0.1, 0.2]),
    ("NOT (lr = 0.1 OR lr = 0.2)", [0.001]),
    ("  ", [0.001, 0.1, 0.2]),
]
REFUSED = [
    ("colour = 3", "A field must be one of created, ended, trial"),
    ("lr < 1 and colour = 3", "(At character 12.)"),
    ("lr < blue", "`lr` must be compared to a number, but got 'blue'"),
    ("lr < 1e999", "`lr` must be compared to a number"),
    ("val_acc = good", "`val_acc` must be compared to a number"),
    ("loss < 1", "may be training/loss or validation/loss"),
    ("min:nothing < 1", "must be one that a trial has reported, but got 'nothing'"),
    ("state:DONE", "`state` must be one of ACTIVE, RUNNING"),
    ("state > ERROR", "`state` must be compared by : or = or !=, but got '>'"),
    ("ended > yesterday", "an age such as -7d"),
    ("ended > -9999999d", "an age such as -7d"),
    ("name < 3", "`name` must be compared by : or = or !="),
    ("lr <", "have a value after `lr <`, but got the end at character 5"),
    ("lr < 1 and", "have a field or a text here, but got the end"),
    ("or lr < 1", "have a field or a text here, but got 'or lr < 1' at character 1"),
    ("(lr < 1", "close each parenthesis, but got the end"),
    ("lr < 1)", "end or go on with `and` or `or`, but got ')'"),
    ("lr < 1 < 2", "end or go on with `and` or `or`, but got '< 2'"),
    ('"lr', "have a field or a text here"),
    ("(" * 500 + "lr < 1" + ")" * 500, "nested at most 50 deep"),
    ("not " * 400 + "lr < 1", "nested at most 50 deep"),
    ("(" * 10_000, "at most 2000 characters, but has 10000"),
    ("config:environment.variables.PASSWORD:h", "must not hold variables or secrets"),
    ('config:environ"ment.vari"ables.PASSWORD:h', "A field must be one of"),
    ("config:'environ\"ment.variables.PASSWORD':h", "must not hold variables or secrets"),
]


def test_a_query_looks_at_every_trial(filled: Any) -> None:
    for query, rates in FOUND:
        found = trials(filled, query)
        assert sorted(one["hparams"]["lr"] for one in found["items"]) == rates, query
        assert found["total"] == len(rates)


def test_trials_that_the_search_stopped_are_found_by_the_word_of_the_tables(filled: Any) -> None:
    trial = tables.trials
    stopped = update(trial).where(trial.c.id == 1).values(
        state="COMPLETED", stop_reason=STOPPED_BY_SEARCH
    )  # fmt: skip
    filled.core.database.write(lambda job: job.connection.execute(stopped)).result()
    [found] = trials(filled, "state:STOPPED")["items"]
    assert (found["id"], found["shown_state"]) == (1, "STOPPED")
    assert {one["id"] for one in trials(filled, "state != STOPPED")["items"]} == {2, 3}


def test_a_query_with_an_error_is_refused_in_one_sentence(filled: Any) -> None:
    for path, (query, told) in itertools.product(("/trials", "/experiments"), REFUSED):
        reply = filled.http.get(path, params={"query": query})
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_query"), reply.text
        assert told in reply.json()["detail"]


def test_an_experiment_fits_if_one_of_its_trials_does(filled: Any) -> None:
    def listed(query: str, **params: Any) -> tuple[list[int], int]:
        reply = filled.http.get("/experiments", params={"query": query, **params})
        assert reply.status_code == 200, reply.text
        return [one["id"] for one in reply.json()["items"]], reply.json()["total"]

    for query, ids in (
        ("lr > 0.15", [1]), ("lr < 0.15", [2, 1]), ("not state:ERROR", [1]), ("tag:baseline", [2]),
        ("val_acc > 0.5 and lr = 0.1", []), ("name:big or lr = 0.2", [2, 1]),
    ):  # fmt: skip
        assert listed(query) == (ids, len(ids))
    assert listed("lr > 0", limit=1) == ([2], 2)
    assert listed("lr > 0", limit=1, sort_by="hparam:lr", where='["num_trials", ">", 1]')[0] == [1]
    gone = tables.trials.delete().where(tables.trials.c.id == 3)
    filled.core.database.write(lambda job: job.connection.execute(gone)).result()
    # One without trials stands for itself.
    assert listed("name:big and created > -1h and state:active") == ([2], 1)


def test_a_query_is_completed_by_fields_and_their_values(filled: Any) -> None:
    def completed(query: str) -> tuple[int, list[str]]:
        reply = filled.http.get("/query-completions", params={"query": query})
        assert reply.status_code == 200, reply.text
        return reply.json()["place"], reply.json()["texts"]

    assert completed("lr > 1 and (net.") == (12, ["net.depth", "net.has_bias", "net.kind"])
    assert completed("val")[1] == ["val_acc"]
    assert completed("nois") == (0, ['"kind of noise"'])
    found = completed("state:e")
    assert (found[0], found[1][0], "STOPPED" in found[1]) == (6, "ERROR", True)
    assert completed("tag:") == (4, ["baseline", "über"])
    assert completed("name:") == (5, ['"big model"', "sweep"])
    assert completed("net.kind = Res") == (11, ["ResNet"])
    assert completed("net.has_bias = ") == (15, ["true"])
    assert sorted(completed("lr = 0")[1]) == ["0.001", "0.1", "0.2"]
    assert completed("owner:")[1] == ["admin"]
    assert completed("best > ") == (7, [])
    assert completed("lr > 1 a")[1][:1] == ["and"]
    assert completed("( " * 3000)[0] == 2000
