"""Checkpoints in one SQLite file: `checkpoint_storage: sqlite:///absolute/path/checkpoints.db`.

A storage that is no directory has to put, read, list and remove objects by their keys. How
checkpoints become whole, are verified, and are found is the same for all.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.storage import ObjectStorage, StoredObject

# SQLite holds at most 1 GB in a value.
PIECE_BYTES = 64 * 1024 * 1024
# Seconds since the epoch.
NOW = "(julianday('now') - 2440587.5) * 86400"
WAIT_S = 60.0


class SqliteStorage(ObjectStorage):
    """Keep objects as rows of a table, in pieces; any number of processes may use the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def from_url(cls, url: str) -> "SqliteStorage":
        parts = urlsplit(url)
        if parts.netloc or not parts.path.endswith(".db"):
            raise ValueError(
                f"`checkpoint_storage` must be like sqlite:///a/b.db, but got {url!r}."
            )
        return cls(Path(unquote(parts.path)))

    @property
    def url(self) -> str:
        return self._path.as_uri().replace("file:", "sqlite:", 1)

    def put(self, key: str, file: Path) -> None:
        with self._transaction() as database, file.open("rb") as reader:
            database.execute("DELETE FROM pieces WHERE key = ?", (key,))
            number = 0
            # An empty object has one piece, too.
            while (data := reader.read(PIECE_BYTES)) or number == 0:
                database.execute(f"INSERT INTO pieces VALUES (?, ?, ?, {NOW})", (key, number, data))
                number += 1

    def read(self, key: str, offset: int, size: int) -> bytes:
        number, start = divmod(offset, PIECE_BYTES)
        with self._transaction() as database:
            found = database.execute(
                "SELECT substr(data, ?, ?) FROM pieces WHERE key = ? AND number = ?",
                (start + 1, size, key, number),
            ).fetchone()
            if found is None and number == 0:
                raise FileNotFoundError(key)
        return bytes(found[0] or b"") if found else b""

    def objects(self, prefix: str) -> Sequence[StoredObject]:
        with self._transaction() as database:
            rows = database.execute(
                "SELECT key, sum(length(data)), max(changed) FROM pieces"
                " WHERE substr(key, 1, ?) = ? GROUP BY key",
                (len(prefix), prefix),
            ).fetchall()
        return [StoredObject(*row) for row in rows]

    def remove(self, keys: Sequence[str]) -> None:
        with self._transaction() as database:
            database.executemany("DELETE FROM pieces WHERE key = ?", [(key,) for key in keys])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute(
                "CREATE TABLE IF NOT EXISTS pieces (key TEXT, number INTEGER, data BLOB,"
                " changed REAL, PRIMARY KEY (key, number))"
            )
            yield database
            database.execute("COMMIT")
        finally:
            # What was not committed is undone.
            database.close()
