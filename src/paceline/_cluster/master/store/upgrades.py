"""Upgrade of a database from an earlier version, after a copy of it was made."""

from collections.abc import Callable
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Integer,
    String,
    Text,
    false,
    text,
)

from paceline._base.files import sync_directory
from paceline._cluster.master.store.database import copy_of_version
from paceline._cluster.master.store.database_reading import copy_database
from paceline._cluster.master.store.tables import FIRST_SCHEMA_VERSION

# Step n leads from schema version `FIRST_SCHEMA_VERSION + n` to the next. Each step is written out:
# a later change of the tables must not change what an earlier step does.


def _add_files_media_and_documents(operations: Operations) -> None:
    operations.create_table(
        "run_files",
        Column("trial_id", Integer, ForeignKey("trials.id"), primary_key=True),
        Column("path", String, primary_key=True),
        Column("experiment_id", BigInteger, nullable=False),
        Column("digest", String, nullable=False),
        Column("size", BigInteger, nullable=False),
        Column("media_type", String, nullable=False),
        Column("created_at", Float, nullable=False),
        sqlite_with_rowid=False,
    )
    operations.create_index("ix_run_files_digest", "run_files", ["digest"])
    operations.create_index("ix_run_files_experiment", "run_files", ["experiment_id"])
    operations.create_table(
        "media",
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("trial_id", Integer, ForeignKey("trials.id"), nullable=False),
        Column("experiment_id", BigInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("group", String, nullable=False),
        Column("name", String, nullable=False),
        Column("kind", String, nullable=False),
        Column("steps_completed", BigInteger, nullable=False),
        Column("time", Float, nullable=False),
        Column("files", JSON, nullable=False),
        Column("value", Text),
    )
    places = ["trial_id", "group", "name", "steps_completed", "id"]
    operations.create_index("ix_media_trial", "media", places)
    operations.create_index("ix_media_experiment", "media", ["experiment_id"])
    operations.create_table(
        "documents",
        Column("kind", String, primary_key=True),
        Column("parent", String, primary_key=True),
        Column("name", String, primary_key=True),
        Column("content", JSON, nullable=False),
        Column("created_at", Float, nullable=False),
        Column("changed_at", Float, nullable=False),
        Column("experiment_id", BigInteger),
        sqlite_with_rowid=False,
    )
    operations.create_index("ix_documents_experiment", "documents", ["experiment_id"])


def _add_backfill_and_waiting_trials(operations: Operations) -> None:
    for table, name in (
        ("attempts", "is_filler"),
        ("pools", "backfill"),
        ("trials", "is_waiting"),
    ):
        operations.add_column(table, Column(name, Boolean, nullable=False, server_default=false()))


def _add_views(operations: Operations) -> None:
    operations.create_table(
        "views",
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("owner", String, nullable=False),
        Column("name", String, nullable=False),
        Column("search", Text, nullable=False),
        Column("is_default", Boolean, nullable=False),
        Column("version", Integer, nullable=False),
        Column("changed_at", Float, nullable=False),
        sqlite_autoincrement=True,
    )


def _add_users_and_projects(operations: Operations) -> None:
    for name, default in (("is_admin", "0"), ("is_active", "1"), ("is_service", "0")):
        column = Column(name, Boolean, nullable=False, server_default=text(default))
        operations.add_column("users", column)
    operations.create_table(
        "projects",
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("name", String, nullable=False, unique=True),
        Column("created_at", Float, nullable=False),
    )
    operations.create_table(
        "members",
        Column("project_id", BigInteger, primary_key=True, autoincrement=False),
        Column("user", String, primary_key=True),
        Column("role", String, nullable=False),
    )
    operations.create_table(
        "audit",
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("time", Float, nullable=False),
        Column("user", String, nullable=False),
        Column("token", String),
        Column("action", String, nullable=False),
        Column("objects", JSON, nullable=False),
        Column("status", Integer, nullable=False),
    )
    # What was there belongs to the only user of before.
    for table in ("experiments", "documents"):
        if table == "experiments":
            owner = Column("owner", String, nullable=False, server_default="admin")
            operations.add_column(table, owner)
        project = Column("project_id", BigInteger, nullable=False, server_default="1")
        operations.add_column(table, project)
    user = Column("user", String, nullable=False, server_default="admin")
    operations.add_column("tokens", user)
    columns = ["project_id", "state", "is_archived"]
    operations.create_index("ix_experiments_project", "experiments", columns)
    operations.create_index("ix_experiments_owner", "experiments", ["owner"])
    # Made anew, with the columns that are watched since.
    for table in ("users", "experiments"):
        operations.execute(f"DROP TRIGGER IF EXISTS recorded_{table}")
    for change in ("UPDATE", "DELETE"):
        operations.execute(
            f"CREATE TRIGGER audit_no_{change.lower()} BEFORE {change} ON audit"
            " BEGIN SELECT RAISE(ABORT, 'the audit log is only added to'); END"
        )


def _add_usage(operations: Operations) -> None:
    operations.create_table(
        "usage",
        Column("month", String, primary_key=True),
        Column("user", String, primary_key=True),
        Column("project_id", BigInteger, primary_key=True, autoincrement=False),
        Column("pool", String, primary_key=True),
        Column("slot_s", Float, nullable=False),
        Column("wait_s", Float, nullable=False),
        Column("num_trials", BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )


def _add_quotas_and_reservations(operations: Operations) -> None:
    operations.create_table(
        "quotas",
        Column("user", String, primary_key=True),
        Column("project_id", BigInteger, primary_key=True, autoincrement=False),
        Column("weight", Float, nullable=False),
        Column("max_slots", Integer),
        Column("slot_hours", Float),
        Column("checkpoint_bytes", BigInteger),
        Column("revision", Integer, nullable=False),
    )
    operations.create_table(
        "slot_use",
        Column("month", String, primary_key=True),
        Column("user", String, primary_key=True),
        Column("project_id", BigInteger, primary_key=True, autoincrement=False),
        Column("pool", String, primary_key=True),
        Column("slot_s", Float, nullable=False),
        Column("recent_s", Float, nullable=False),
        Column("at", Float, nullable=False),
        sqlite_with_rowid=False,
    )
    operations.create_table(
        "reservations",
        Column("id", Integer, primary_key=True, autoincrement=True),
        Column("node", String, nullable=False),
        Column("user", String, nullable=False),
        Column("begins_at", Float, nullable=False),
        Column("ends_at", Float, nullable=False),
        sqlite_autoincrement=True,
    )
    operations.add_column("pools", Column("half_life_hours", Float))


def _add_groups_and_rules_of_pools(operations: Operations) -> None:
    for name in ("silent_after_s", "unused_after_s", "pause_after_s"):
        operations.add_column("pools", Column(name, Float))
    operations.add_column("pools", Column("best_priority", Integer))
    operations.add_column("pools", Column("open_to", JSON))
    own = Column("own_runners", Boolean, nullable=False, server_default=false())
    operations.add_column("pools", own)
    operations.add_column("users", Column("member_of", String))
    # Made anew, with the columns that are watched since.
    operations.execute("DROP TRIGGER IF EXISTS recorded_users")
    operations.add_column("attempts", Column("log_hits", JSON))
    operations.create_index(
        "ix_attempts_hits", "attempts", ["trial_id"], sqlite_where=text("log_hits IS NOT NULL")
    )


STEPS: tuple[Callable[[Operations], None], ...] = (
    _add_files_media_and_documents,
    _add_backfill_and_waiting_trials,
    _add_views,
    _add_users_and_projects,
    _add_usage,
    _add_quotas_and_reservations,
    _add_groups_and_rules_of_pools,
)


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
    for step in STEPS[version - FIRST_SCHEMA_VERSION :]:
        step(operations)
