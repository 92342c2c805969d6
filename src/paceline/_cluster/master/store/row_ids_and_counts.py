"""Rows by their ids, and row counts by state: triggers keep these, so reading one costs nothing."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa

from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.reach import is_restricted
from paceline._cluster.messages.states import (
    AttemptState,
    CheckpointState,
    ExperimentState,
    TrialState,
)

_NAME = "ids"


def many_ids() -> sa.Select[Any]:
    """Return a subquery of ids for `in_`; execute the query with `ids_parameter`."""
    return sa.select(sa.func.json_each(sa.bindparam(_NAME)).table_valued("value").c.value)


def ids_parameter(ids: Iterable[int | str]) -> dict[str, str]:
    """Return the parameter with the ids."""
    return {_NAME: json.dumps([*ids])}


def new_id(connection: sa.Connection, table: sa.Table) -> int:
    """Return the id for a new row; for the writer thread."""
    meta = tables.meta
    kept = connection.execute(sa.select(meta.c.value).where(meta.c.key == _key(table))).scalar()
    newest: int | None = connection.execute(sa.select(sa.func.max(table.c.id))).scalar()
    # Rows restored from records may lie beyond the stored id.
    return max(int(kept or 0), newest or 0) + 1


def keep_ids(connection: sa.Connection, *given: sa.Table) -> None:
    """Remember the highest ids given so far; call this before rows are deleted."""
    raise_ids(connection, dict.fromkeys(given, 0))


def raise_ids(connection: sa.Connection, newest: Mapping[sa.Table, int]) -> None:
    """Remember the given newest ids if higher than the ids of the present rows."""
    meta = tables.meta
    for table, number in newest.items():
        kept = max(number, new_id(connection, table) - 1)
        connection.execute(sa.delete(meta).where(meta.c.key == _key(table)))
        connection.execute(sa.insert(meta).values(key=_key(table), value=str(kept)))


def insert_row(connection: sa.Connection, table: sa.Table, **values: Any) -> int:
    """Insert a row under a new id, and return the id."""
    row_id = new_id(connection, table)
    connection.execute(sa.insert(table).values(id=row_id, **values))
    return row_id


def row_of(connection: sa.Connection, table: sa.Table, row_id: int) -> sa.Row[Any]:
    """Return the row of an id, which must be there."""
    return connection.execute(sa.select(table).where(table.c.id == row_id)).one()


def update_row(connection: sa.Connection, table: sa.Table, row_id: int, **values: Any) -> None:
    """Set columns of the row of an id."""
    connection.execute(sa.update(table).where(table.c.id == row_id).values(**values))


def update_experiment(connection: sa.Connection, experiment_id: int, **values: Any) -> None:
    """Set columns of an experiment."""
    update_row(connection, tables.experiments, experiment_id, **values)


def update_attempt(connection: sa.Connection, attempt_id: int, **values: Any) -> None:
    """Set columns of an attempt; its runner is not notified."""
    update_row(connection, tables.attempts, attempt_id, **values)


def insert_document(
    connection: sa.Connection, kind: str, parent: str, name: str, content: Any, **columns: Any
) -> None:
    """Insert a document that is created now, unless `columns` have other times."""
    now = time.time()
    times = {"created_at": now, "changed_at": now}
    place = {"kind": kind, "parent": parent, "name": name, "content": content}
    connection.execute(sa.insert(tables.documents).values(**times | place | columns))


def _key(table: sa.Table) -> str:
    return f"last_id_of_{table.name}"


_PREFIX = "request "
_KEPT_S = 86_400
_SWEEP_EVERY = 1000


class KeyReusedError(ValueError):
    """Raised when a key comes with another request than the first time."""


def once(connection: sa.Connection, key: str, digest: str, create: Callable[[], int]) -> int:
    """Return the stored result for a request key seen within a day, else call `create`.

    The key is stored in the transaction of the creation, with the digest of its request.

    Raises:
        KeyReusedError: The key was stored with another digest.
    """
    meta = tables.meta
    name = _PREFIX + key
    found = connection.scalar(sa.select(meta.c.value).where(meta.c.key == name))
    if found is not None:
        # Keys of earlier versions have no digest.
        _, created, *digests = found.split()
        if digests not in ([], [digest]):
            raise KeyReusedError(
                f"The key {key.rpartition(' ')[2]!r} must come with the same request each time, but"
                f" belongs to another one, about experiment {created}. Hint: choose another key."
            )
        return int(created)
    created = create()
    now = time.time()
    connection.execute(sa.insert(meta).values(key=name, value=f"{now:020.6f} {created} {digest}"))
    # Cleanup now and then is enough: old keys need no exact expiry.
    if created % _SWEEP_EVERY == 0:
        is_old = meta.c.value < f"{now - _KEPT_S:020.6f}"
        connection.execute(sa.delete(meta).where(meta.c.key.startswith(_PREFIX), is_old))
    return created


EXPERIMENTS = "experiments"
ARCHIVED = "archived"
TRIALS = "trials"
ATTEMPTS = "attempts"
CHECKPOINTS = "checkpoints"
POINTS = "points"
FILES = "run_files"

_ADD = (
    "INSERT INTO counts VALUES ({kind}, {experiment}, {state}, {number}, {size})"
    " ON CONFLICT DO UPDATE SET number = number + excluded.number,"
    " num_bytes = num_bytes + excluded.num_bytes;"
)


def _add_to_row_counts(
    kind: str, row: str, sign: int, *, size: str | None = None, has_states: bool = True
) -> str:
    """Return the SQL statements adding a row of a table to its counts, or subtracting the row."""
    return " ".join(
        _ADD.format(
            kind=f"'{kind}'",
            experiment=experiment,
            state=f"{row}.state" if has_states else "''",
            number=sign,
            size="0" if size is None else f"{sign} * {row}.{size}",
        )
        for experiment in ("0", f"{row}.experiment_id")
    )


def _triggers_of(table: str, *, size: str | None = None, has_states: bool = True) -> list[str]:
    columns = ", ".join(["state"] * has_states + [size or ""] * bool(size))
    added, removed = (
        _add_to_row_counts(table, "NEW", 1, size=size, has_states=has_states),
        _add_to_row_counts(table, "OLD", -1, size=size, has_states=has_states),
    )
    return [
        f"CREATE TRIGGER count_{table}_1 AFTER INSERT ON {table} BEGIN {added} END",
        f"CREATE TRIGGER count_{table}_2 AFTER DELETE ON {table} BEGIN {removed} END",
        f"CREATE TRIGGER count_{table}_3 AFTER UPDATE OF {columns} ON {table}"
        f" BEGIN {removed} {added} END",
    ]


def _experiment_triggers() -> list[str]:
    def add(row: str, sign: int) -> str:
        everyone = _ADD.format(
            kind="'experiments'", experiment=0, state=f"{row}.state", number=sign, size=0
        )
        archived = _ADD.format(
            kind="'archived'",
            experiment=0,
            state=f"{row}.state",
            number=f"{sign} * {row}.is_archived",
            size=0,
        )
        return f"{everyone} {archived}"

    forget = " ".join(
        f"DELETE FROM {table} WHERE experiment_id = OLD.id;"  # noqa: S608
        for table in ("counts", "metric_names")
    )
    return [
        f"CREATE TRIGGER count_experiments_1 AFTER INSERT ON experiments BEGIN {add('NEW', 1)} END",
        "CREATE TRIGGER count_experiments_2 AFTER DELETE ON experiments"
        f" BEGIN {add('OLD', -1)} {forget} END",
        "CREATE TRIGGER count_experiments_3 AFTER UPDATE OF state, is_archived ON experiments"
        f" BEGIN {add('OLD', -1)} {add('NEW', 1)} END",
    ]


def _series_triggers() -> list[str]:
    def add(number: str, row: str) -> str:
        experiment = f"(SELECT experiment_id FROM trials WHERE id = {row}.trial_id)"  # noqa: S608
        return " ".join(
            _ADD.format(kind="'points'", experiment=one, state="''", number=number, size=0)
            for one in ("0", f"coalesce({experiment}, 0)")
        )

    name = (
        "INSERT OR IGNORE INTO metric_names"
        ' SELECT experiment_id, NEW."group", NEW."key" FROM trials WHERE id = NEW.trial_id;'
    )
    return [
        "CREATE TRIGGER count_points_1 AFTER INSERT ON series"
        f" BEGIN {add('NEW.num_points', 'NEW')} {name} END",
        "CREATE TRIGGER count_points_2 AFTER DELETE ON series"
        f" BEGIN {add('-OLD.num_points', 'OLD')} END",
        "CREATE TRIGGER count_points_3 AFTER UPDATE OF num_points ON series"
        f" BEGIN {add('NEW.num_points - OLD.num_points', 'NEW')} END",
    ]


def _audit_triggers() -> list[str]:
    return [
        f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
        " BEGIN SELECT RAISE(ABORT, 'the audit log is only added to'); END"
        for change in ("UPDATE", "DELETE")
    ]


TRIGGERS = (
    *_audit_triggers(),
    *_experiment_triggers(),
    *_triggers_of("trials"),
    *_triggers_of("attempts"),
    *_triggers_of("checkpoints", size="size"),
    *_triggers_of("run_files", size="size", has_states=False),
    *_series_triggers(),
)


@sa.event.listens_for(user_tables.metadata, "after_create")
def _add_triggers(_metadata: sa.MetaData, connection: sa.Connection, **_options: Any) -> None:
    for trigger in TRIGGERS:
        connection.exec_driver_sql(trigger)


def number_by_state(connection: sa.Connection, kind: str, experiment_id: int = 0) -> dict[str, int]:
    """Return how many rows of a kind there are in each state, in an experiment or in all."""
    if experiment_id == 0 and is_restricted(connection):
        found = connection.execute(_visible_numbers(kind)).all()
        return {row.state: row.number for row in found if row.number}
    wanted = {"kind": kind, "experiment": experiment_id}
    return {row.state: row.number for row in connection.execute(_NUMBER_BY_STATE, wanted).all()}


def _visible_numbers(kind: str) -> sa.Select[Any]:
    """Return the query for the numbers of what the connection shows, which no trigger keeps."""
    counts, experiments = tables.counts.c, tables.experiments.c
    if kind not in (EXPERIMENTS, ARCHIVED):
        query = sa.select(counts.state, sa.func.sum(counts.number).label("number"))
        return query.where(counts.kind == kind).group_by(counts.state)
    query = sa.select(experiments.state, sa.func.count().label("number")).group_by(
        experiments.state
    )
    return query.where(experiments.is_archived) if kind == ARCHIVED else query


# Made once, as most requests for lists need it.
_NUMBER_BY_STATE = sa.select(tables.counts.c.state, tables.counts.c.number).where(
    tables.counts.c.kind == sa.bindparam("kind"),
    tables.counts.c.experiment_id == sa.bindparam("experiment"),
    tables.counts.c.number > 0,
)


def numbers_of(connection: sa.Connection, kind: str, ids: Iterable[int]) -> dict[int, int]:
    """Return how many rows of a kind some experiments have."""
    counts = tables.counts.c
    query = sa.select(counts.experiment_id, sa.func.sum(counts.number)).where(
        counts.kind == kind, counts.experiment_id.in_(list(ids))
    )
    found = connection.execute(query.group_by(counts.experiment_id)).all()
    return {row[0]: row[1] for row in found}


def checkpoint_sizes(connection: sa.Connection, ids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return number and bytes of the checkpoints not deleted, by experiment; id 0 means all."""
    counts, wanted = tables.counts.c, list(ids)
    query = sa.select(
        counts.experiment_id, sa.func.sum(counts.number), sa.func.sum(counts.num_bytes)
    ).where(counts.kind == CHECKPOINTS, counts.state != CheckpointState.DELETED.value)
    if wanted == [0] and is_restricted(connection):
        _, number, size = connection.execute(query).one()
        return {0: (number or 0, size or 0)}
    query = query.where(counts.experiment_id.in_(wanted)).group_by(counts.experiment_id)
    return {row[0]: (row[1], row[2]) for row in connection.execute(query).all()}


