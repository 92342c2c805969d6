"""Encodings of experiments that are kept: never out of date, and within their bytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update

from paceline._cluster.master.store import api_models_from_rows, tables, user_tables
from paceline._cluster.master.store.api_models_from_rows import EncodingCache
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.experiment_list import (
    ExperimentQuery,
    encode_experiments,
    list_rows,
)

_CONFIG = {
    "searcher": {"name": "random", "metric": "loss", "smaller_is_better": True},
    "environment": {"variables": {"API_TOKEN": "secret"}},
}
# What each column of an experiment may change to, and what the list tells of it then.
_CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "other"}, {"name": "other"}),
    ({"description": "other"}, {"description": "other"}),
    ({"state": "COMPLETED"}, {"state": "COMPLETED", "shown_state": "COMPLETED"}),
    ({"progress": 0.5}, {"progress": 0.5}),
    ({"created_at": 3.0}, {"created_at": 3.0}),
    ({"ended_at": 4.0}, {"ended_at": 4.0}),
    ({"error": "It failed."}, {"error": "It failed."}),
    ({"best_trial_id": 7}, {"best_trial_id": 7}),
    ({"best_metric": 0.25}, {"best_metric": 0.25}),
    ({"parent_trial_id": 8}, {"parent_trial_id": 8}),
    ({"forked_from": 9}, {"forked_from": 9}),
    ({"is_archived": True}, {"is_archived": True}),
    ({"external_id": "run"}, {"is_unmanaged": True}),
    ({"external_path": "/run"}, {"run_dir": "/run"}),
    ({"context_digest": "d"}, {"has_code": True}),
    ({"num_records_lost": 2}, {"num_records_lost": 2}),
    ({"search_end": "unmeasured"}, {"is_unmeasured": True}),
    ({"labels": ["a"]}, {"labels": ["a"]}),
    ({"owner": "eve"}, {"owner": "eve"}),
    ({"project_id": 2}, {"project": "lab"}),
    ({"warnings": ["Look."]}, {"warnings": ["Look."]}),
    (
        {"config": {**_CONFIG, "searcher": {**_CONFIG["searcher"], "metric": "accuracy"}}},
        {"metric": "accuracy"},
    ),
]


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "master.sqlite")

    def add(transaction: Any) -> None:
        row = {"name": "n", "state": "ACTIVE", "config": _CONFIG, "warnings": [], "seed": 0,
               "created_at": 1.0, "ended_at": 2.0}  # fmt: skip
        transaction.connection.execute(insert(tables.experiments), [row, row])
        lab = {"id": 2, "name": "lab", "created_at": 1.0}
        transaction.connection.execute(insert(user_tables.projects).values(lab))

    database.write(add).result()
    yield database
    database.close()


def _told(database: Database, cache: EncodingCache, **options: Any) -> list[dict[str, Any]]:
    with database.read() as connection:
        rows = list_rows(connection, ExperimentQuery(**options), limit=10)
        encoded = encode_experiments(connection, rows, cache, is_brief=True)
        return [json.loads(one) for one in encoded]


def _change(database: Database, values: dict[str, Any]) -> None:
    experiments = tables.experiments
    statement = update(experiments).where(experiments.c.id == 1).values(**values)
    database.write(lambda transaction: transaction.connection.execute(statement)).result()


@pytest.mark.parametrize(("values", "told"), _CHANGES, ids=lambda one: ",".join(one))
def test_a_change_shows_at_once(
    listed: Database, values: dict[str, Any], told: dict[str, Any]
) -> None:
    cache = EncodingCache()
    other, before = _told(listed, cache)
    assert _told(listed, cache) == [other, before]
    _change(listed, values)
    assert _told(listed, cache) == [other, {**before, **told}]
    assert _told(listed, EncodingCache()) == [other, {**before, **told}]


def test_every_listed_column_has_a_change_above(listed: Database) -> None:
    with listed.read() as connection:
        (row, *_) = list_rows(connection, ExperimentQuery(), limit=10)
    changed = {name.removesuffix("_id") for values, _ in _CHANGES for name in values}
    fields = {name.removesuffix("_id") for name in row.experiment._fields}
    assert changed == fields - {"id"}


def test_what_is_counted_of_an_experiment_shows_at_once(listed: Database) -> None:
    cache = EncodingCache()
    other, before = _told(listed, cache)
    added: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (tables.trials, {"id": 1, "request_id": "r", "hparams": {}, "seed": 0}, {"num_trials": 1}),
        (
            tables.attempts,
            {"trial_id": 1, "number": 0, "slots": []},
            {"num_running": 1, "shown_state": "RUNNING"},
        ),
        (
            tables.checkpoints,
            {"uuid": "u", "trial_id": 1, "attempt": 1, "steps_completed": 1, "metadata": {},
             "resources": {}, "size": 10, "storage": "/"},
            {"num_checkpoints": 1, "checkpoint_bytes": 10},
        ),
    ]  # fmt: skip
    for table, row, told in added:
        statement = insert(table).values(experiment_id=1, state="RUNNING", created_at=1.0, **row)
        listed.write(lambda changes, job=statement: changes.connection.execute(job)).result()
        before |= told
        assert _told(listed, cache) == [other, before]


def test_the_values_of_columns_show_at_once(listed: Database) -> None:
    cache = EncodingCache()
    assert [one["values"] for one in _told(listed, cache, columns=["best_metric"])] == [
        {"best_metric": None}
    ] * 2
    _change(listed, {"best_metric": 0.5})
    assert _told(listed, cache, columns=["best_metric"])[1]["values"] == {"best_metric": 0.5}


def test_a_brief_list_has_no_configuration_and_another_one_no_secret(listed: Database) -> None:
    cache = EncodingCache()
    with listed.read() as connection:
        rows = list_rows(connection, ExperimentQuery(), limit=1)
        for is_brief in (True, False, True):
            (one,) = encode_experiments(connection, rows, cache, is_brief=is_brief)
            config = json.loads(one)["config"]
            assert (config == {}) is is_brief
            assert "secret" not in str(config)


def test_what_is_kept_stays_within_its_bytes(
    listed: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_models_from_rows, "_LIMIT_BYTES", 20_000)
    cache = EncodingCache()
    for number in range(50):
        _change(listed, {"description": str(number) * 500})
        assert _told(listed, cache)[1]["description"] == str(number) * 500
        kept = sum(map(len, cache._kept.values()))
        assert kept < 20_000
    assert len(cache._kept) > 1
