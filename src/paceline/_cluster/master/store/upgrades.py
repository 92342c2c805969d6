"""Upgrade of a database from an earlier version, after a copy of it was made."""

from collections.abc import Callable
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from paceline._base.files import sync_directory
from paceline._cluster.master.store.database import copy_of_version
from paceline._cluster.master.store.database_reading import copy_database
from paceline._cluster.master.store.tables import FIRST_SCHEMA_VERSION

# Step n leads from schema version `FIRST_SCHEMA_VERSION + n` to the next. Each step is written out:
# a later change of the tables must not change what an earlier step does.
STEPS: tuple[Callable[[Operations], None], ...] = ()


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
