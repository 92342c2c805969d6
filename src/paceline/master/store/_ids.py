"""Ids that are never given twice, also after the newest rows were deleted.

Directories, log files and people's links carry them, so a second owner would find what the first
one left.
"""

from sqlalchemy import Connection, Table, delete, func, insert, select

from paceline.master.store import _tables as tables


def new_id(connection: Connection, table: Table) -> int:
    """Return the id for a new row; for the writer thread."""
    meta = tables.meta
    kept = connection.execute(select(meta.c.value).where(meta.c.key == _key(table))).scalar()
    newest: int | None = connection.execute(select(func.max(table.c.id))).scalar()
    return max(int(kept or 0), newest or 0) + 1


def keep_ids(connection: Connection, *given: Table) -> None:
    """Remember which ids were given so far; call it before rows are deleted."""
    meta = tables.meta
    for table in given:
        newest = new_id(connection, table) - 1
        connection.execute(delete(meta).where(meta.c.key == _key(table)))
        connection.execute(insert(meta).values(key=_key(table), value=str(newest)))


def _key(table: Table) -> str:
    return f"last_id_of_{table.name}"
