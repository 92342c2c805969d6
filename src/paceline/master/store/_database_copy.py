"""Copies of a database, also of one that is being written."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from paceline.master.store._database import unreadable
from paceline.master.store._read_only_connections import connect_to_read


def copy_database(source: Path, target: Path) -> None:
    """Copy a database with SQLite's online backup: one state of it, forced to disk.

    Whoever writes to it goes on meanwhile. Nothing else is in the copy's directory afterwards.

    Args:
        source: The database; its log beside it belongs to it.
        target: The copy; a file that is there is replaced.

    Raises:
        DatabaseVersionError: The source cannot be read as a database.
        OSError: The copy cannot be written.
    """
    target.unlink(missing_ok=True)
    try:
        with closing(connect_to_read(source)) as reader:
            _fill_copy(reader, target)
    except sqlite3.DatabaseError as error:
        target.unlink(missing_ok=True)
        if isinstance(error, sqlite3.OperationalError) and source.exists():
            raise OSError(
                f"{str(source)!r} cannot be copied to {str(target)!r}: {error}"
            ) from error
        raise unreadable(source, error) from error


def _fill_copy(reader: sqlite3.Connection, target: Path) -> None:
    # Made first, so that nobody else can ever read it.
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with closing(sqlite3.connect(target)) as writer:
        # In one step: each change of the source between two would make it begin anew.
        reader.backup(writer)
        # A single file, which nobody needs to put together.
        writer.execute("PRAGMA journal_mode=DELETE")
    with target.open("rb") as file:
        os.fsync(file.fileno())


def check_copy(path: Path) -> None:
    """Check the pages of a database that nobody writes to.

    Raises:
        DatabaseDamagedError: Some are damaged.
    """
    address = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error
    if problem != "ok":
        raise unreadable(path, sqlite3.DatabaseError(" ".join(str(problem).split())))
