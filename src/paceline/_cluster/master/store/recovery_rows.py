"""Rows for the recovery records beside the database, and the triggers for noting changes.

Triggers note the rows whose lasting columns change, whoever changes them. Columns that change often
and follow from the rest, such as progress, are not noted; metrics are, once their attempt has
ended.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.store import tables

if TYPE_CHECKING:
    from paceline._cluster.master.store.database import Database, Transaction

# A new experiment, all rows of one, the end of an attempt, and an experiment that was deleted.
NEW, ALL, ENDED, GONE = "new", "all", "ended", "gone"
RECORDS_BEGUN = "records_begun"

# The columns of each table whose change is noted; a record has the whole row.
LASTING = {
    "experiments": (
        "name", "state", "config", "search_end", "ended_at", "error", "parent_trial_id",
        "description", "labels", "notes", "is_archived", "external_path", "priority", "weight",
        "queue_place", "max_slots", "owner", "project_id",
    ),
    "trials": (
        "state", "hparams", "target_length", "operations_closed", "restarts", "ended_at",
        "stop_reason", "error", "error_kind", "is_waiting",
    ),
    "attempts": ("ended_at", "exit", "outcome"),
    "search_inputs": ("input", "operations"),
    "checkpoints": ("state", "metadata", "resources"),
    "users": (
        "password_hash", "is_admin", "is_active", "member_of", "oidc_issuer", "oidc_subject",
    ),
    "tokens": ("revoked_at",),
}  # fmt: skip
# Recorded whole, with users and tokens: they are few, and their rows are deleted.
OF_CLUSTER = (
    *("nodes", "pools", "drained_slots", "views", "projects", "members"),
    *("quotas", "reservations"),
)
# Recorded with these: of the documents, templates and policies, as experiments would start without.
RULES = "kind IN ('template', 'policy', 'deleted-project')"
# Recorded when their attempt ends.
OF_ATTEMPTS = ("time_marks", "journal_marks", "series", "chunks", "media", "run_files")
# All tables of which rows are recorded; an environment with the first attempt that ends in it.
RECORDED = (*LASTING, *OF_CLUSTER, *OF_ATTEMPTS, "environments", "documents")
# Another one has each home recorded anew: since 2, environments are; since 3, owners and projects.
_RECORDS = "3"

_BYTES, _FLOAT = "$bytes", "$float"
# A chunk of a series has 24 KiB.
_ROWS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """Row of a table with SQLite's values; None as `values` marks a deleted row."""

    table: str
    values: dict[str, Any] | None
    key: Any = None


def watch_rows(connection: sa.Connection) -> None:
    """Create the triggers for noting changed rows, in a new or upgraded database."""
    for table, columns in LASTING.items():
        owner = {"experiments": "NEW.id", "users": "NULL", "tokens": "NULL"}.get(table)
        if table == "trials" or owner is None:
            owner = "NEW.experiment_id"
        note = f"INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES ({owner}, "  # noqa: S608
        names = ", ".join(f'"{column}"' for column in columns)
        first = f"{note} 'new', NEW.rowid); " if table == "experiments" else ""
        ended = ""
        if table == "attempts":
            ended = (
                " INSERT INTO unrecorded (experiment_id, kind, row_id)"
                " SELECT NEW.experiment_id, 'ended', NEW.rowid WHERE NEW.ended_at IS NOT NULL;"
            )
        _make_trigger(connection, f"recorded_new_{table}", f"AFTER INSERT ON {table}",
              f"{first}{note} '{table}', NEW.rowid);{ended}")  # fmt: skip
        _make_trigger(connection, f"recorded_{table}", f"AFTER UPDATE OF {names} ON {table}",
              f"{note} '{table}', NEW.rowid);{ended}")  # fmt: skip
    for table in OF_CLUSTER:
        for change in ("INSERT", "UPDATE", "DELETE"):
            _make_trigger(
                connection, f"recorded_{change.lower()}_{table}", f"AFTER {change} ON {table}",
                "INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0);"
            )  # fmt: skip
    for change, row in (("INSERT", "NEW"), ("DELETE", "OLD")):
        _make_trigger(
            connection, f"recorded_{change.lower()}_rules",
            f"AFTER {change} ON documents WHEN {row}.{RULES}",
            "INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (NULL, 'all', 0);"
        )  # fmt: skip
    _make_trigger(connection, "recorded_gone", "AFTER DELETE ON experiments",
          "INSERT INTO unrecorded (experiment_id, kind, row_id) VALUES (OLD.id, 'gone', OLD.id);"
    )  # fmt: skip


