"""The identity of a home, of which the database has a copy."""

from sqlalchemy import Connection, insert, select

from paceline.master.store import _tables as tables
from paceline.master.store._database import Database

_KEY = "cluster_id"


def settle_cluster_id(database: Database, in_file: str) -> str:
    """Return the identity that the database holds; that of the file is stored if it holds none."""
    with database.read() as connection:
        stored = read_cluster_id(connection)
    if stored is None:
        row = insert(tables.meta).values(key=_KEY, value=in_file)
        database.write(lambda transaction: transaction.connection.execute(row)).result()
        return in_file
    return stored


def read_cluster_id(connection: Connection) -> str | None:
    """Return the identity that the database holds, None if it holds none."""
    value: str | None = connection.scalar(
        select(tables.meta.c.value).where(tables.meta.c.key == _KEY)
    )
    return value
