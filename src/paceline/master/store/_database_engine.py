"""Connections to the database: those of its one writer, and those that read beside it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import QueuePool, StaticPool

from paceline.master.store._database_files import DatabaseFiles


class DatabaseReader:
    """Reads a database that a `Database` has open, in this process or in another one.

    Raises:
        DatabaseLostError: It is missing.
    """

    def __init__(self, path: Path) -> None:
        self._engine = make_engine(DatabaseFiles(path, makes=False), writes=False)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a connection that sees one consistent state."""
        with self._engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def make_engine(files: DatabaseFiles, *, writes: bool) -> Engine:
    """Return an engine whose connections write or read."""
    pool: dict[str, Any] = (
        {"poolclass": StaticPool}
        if writes
        else {"poolclass": QueuePool, "pool_size": 8, "max_overflow": 32}
    )
    engine = create_engine(
        "sqlite://",
        creator=files.open,
        json_serializer=_dump_json,
        # An error of a statement is logged: it must not hold what was to be stored.
        hide_parameters=True,
        json_deserializer=load_json,
        **pool,
    )

    # The driver's own transaction control knows no savepoints that span statements, so it is
    # switched off and BEGIN is sent here.
    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        try:
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            # The pool forgets it: a damaged file would stay open.
            connection.close()
            raise

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def load_json(text: str) -> Any:
    """Return what is stored in a JSON column."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        # The stricter of the two knows no half of a surrogate pair, and is several times faster.
        return json.loads(text)


def _dump_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
