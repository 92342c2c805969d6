"""Queries for the files that the database refers to."""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, insert, inspect, select, text

from paceline.master.store import _tables as tables
from paceline.master.store._database import Database, Transaction
from paceline.master.store._ids import new_id
from paceline.master.store._read_only_connections import open_read_only, read_version

# A larger database takes too long to read as a whole at each start.
_MAX_CHECKED_BYTES = 2**30
_CONTEXT = "context:"
_NOTES_CONTEXTS = "notes_contexts"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFiles:
    """The files that a database knows; by default those of an empty one.

    Deleted trials and attempts count as known, because their files may have stayed. `contexts`
    is None in a database of an earlier version: it did not note uploads.
    """

    newest_experiment: int = 0
    newest_trial: int = 0
    newest_attempt: int = 0
    contexts: frozenset[str] | None = frozenset()


def read_known_files(path: Path) -> KnownFiles | None:
    """Return which files a database knows; None if this version cannot tell.

    The database must exist. It is only read, so that a refused start changes nothing.

    Raises:
        DatabaseVersionError: It is damaged, or no database of Paceline.
    """
    with open_read_only(path) as connection:
        if path.stat().st_size <= _MAX_CHECKED_BYTES:
            _check_pages(connection)
        if not inspect(connection).get_table_names():
            return KnownFiles()
        if read_version(connection) not in range(1, tables.SCHEMA_VERSION + 1):
            return None
        return KnownFiles(
            newest_experiment=new_id(connection, tables.experiments) - 1,
            newest_trial=new_id(connection, tables.trials) - 1,
            newest_attempt=new_id(connection, tables.attempts) - 1,
            contexts=_known_contexts(connection),
        )


def note_context(transaction: Transaction, digest: str) -> None:
    """Note an upload; call it before the file is written."""
    _note(transaction.connection, _CONTEXT + digest)
    # After a power cut the file may be there, and a database that does not know it is refused.
    transaction.force()


def adopt_contexts(database: Database, digests: Iterable[str]) -> None:
    """Note the uploads of an earlier version, once; later ones are noted as they come."""
    with database.read() as connection:
        if _has(connection, _NOTES_CONTEXTS):
            return

    def adopt(transaction: Transaction) -> None:
        for digest in digests:
            note_context(transaction, digest)
        _note(transaction.connection, _NOTES_CONTEXTS)

    database.write(adopt).result()


def _check_pages(connection: Connection) -> None:
    problem = connection.execute(text("PRAGMA quick_check(1)")).scalar()
    if problem != "ok":
        raise sqlite3.DatabaseError(" ".join(str(problem).split()))


def _known_contexts(connection: Connection) -> frozenset[str] | None:
    if not _has(connection, _NOTES_CONTEXTS):
        return None
    keys = select(tables.meta.c.key).where(tables.meta.c.key.startswith(_CONTEXT))
    noted = {key.removeprefix(_CONTEXT) for key in connection.execute(keys).scalars()}
    used = connection.execute(select(tables.experiments.c.context_digest)).scalars()
    return frozenset(noted | {digest for digest in used if digest is not None})


def _has(connection: Connection, key: str) -> bool:
    query = select(tables.meta.c.key).where(tables.meta.c.key == key)
    return connection.execute(query).scalar() is not None


def _note(connection: Connection, key: str) -> None:
    if not _has(connection, key):
        connection.execute(insert(tables.meta).values(key=key, value="1"))
