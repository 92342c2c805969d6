"""Counts that triggers keep, beside what a count of the rows says."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, insert, select, update

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_summaries import all_metric_names, metric_names
from paceline._cluster.master.store.row_ids_and_counts import (
    ARCHIVED,
    ATTEMPTS,
    CHECKPOINTS,
    EXPERIMENTS,
    POINTS,
    TRIALS,
    checkpoint_sizes,
    number_by_state,
    numbers_of,
)

_TABLES: dict[str, Any] = {
    TRIALS: tables.trials, ATTEMPTS: tables.attempts, CHECKPOINTS: tables.checkpoints,
}  # fmt: skip
_STATES = ("RUNNING", "COMPLETED", "DELETED")
_KEYS = {EXPERIMENTS: "id", TRIALS: "id", ATTEMPTS: "id", CHECKPOINTS: "uuid"}
_changes = st.lists(
    st.tuples(
        st.sampled_from([EXPERIMENTS, TRIALS, ATTEMPTS, CHECKPOINTS, POINTS]),
        st.sampled_from(["add", "change", "remove"]),
        st.integers(1, 3),
        st.integers(0, 5),
    ),
    max_size=40,
)


def _row(kind: str, number: int, experiment: int, state: str) -> dict[str, Any]:
    known = {"experiment_id": experiment, "state": state, "created_at": 1.0}
    rows: dict[str, dict[str, Any]] = {
        TRIALS: {"request_id": str(number), "hparams": {}, "seed": 0},
        ATTEMPTS: {"trial_id": 1, "number": number + 10, "slots": []},
        CHECKPOINTS: {"uuid": str(number), "trial_id": 1, "attempt": 1, "steps_completed": 1,
                      "metadata": {}, "resources": {}, "size": number * 10, "storage": "/"},
    }  # fmt: skip
    return known | rows[kind]


def _change_points(connection: Connection, action: str, experiment: int, number: int) -> None:
    series = tables.series
    trial = connection.execute(
        select(tables.trials.c.id).where(tables.trials.c.experiment_id == experiment).limit(1)
    ).scalar()
    is_this = (series.c.trial_id == trial) & (series.c.key == f"k{number}")
    known = connection.execute(select(series.c.id).where(is_this)).first()
    if action == "add" and known is None and trial is not None:
        row = {"trial_id": trial, "attempt": 1, "group": "training", "key": f"k{number}",
               "num_points": number, "num_numbers": 0, "first_step": 0, "last_step": 0,
               "kind": "f", "steps": b"", "times": b"", "value_bytes": b""}  # fmt: skip
        connection.execute(insert(series).values(row))
    elif action == "change":
        connection.execute(update(series).where(is_this).values(num_points=number + 7))
    elif action == "remove":
        connection.execute(delete(series).where(is_this))


def _change(connection: Connection, change: tuple[str, str, int, int]) -> None:
    kind, action, experiment, number = change
    state = _STATES[number % 3]
    if kind == POINTS:
        _change_points(connection, action, experiment, number)
        return
    if kind == EXPERIMENTS:
        values = {"state": state, "is_archived": number > 2}
        is_this = tables.experiments.c.id == experiment
        connection.execute(update(tables.experiments).where(is_this).values(values))
        return
    table = _TABLES[kind]
    key = table.c[_KEYS[kind]]
    one = connection.execute(
        select(key).where(table.c.experiment_id == experiment).order_by(key.desc()).limit(1)
    ).scalar()
    if action == "add":
        newest = len(connection.execute(select(key)).all()) + 100 * experiment
        row = _row(kind, newest + number * 1000, experiment, state)
        connection.execute(insert(table).prefix_with("OR IGNORE").values(row))
    elif action == "change":
        values = {"state": state} | ({"size": number} if kind == CHECKPOINTS else {})
        connection.execute(update(table).where(key == one).values(values))
    elif one != 1:
        connection.execute(delete(tables.series).where(tables.series.c.trial_id == one))
        connection.execute(delete(table).where(key == one))


def _check(connection: Connection) -> None:
    for kind, table in _TABLES.items():
        rows = connection.execute(select(table.c.experiment_id, table.c.state)).all()
        assert number_by_state(connection, kind) == Counter(row.state for row in rows)
        for experiment in (1, 2, 3):
            own = Counter(row.state for row in rows if row.experiment_id == experiment)
            assert number_by_state(connection, kind, experiment) == own
    experiments = connection.execute(select(tables.experiments)).all()
    assert number_by_state(connection, EXPERIMENTS) == Counter(row.state for row in experiments)
    archived = Counter(row.state for row in experiments if row.is_archived)
    assert number_by_state(connection, ARCHIVED) == archived
    stored = connection.execute(
        select(tables.checkpoints.c.size).where(
            tables.checkpoints.c.experiment_id == 2, tables.checkpoints.c.state != "DELETED"
        )
    ).scalars()
    sizes = list(stored)
    assert checkpoint_sizes(connection, [2]).get(2, (0, 0)) == (len(sizes), sum(sizes))
    series, trials = tables.series.c, tables.trials.c
    owned = connection.execute(
        select(trials.experiment_id, series.num_points).join(
            tables.trials, trials.id == series.trial_id
        )
    ).all()
    assert numbers_of(connection, POINTS, [0]).get(0, 0) == sum(row[1] for row in owned)
    for experiment in (1, 2, 3):
        points = sum(row.num_points for row in owned if row.experiment_id == experiment)
        assert numbers_of(connection, POINTS, [experiment]).get(experiment, 0) == points


@given(changes=_changes)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_counts_are_those_of_the_rows_whatever_happens(
    database: Database, changes: list[tuple[str, str, int, int]]
) -> None:
    def job(transaction: Any) -> None:
        connection = transaction.connection
        for table in (tables.series, tables.checkpoints, tables.attempts, tables.trials,
                      tables.experiments):  # fmt: skip
            connection.execute(delete(table))
        for experiment in (1, 2, 3):
            row = {"id": experiment, "name": "e", "state": "RUNNING", "config": {}, "warnings": [],
                   "seed": 0, "created_at": 1.0}  # fmt: skip
            connection.execute(insert(tables.experiments).values(row))
        trial = _row(TRIALS, 0, 1, "RUNNING") | {"id": 1}
        connection.execute(insert(tables.trials).values(trial))
        for change in changes:
            _change(connection, change)
        _check(connection)

    database.write(job).result()


def test_names_of_metrics_are_told_without_a_look_at_the_series(
    database: Database, add_trial: Any
) -> None:
    trials = [add_trial(0) for _ in range(2)]

    def job(transaction: Any) -> None:
        connection = transaction.connection
        names = [(0, "training", "b"), (0, "training", "a"), (1, "validation", "a")]
        for trial, group, key in names:
            row = {"trial_id": trials[trial], "attempt": 1, "group": group, "key": key,
                   "num_points": 1, "num_numbers": 0, "first_step": 0, "last_step": 0,
                   "kind": "f", "steps": b"", "times": b"", "value_bytes": b""}  # fmt: skip
            connection.execute(insert(tables.series).values(row))
        everything = [("training", "a"), ("training", "b"), ("validation", "a")]
        assert all_metric_names(connection) == everything
        experiment = connection.execute(
            select(tables.trials.c.experiment_id).where(tables.trials.c.id == trials[0])
        ).scalar_one()
        assert metric_names(connection, experiment) == everything[:2]
        assert metric_names(connection, experiment, limit=1) == everything[:1]
        assert metric_names(connection, experiment, after=everything[0]) == everything[1:2]

    database.write(job).result()
