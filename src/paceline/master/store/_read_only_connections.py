"""Connections that change nothing of a database, of which no `Database` is made."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, NullPool, create_engine, inspect
from sqlalchemy.exc import DatabaseError

from paceline.master.store import _tables as tables
from paceline.master.store._database import unreadable


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a connection that changes nothing of a database."""
    # A database whose first change was interrupted can be read only once that is taken back.
    mode = "rw" if path.with_name(f"{path.name}-journal").exists() else "ro"
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    return sqlite3.connect(address, uri=True, timeout=30)


@contextmanager
def open_read_only(path: Path) -> Iterator[Connection]:
    """Give a connection that reads a database of which no `Database` is made.

    Raises:
        DatabaseVersionError: It is damaged, or no database.
    """
    engine = _reader(path)
    try:
        with engine.connect() as connection:
            yield connection
    except (DatabaseError, sqlite3.DatabaseError) as error:
        raise unreadable(path, getattr(error, "orig", error)) from error
    finally:
        engine.dispose()


def read_version(connection: Connection) -> int | None:
    """Return the schema version of a database, None if it has none that a master wrote."""
    if not inspect(connection).get_table_names():
        return None
    found = connection.execute(tables.VERSION).scalar()
    return int(found) if found is not None and str(found).isdecimal() else None


def _reader(path: Path) -> Engine:
    return create_engine("sqlite://", creator=lambda: connect_to_read(path), poolclass=NullPool)
