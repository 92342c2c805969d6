"""Ids that are never given twice, also after the newest rows were deleted.

Directories, log files and people's links carry them, so a second owner would find what the first
one left.
"""

from collections.abc import Mapping

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
    raise_ids(connection, dict.fromkeys(given, 0))


def raise_ids(connection: Connection, newest: Mapping[Table, int]) -> None:
    """Remember ids that were given before the rows that are there."""
    meta = tables.meta
    for table, number in newest.items():
        kept = max(number, new_id(connection, table) - 1)
        connection.execute(delete(meta).where(meta.c.key == _key(table)))
        connection.execute(insert(meta).values(key=_key(table), value=str(kept)))


def _key(table: Table) -> str:
    return f"last_id_of_{table.name}"