def _make_trigger(connection: sa.Connection, name: str, when: str, then: str) -> None:
    connection.exec_driver_sql(f"CREATE TRIGGER IF NOT EXISTS {name} {when} BEGIN {then} END")


def begin_records(database: "Database") -> None:
    """Note all rows of a database for recording, unless this was done before."""
    with database.read() as connection:
        are_begun = are_records_begun(connection)
    if not are_begun:
        database.write(_note_all).result()


def are_records_begun(connection: sa.Connection) -> bool:
    """Return whether the records are complete; if not, the next master writes them anew."""
    meta = tables.meta.c
    return connection.scalar(sa.select(meta.value).where(meta.key == RECORDS_BEGUN)) == _RECORDS


def forget_recorded(transaction: "Transaction") -> None:
    """Have the next master record all anew."""
    meta = tables.meta
    transaction.connection.execute(sa.delete(meta).where(meta.c.key == RECORDS_BEGUN))
    transaction.connection.execute(sa.delete(tables.unrecorded))


def _note_all(transaction: "Transaction") -> None:
    connection, unrecorded = transaction.connection, tables.unrecorded
    connection.execute(sa.delete(unrecorded))
    ids = sa.select(tables.experiments.c.id).order_by(tables.experiments.c.id)
    columns = ("experiment_id", "kind", "row_id")
    every = ids.add_columns(sa.literal(ALL), tables.experiments.c.id)
    connection.execute(sa.insert(unrecorded).from_select(columns, every))
    note_experiment(connection, None)
    connection.execute(sa.delete(tables.meta).where(tables.meta.c.key == RECORDS_BEGUN))
    connection.execute(sa.insert(tables.meta).values(key=RECORDS_BEGUN, value=_RECORDS))


def note_experiment(connection: sa.Connection, experiment_id: int | None) -> None:
    """Have all rows of an experiment, or of the cluster for None, recorded anew."""
    connection.execute(
        sa.insert(tables.unrecorded).values(
            experiment_id=experiment_id, kind=ALL, row_id=experiment_id or 0
        )
    )


def change_rows(connection: sa.Connection, kind: str, row_id: int) -> Iterator[RecordedRow]:
    """Yield the current rows for a noted change."""
    if kind == ALL and row_id == 0:
        for table in ("users", "tokens", *OF_CLUSTER):
            yield from _select_recovery_rows(connection, table, "true")
        yield from _select_recovery_rows(connection, "documents", RULES)
    elif kind == ALL:
        yield from experiment_rows(connection, row_id)
    elif kind == ENDED:
        yield from _attempt_rows(connection, row_id)


def lasting_rows(connection: sa.Connection, table: str, ids: list[int]) -> Iterator[RecordedRow]:
    """Yield the current rows of a table with lasting columns, in order of their ids."""
    wanted = "rowid IN (SELECT value FROM json_each(?)) ORDER BY rowid"
    yield from _select_recovery_rows(connection, table, wanted, json.dumps(ids))


def experiment_rows(connection: sa.Connection, experiment_id: int) -> Iterator[RecordedRow]:
    """Yield all recorded rows of an experiment, referenced rows before referring rows."""
    yield from _select_recovery_rows(connection, "experiments", "id = ?", experiment_id)
    for table in ("trials", "attempts", "search_inputs", "checkpoints"):
        yield from _select_recovery_rows(connection, table, "experiment_id = ?", experiment_id)
    for (attempt_id,) in connection.exec_driver_sql(
        "SELECT id FROM attempts WHERE experiment_id = ? AND ended_at IS NOT NULL ORDER BY id",
        (experiment_id,),
    ).all():
        yield from _attempt_rows(connection, attempt_id)