def file_bytes(connection: sa.Connection, ids: Iterable[int]) -> int:
    """Return the bytes of media and other files of some experiments."""
    counts = tables.counts.c
    query = sa.select(sa.func.coalesce(sa.func.sum(counts.num_bytes), 0)).where(
        counts.kind == FILES, counts.experiment_id.in_(many_ids())
    )
    return int(connection.execute(query, ids_parameter(ids)).scalar_one())


class ExperimentCounts(NamedTuple):
    """Counts of an experiment's rows; deleted checkpoints do not count."""

    num_trials: int
    num_running: int
    num_checkpoints: int
    checkpoint_bytes: int


NO_COUNTS = ExperimentCounts(0, 0, 0, 0)


def experiment_counts(connection: sa.Connection, ids: Iterable[int]) -> dict[int, ExperimentCounts]:
    """Return the counts of some experiments; experiments without any count are left out."""
    found = connection.execute(_COUNTS_OF_EXPERIMENTS, ids_parameter(ids)).all()
    return {row[0]: ExperimentCounts(*row[1:]) for row in found}


def _experiment_counts() -> sa.Select[Any]:
    counts = tables.counts.c

    def total(
        column: sa.ColumnElement[int], *conditions: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        return sa.func.sum(sa.case((sa.and_(*conditions), column), else_=0))

    is_running = (counts.kind == ATTEMPTS, counts.state == AttemptState.RUNNING.value)
    is_stored = (counts.kind == CHECKPOINTS, counts.state != CheckpointState.DELETED.value)
    return (
        sa.select(
            counts.experiment_id,
            total(counts.number, counts.kind == TRIALS),
            total(counts.number, *is_running),
            total(counts.number, *is_stored),
            total(counts.num_bytes, *is_stored),
        )
        .where(
            counts.kind.in_([TRIALS, ATTEMPTS, CHECKPOINTS]),
            counts.experiment_id.in_(many_ids()),
        )
        .group_by(counts.experiment_id)
    )


_COUNTS_OF_EXPERIMENTS = _experiment_counts()


def num_waiting(connection: sa.Connection) -> int:
    """Return the number of trials waiting for slots, computed mostly from kept counts."""
    counts, experiments = tables.counts.c, tables.experiments.c
    is_managed_and_active = (
        experiments.state == ExperimentState.ACTIVE.value,
        experiments.external_id.is_(None),
    )
    active = sa.select(sa.func.coalesce(sa.func.sum(counts.number), 0)).where(
        counts.kind == TRIALS,
        counts.state == TrialState.ACTIVE.value,
        counts.experiment_id.in_(sa.select(experiments.id).where(*is_managed_and_active)),
    )
    attempts, trials = tables.attempts.c, tables.trials.c
    running = (
        sa.select(sa.func.count())
        .select_from(tables.attempts)
        .join(tables.trials, trials.id == attempts.trial_id)
        .join(tables.experiments, experiments.id == attempts.experiment_id)
        .where(
            attempts.state.in_([AttemptState.PENDING.value, AttemptState.RUNNING.value]),
            trials.state == TrialState.ACTIVE.value,
            *is_managed_and_active,
        )
    )
    found: int = connection.execute(active).scalar_one() - connection.execute(running).scalar_one()
    return max(found, 0)
