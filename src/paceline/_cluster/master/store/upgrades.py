"""Bringing a database of an earlier version up to date.

Each step says what one version added to the one before, written out: a later change of the tables
must not change what an earlier step does.
"""

from pathlib import Path

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from paceline._base.files import sync_directory
from paceline._cluster.master.store.database import copy_of_version
from paceline._cluster.master.store.database_reading import copy_database
from paceline._cluster.master.store.row_ids_and_counts import FIRST_COUNTS, TRIGGERS


def back_up_before_upgrade(path: Path, version: int) -> Path:
    """Copy a database beside itself for an upgrade, and return the copy's path."""
    copy = copy_of_version(path, version)
    part = copy.with_suffix(".part")
    copy_database(path, part)
    # Rename once complete: a crash leaves no partial copy under the final name.
    part.replace(copy)
    sync_directory(copy.parent)
    return copy


def upgrade(connection: Connection, version: int) -> None:
    """Upgrade the tables of a database from a known, earlier version to the current version."""
    operations = Operations(MigrationContext.configure(connection))
    for step in _STEPS[version - 1 :]:
        step(operations)


def _to_version_2(operations: Operations) -> None:
    for column in (
        sa.Column("description", sa.Text(), nullable=False, server_default=""),
        sa.Column("labels", sa.JSON(), nullable=False, server_default="[]"),
        sa.Column("notes", sa.Text(), nullable=False, server_default=""),
        sa.Column("is_archived", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("forked_from", sa.BigInteger()),
    ):
        operations.add_column("experiments", column)
    experiments = sa.table(
        "experiments", sa.column("config", sa.JSON), sa.column("description"),
        sa.column("labels", sa.JSON),
    )  # fmt: skip
    operations.execute(
        experiments.update().values(
            description=sa.func.coalesce(experiments.c.config["description"].as_string(), ""),
            labels=sa.func.coalesce(sa.func.json_extract(experiments.c.config, "$.labels"), "[]"),
        )
    )
    operations.create_table(
        "users",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("password_hash", sa.String(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
    )
    operations.create_table(
        "sign_ins",
        sa.Column("digest", sa.String(), primary_key=True),
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
    )


def _to_version_3(operations: Operations) -> None:
    for table in ("experiments", "trials"):
        operations.add_column(
            table,
            sa.Column("num_records_lost", sa.BigInteger(), nullable=False, server_default="0"),
        )


def _to_version_4(operations: Operations) -> None:
    operations.create_table(
        "time_marks",
        sa.Column("attempt_id", sa.Integer(), sa.ForeignKey("attempts.id"), primary_key=True),
        sa.Column("generation", sa.Integer(), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("steps_completed", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.JSON(), nullable=False),
    )


def _to_version_5(operations: Operations) -> None:
    for name in ("metadata", "alerts"):
        operations.add_column("trials", sa.Column(name, sa.JSON()))


def _to_version_6(operations: Operations) -> None:
    """Add the tables and indexes of version 6 with little memory, however large a table is."""
    operations.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False, unique=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float()),
        sa.Column("revoked_at", sa.Float()),
    )
    _add_indexes(operations)
    _add_counts(operations)
    operations.create_table(
        "unrecorded",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("experiment_id", sa.BigInteger()),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("row_id", sa.BigInteger(), nullable=False),
        sqlite_autoincrement=True,
    )


def _add_indexes(operations: Operations) -> None:
    for name in ("trial", "experiment", "metric"):
        operations.drop_index(f"ix_checkpoints_{name}", "checkpoints")
    indexes: tuple[tuple[str, str, list[str | sa.TextClause]], ...] = (
        ("experiments", "retention", ["retention_done"]),
        ("experiments", "archived", ["is_archived"]),
        ("experiments", "name", ["is_archived", sa.text("name COLLATE NOCASE")]),
        ("experiments", "created", ["is_archived", "created_at"]),
        ("experiments", "ended", ["is_archived", "ended_at"]),
        ("experiments", "best", ["is_archived", "best_metric"]),
        ("experiments", "progress", ["is_archived", "progress"]),
        ("trials", "id", ["experiment_id"]),
        ("trials", "steps", ["experiment_id", "steps_completed"]),
        ("trials", "created", ["experiment_id", "created_at"]),
        ("trials", "ended", ["experiment_id", "ended_at"]),
        ("trials", "restarts", ["experiment_id", "restarts"]),
        ("attempts", "began", ["experiment_id", "number", "created_at", "trial_id"]),
        ("checkpoints", "trial", ["trial_id", "steps_completed", "created_at", "uuid"]),
        ("checkpoints", "experiment", ["experiment_id", "steps_completed", "created_at", "uuid"]),
        ("checkpoints", "metric",
         ["experiment_id", "metric", "steps_completed", "created_at", "uuid"]),
    )  # fmt: skip
    for table, name, columns in indexes:
        operations.create_index(f"ix_{table}_{name}", table, columns)


def _add_counts(operations: Operations) -> None:
    operations.create_table(
        "search_views",
        sa.Column("experiment_id", sa.Integer(), sa.ForeignKey("experiments.id"), primary_key=True),
        sa.Column("num_inputs", sa.Integer(), nullable=False),
        sa.Column("view", sa.LargeBinary(), nullable=False),
    )
    operations.create_table(
        "counts",
        sa.Column("kind", sa.String(), primary_key=True),
        sa.Column("experiment_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("state", sa.String(), primary_key=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sqlite_with_rowid=False,
    )
    operations.create_table(
        "metric_names",
        sa.Column("experiment_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("group", sa.String(), primary_key=True),
        sa.Column("key", sa.String(), primary_key=True),
        sa.Index("ix_metric_names", "group", "key"),
        sqlite_with_rowid=False,
    )
    for statement in (*FIRST_COUNTS, *TRIGGERS):
        operations.execute(statement)


_SET_RETRIES = """
UPDATE trials SET retries = (
    SELECT count(*) FROM attempts WHERE trial_id = trials.id
    AND json_extract(exit, '$.reason') IN ('shortage', 'runner_lost')
) WHERE num_attempts > 1
"""
_SET_ERROR_KIND = """
UPDATE trials SET error_kind = CASE (
    SELECT json_extract(exit, '$.reason') FROM attempts WHERE trial_id = trials.id
    ORDER BY number DESC LIMIT 1
) WHEN 'start_failed' THEN 'permanent' WHEN 'shortage' THEN 'transient'
WHEN 'runner_lost' THEN 'transient' ELSE 'user' END WHERE error IS NOT NULL
"""


def _to_version_7(operations: Operations) -> None:
    """Add the kinds of errors; those of before follow from how the attempts ended."""
    operations.add_column(
        "trials", sa.Column("retries", sa.Integer(), nullable=False, server_default="0")
    )
    operations.add_column("trials", sa.Column("error_kind", sa.String()))
    # Old trigger dropped: its column list is fixed, so `watch_rows` creates a new trigger.
    operations.execute("DROP TRIGGER IF EXISTS recorded_trials")
    operations.execute(_SET_RETRIES)
    operations.execute(_SET_ERROR_KIND)
    operations.execute(
        "INSERT INTO unrecorded (experiment_id, kind, row_id)"
        " SELECT experiment_id, 'trials', id FROM trials WHERE error IS NOT NULL"
    )


def _to_version_8(operations: Operations) -> None:
    operations.add_column("attempts", sa.Column("node_id", sa.BigInteger()))
    operations.create_table(
        "nodes",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(), nullable=False, unique=True),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("session", sa.Integer(), nullable=False),
        sa.Column("token_id", sa.BigInteger()),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("registered_at", sa.Float(), nullable=False),
    )


def _to_version_9(operations: Operations) -> None:
    operations.add_column("attempts", sa.Column("members", sa.JSON()))
    operations.add_column("attempts", sa.Column("meeting_port", sa.Integer()))
    operations.create_index("ix_attempts_ended", "attempts", ["ended_at"])
    operations.create_index("ix_attempts_node", "attempts", ["node_id", "id"])
    for column in (
        sa.Column("priority", sa.Integer()),
        sa.Column("weight", sa.Float()),
        sa.Column("queue_place", sa.Float()),
        sa.Column("report_lease_s", sa.Float()),
        sa.Column("max_slots", sa.Integer()),
        sa.Column("source", sa.JSON()),
    ):
        operations.add_column("experiments", column)
    # Old trigger dropped: its column list is fixed, so `watch_rows` creates a new trigger.
    operations.execute("DROP TRIGGER IF EXISTS recorded_experiments")
    operations.create_table(
        "pools",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("max_slots", sa.Integer()),
        sa.Column("labels", sa.JSON(), nullable=False),
    )
    operations.create_table(
        "drained_slots",
        sa.Column("node_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("slot", sa.Integer(), primary_key=True, autoincrement=False),
    )
    operations.add_column("attempts", sa.Column("environment", sa.String()))
    operations.add_column("attempts", sa.Column("node_name", sa.String()))
    operations.create_index("ix_attempts_environment", "attempts", ["environment"])
    operations.create_table(
        "environments",
        sa.Column("digest", sa.String(), primary_key=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
    # Nodes are recorded with the users and tokens from now on.
    operations.execute("INSERT INTO unrecorded (kind, row_id) VALUES ('all', 0)")


def _to_version_10(operations: Operations) -> None:
    operations.add_column("attempts", sa.Column("restart_causes", sa.JSON()))


def _to_version_11(operations: Operations) -> None:
    for column in (
        sa.Column("seen_at", sa.Float()),
        sa.Column("has_left", sa.Boolean(), nullable=False, server_default=sa.false()),
    ):
        operations.add_column("nodes", column)
    operations.create_index(
        "ix_experiments_texts", "experiments", ["name", "description", "labels"]
    )


def _to_version_12(operations: Operations) -> None:
    for name in ("node", "pool"):
        operations.add_column("tokens", sa.Column(name, sa.String()))


# The step at index n leads from version n + 1 to the next.
_STEPS = (
    _to_version_2,
    _to_version_3,
    _to_version_4,
    _to_version_5,
    _to_version_6,
    _to_version_7,
    _to_version_8,
    _to_version_9,
    _to_version_10,
    _to_version_11,
    _to_version_12,
)
