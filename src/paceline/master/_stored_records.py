"""What a route needs that reads the database, and nothing else of the master."""

from contextlib import AbstractContextManager
from typing import Protocol

from sqlalchemy import Connection

from paceline.master._name_cache import NameCache
from paceline.master.store import EncodingCache


class ReadableDatabase(Protocol):
    """A database that can be read."""

    def read(self) -> AbstractContextManager[Connection]:
        """Give a connection that sees one consistent state."""


class StoredRecords(Protocol):
    """The database and what is kept of it in memory, which a second process can have as well."""

    @property
    def database(self) -> ReadableDatabase:
        """The database."""

    @property
    def encodings(self) -> EncodingCache:
        """Encoded rows."""

    @property
    def kept_names(self) -> NameCache:
        """Names of hyperparameters."""
