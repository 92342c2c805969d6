"""Encodings of trials that are kept are never out of date."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    LISTED_TRIAL_COLUMNS,
    EncodingCache,
    encode_trials,
    trial_view,
)
from paceline._cluster.master.store.database import Database

# What each column of a trial may change to, and what the list tells of it then.
_CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"experiment_id": 2}, {"experiment_id": 2, "experiment_state": "PAUSED"}),
    ({"request_id": "other"}, {"request_id": "other"}),
    ({"state": "COMPLETED"}, {"state": "COMPLETED", "shown_state": "COMPLETED"}),
    ({"seed": 7}, {"seed": 7}),
    ({"restarts": 1}, {"restarts": 1}),
    ({"retries": 2}, {"retries": 2}),
    ({"num_attempts": 3}, {"num_attempts": 3}),
    ({"steps_completed": 2**53 + 1}, {"steps_completed": 2**53 + 1}),
    ({"progress": 0.5}, {"progress": 0.5}),
    ({"status": "busy"}, {"status": "busy"}),
    ({"best_metric": 0.1}, {"best_metric": 0.1}),
    ({"best_step": 4}, {"best_step": 4}),
    ({"created_at": 3.0}, {"created_at": 3.0}),
    ({"ended_at": 4.0}, {"ended_at": 4.0}),
    ({"stop_reason": "search"}, {"stop_reason": "search"}),
    ({"error": "It failed."}, {"error": "It failed."}),
    ({"error_kind": "user"}, {"error_kind": "user"}),
    ({"target_length": 9}, {"target_length": 9}),
    ({"num_records_lost": 2}, {"num_records_lost": 2}),
    ({"hparams": {"lr": 0.30000000000000004}}, {"hparams": {"lr": 0.30000000000000004}}),
    ({"latest_metric": {"$float": "nan"}}, {"latest_metric": {"$float": "nan"}}),
]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "master.sqlite")
    _add(opened, tables.experiments, *[
        {"name": "n", "state": state, "config": {}, "warnings": [], "seed": 0, "created_at": 1.0}
        for state in ("ACTIVE", "PAUSED")
    ])  # fmt: skip
    _add(opened, tables.trials, *[
        {"request_id": name, "hparams": {}, "seed": 0} for name in "ab"
    ])  # fmt: skip
    yield opened
    opened.close()


def _add(database: Database, table: Any, *rows: dict[str, Any]) -> None:
    common = {} if table is tables.experiments else {"experiment_id": 1}
    state = {"state": "ACTIVE", "created_at": 1.0}
    values = [{**common, **state, **row} for row in rows]
    database.write(lambda job: job.connection.execute(insert(table), values)).result()


def _change(database: Database, table: Any, values: dict[str, Any]) -> None:
    statement = update(table).where(table.c.id == 1).values(**values)
    database.write(lambda job: job.connection.execute(statement)).result()


def _told(database: Database, cache: EncodingCache) -> list[dict[str, Any]]:
    with database.read() as connection:
        rows = connection.execute(select(*LISTED_TRIAL_COLUMNS).order_by(tables.trials.c.id)).all()
        return [json.loads(one) for one in encode_trials(connection, rows, cache)]


@pytest.mark.parametrize(("values", "told"), _CHANGES, ids=lambda one: ",".join(one))
def test_a_change_of_a_trial_shows_at_once(
    database: Database, values: dict[str, Any], told: dict[str, Any]
) -> None:
    cache = EncodingCache()
    before, other = _told(database, cache)
    assert _told(database, cache) == [before, other]
    _change(database, tables.trials, values)
    shown = {"shown_state": "PAUSED"} if "experiment_id" in values else {}
    assert _told(database, cache) == [{**before, **told, **shown}, other]


def test_every_listed_column_has_a_change_above() -> None:
    listed = {column.key for column in LISTED_TRIAL_COLUMNS}
    assert {name for values, _ in _CHANGES for name in values} == listed - {"id"}


def test_what_other_tables_tell_of_a_trial_shows_at_once(database: Database) -> None:
    cache = EncodingCache()
    before, other = _told(database, cache)
    assert before["shown_state"] == "QUEUED"
    attempt = {"trial_id": 1, "number": 0, "slots": [], "state": "RUNNING", "started_at": 2.0}
    _add(database, tables.attempts, attempt)
    before |= {"started_at": 2.0, "is_running": True, "shown_state": "RUNNING"}
    assert _told(database, cache) == [before, other]
    _add(database, tables.checkpoints, {
        "uuid": "u", "trial_id": 1, "attempt": 1, "steps_completed": 1, "metadata": {},
        "resources": {}, "size": 10, "storage": "/", "state": "COMPLETED",
    })  # fmt: skip
    before |= {"latest_checkpoint": "u"}
    assert _told(database, cache) == [before, other]
    _change(database, tables.experiments, {"state": "PAUSED"})
    before |= {"experiment_state": "PAUSED", "shown_state": "STOPPING"}
    other |= {"experiment_state": "PAUSED", "shown_state": "PAUSED"}
    assert _told(database, cache) == [before, other]


def test_a_list_tells_of_a_trial_what_it_tells_of_itself(database: Database) -> None:
    for values, _ in _CHANGES[1:]:
        _change(database, tables.trials, values)
    with database.read() as connection:
        row = connection.execute(select(tables.trials).where(tables.trials.c.id == 1)).one()
        alone = trial_view(connection, row)
    assert _told(database, EncodingCache())[0] == json.loads(alone.model_dump_json())


def test_a_number_that_no_key_can_hold_is_encoded_anew_each_time() -> None:
    made = []

    def encode() -> bytes:
        made.append(1)
        return b"{}"

    cache = EncodingCache()
    for content in ({"seed": 2**64}, {"seed": 2**64}, {"seed": 2**63}, {"seed": 2**63}):
        assert cache.encoded(content, encode) == b"{}"
    assert len(made) == 3
