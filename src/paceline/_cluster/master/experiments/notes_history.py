"""Earlier versions of an experiment's notes: who saved them, and when."""

import time
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.reach import current_user

_KIND = "notes"
_MOST_VERSIONS = 50
_documents = tables.documents


def add_notes_version(connection: Connection, experiment_id: int, before: str, text: str) -> None:
    """Store the notes that an edit saves, and those before the first edit; the newest 50 stay."""
    if before == text:
        return
    found = read_notes_history(connection, experiment_id)
    number = int(found[0]["number"]) + 1 if found else 1
    known_before = found[0]["text"] if found else ""
    if known_before != before:
        # Set when the experiment was created, or by a client of another tracker.
        _store(connection, experiment_id, number, before, user=None)
        number += 1
    _store(connection, experiment_id, number, text, user=current_user())
    of_notes = (_documents.c.kind == _KIND, _documents.c.parent == str(experiment_id))
    last = f"{max(number - _MOST_VERSIONS, 0):09}"
    connection.execute(delete(_documents).where(*of_notes, _documents.c.name <= last))


def read_notes_history(connection: Connection, experiment_id: int) -> list[dict[str, Any]]:
    """Return the stored versions, the newest first: number, text, user and time of each."""
    query = select(_documents.c.content, _documents.c.created_at).where(
        _documents.c.kind == _KIND, _documents.c.parent == str(experiment_id)
    )
    rows = connection.execute(query.order_by(_documents.c.name.desc()))
    return [{**row.content, "saved_at": row.created_at} for row in rows]


def _store(
    connection: Connection, experiment_id: int, number: int, text: str, user: str | None
) -> None:
    now = time.time()
    connection.execute(
        insert(_documents).values(
            kind=_KIND,
            parent=str(experiment_id),
            name=f"{number:09}",
            content={"number": number, "text": text, "user": user},
            created_at=now,
            changed_at=now,
            experiment_id=experiment_id,
        )
    )