def marks_of_running(connection: sa.Connection, experiment_id: int) -> Iterator[RecordedRow]:
    """Yield how far the journals of running attempts are stored."""
    yield from _select_recovery_rows(
        connection,
        "journal_marks",
        "attempt_id IN (SELECT id FROM attempts WHERE experiment_id = ? AND ended_at IS NULL)",
        experiment_id,
    )


def _attempt_rows(connection: sa.Connection, attempt_id: int) -> Iterator[RecordedRow]:
    found = connection.exec_driver_sql(
        "SELECT trial_id, number FROM attempts WHERE id = ?", (attempt_id,)
    ).first()
    if found is None:
        return
    trial_id, number = found
    # Trial row in addition: its counters are not among the lasting columns.
    yield from _select_recovery_rows(connection, "trials", "id = ?", trial_id)
    for table in ("time_marks", "journal_marks"):
        yield from _select_recovery_rows(connection, table, "attempt_id = ?", attempt_id)
    yield from _select_recovery_rows(connection, "checkpoints", "trial_id = ?", trial_id)
    # A later attempt changes the summaries of the earlier ones.
    yield from _select_recovery_rows(
        connection, "series", "trial_id = ? AND attempt <= ?", trial_id, number
    )
    chunks = "series_id IN (SELECT id FROM series WHERE trial_id = ? AND attempt = ?)"
    yield from _select_recovery_rows(connection, "chunks", chunks, trial_id, number)
    yield from _select_recovery_rows(
        connection, "media", "trial_id = ? AND attempt = ?", trial_id, number
    )
    yield from _select_recovery_rows(connection, "run_files", "trial_id = ?", trial_id)
    # Attempts of an experiment have equal ones. The + has SQLite look for them in their order.
    first = (
        "digest IN (SELECT environment FROM attempts AS own WHERE id = ? AND NOT EXISTS"
        " (SELECT 1 FROM attempts AS other WHERE other.experiment_id = own.experiment_id"
        " AND +other.environment = own.environment AND other.ended_at IS NOT NULL"
        " AND (other.ended_at, other.id) < (own.ended_at, own.id)))"
    )
    yield from _select_recovery_rows(connection, "environments", first, attempt_id)


def _select_recovery_rows(
    connection: sa.Connection, table: str, condition: str, *parameters: Any
) -> Iterator[RecordedRow]:
    found = connection.execution_options(yield_per=_ROWS_AT_ONCE).exec_driver_sql(
        f"SELECT * FROM {table} WHERE {condition}",  # noqa: S608 # no text of a user
        parameters,
    )
    names = [*found.keys()]
    for row in found:
        yield RecordedRow(table, dict(zip(names, row, strict=True)))


def encode_row(row: RecordedRow) -> bytes:
    """Return a row as JSON."""
    assert row.values is not None
    values = {name: _plain(value) for name, value in row.values.items()}
    return msgspec.json.encode({"table": row.table, "row": values})


def decode_row(data: bytes) -> RecordedRow:
    """Return the row decoded from JSON.

    Raises:
        msgspec.DecodeError: It is no such row.
    """
    found = msgspec.json.decode(data, type=dict[str, Any])
    table, values = found.get("table"), found.get("row")
    if not isinstance(values, Mapping) or table not in RECORDED:
        raise msgspec.DecodeError("it holds no row")
    return RecordedRow(str(table), {name: _real(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    return value


def _real(value: Any) -> Any:
    if isinstance(value, Mapping):
        return float(value[_FLOAT]) if _FLOAT in value else base64.b64decode(value[_BYTES])
    return value


def primary_key(table: str) -> Sequence[str]:
    """Return the names of the primary key columns of a recorded table."""
    return {
        "search_inputs": ("experiment_id", "number"),
        "checkpoints": ("uuid",),
        "environments": ("digest",),
        "users": ("name",),
        "documents": ("kind", "parent", "name"),
        "pools": ("name",),
        "members": ("project_id", "user"),
        "drained_slots": ("node_id", "slot"),
        "quotas": ("user", "project_id"),
        "time_marks": ("attempt_id", "generation", "number"),
        "journal_marks": ("attempt_id", "generation", "rank"),
        "run_files": ("trial_id", "path"),
    }.get(table, ("id",))
