"""Keeping the records beside the database up to date while a master works."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, delete, select

from paceline import faults
from paceline.master.store import (
    ALL,
    GONE,
    NEW,
    Database,
    DatabaseLostError,
    RecordedRow,
    Transaction,
    begin_records,
    marks_of_running,
    rows_of_change,
    tables,
)
from paceline.master.upkeep._recovery_records import append_recovery_rows, record_path

logger = logging.getLogger(__name__)

faults.register("recorder.written")

# Changes are gathered for so long: most rows change more than once in a moment.
_GATHER_S = 0.25
_RETRY_S = 10.0
_MAX_CHANGES = 1000
# Rows of an experiment that are recorded whole, as after an upgrade, come at a time; the thread
# then rests so many times as long as that took, and leaves the interpreter to requests.
_MAX_WHOLE = 20
_REST = 4.0


class Recorder:
    """A thread that writes changed rows to the records, after their transaction.

    The database holds what is yet to be written, so that a kill loses nothing of it. A disk that
    is full holds up the records and nothing else.

    Args:
        database: The database.
        home: The home that has it.
    """

    def __init__(self, database: Database, home: Path) -> None:
        self._database = database
        self._home = home
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin; in a home of an earlier version, with all that is there."""
        begin_records(self._database)
        self._database.on_commit(lambda _: self._changed.set())
        self._changed.set()
        self._thread.start()

    def close(self) -> None:
        """Write what is left and stop."""
        self._closing.set()
        self._changed.set()
        self._thread.join()

    def flush(self) -> None:
        """Write all that waits.

        Raises:
            OSError: It cannot be written.
        """
        began, last = time.monotonic(), 0
        while last := write_some(self._database, self._home, last):
            if not self._is_long():
                continue
            if self._closing.wait(_REST * (time.monotonic() - began)):
                return
            began = time.monotonic()

    def _is_long(self) -> bool:
        """Tell whether there is more than a moment's work; the next master goes on with it."""
        query = select(tables.unrecorded.c.id).where(tables.unrecorded.c.kind == ALL).limit(1)
        with self._database.read() as connection:
            return connection.execute(query).first() is not None

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if not self._closing.wait(_GATHER_S):
                self._changed.clear()
            try:
                self.flush()
            except DatabaseLostError:
                return
            except Exception:
                logger.exception("The records cannot be written; they are tried again.")
                self._changed.set()
                self._closing.wait(_RETRY_S)
            # What was stored in a lost database is in the records, and nothing comes after it.
            if self._closing.is_set() or isinstance(self._database.failure, DatabaseLostError):
                return


def write_some(database: Database, home: Path, after: int = 0) -> int:
    """Write the oldest changes that wait.

    Args:
        database: The database.
        home: The home that has it.
        after: The last change that was written.

    Returns:
        The last change that is written now, 0 if there was none.

    Raises:
        DatabaseLostError: The file of the database is lost, and no connection to it is left.
        OSError: They cannot be written.
    """
    with database.read() as connection:
        unrecorded = tables.unrecorded
        query = select(unrecorded).where(unrecorded.c.id > after).order_by(unrecorded.c.id)
        query = query.limit(_MAX_CHANGES)
        changes = _first_changes(connection.execute(query).all())
        if not changes:
            return 0
        by_experiment: dict[int | None, list[Row[Any]]] = {}
        for change in changes:
            by_experiment.setdefault(change.experiment_id, []).append(change)
        for experiment_id, own in by_experiment.items():
            _write_records(connection, home, experiment_id, own)
    faults.reach("recorder.written")
    last: int = changes[-1].id
    # What a lost database has is not asked for again.
    with suppress(DatabaseLostError):
        database.write(lambda t: _forget_records(t, last)).result()
    return last


def _first_changes(changes: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
    """Return as many of the oldest changes as are a moment's work."""
    whole = [place for place, change in enumerate(changes) if change.kind == ALL]
    return changes[: whole[_MAX_WHOLE]] if len(whole) > _MAX_WHOLE else changes


def _write_records(
    connection: Connection, home: Path, experiment_id: int | None, changes: list[Row[Any]]
) -> None:
    path = record_path(home, experiment_id)
    if any(change.kind == GONE for change in changes):
        path.unlink(missing_ok=True)
        return
    kinds = {change.kind for change in changes}
    # All rows anew take the place of a record, in a file that is whole or not there.
    if ALL in kinds:
        part = path.with_name(f".{path.name}.part")
        append_recovery_rows(part, changes[-1].id, _rows_to_recover(connection, changes), anew=True)
        part.replace(path)
        if path.stat().st_size == 0:
            path.unlink()  # there is nobody yet
    else:
        append_recovery_rows(
            path, changes[-1].id, _rows_to_recover(connection, changes), anew=NEW in kinds
        )


def _rows_to_recover(connection: Connection, changes: list[Row[Any]]) -> Iterator[RecordedRow]:
    seen: set[tuple[str, int]] = set()
    has_inputs = False
    # All rows of an experiment include those that changed one by one.
    kinds = [change for change in changes if change.kind == ALL] or changes
    for change in kinds:
        if (change.kind, change.row_id) not in seen:
            seen.add((change.kind, change.row_id))
            has_inputs |= change.kind in (ALL, "search_inputs")
            yield from rows_of_change(connection, change.kind, change.row_id)
    # What the search has judged must not be judged again when the journals are read anew.
    if has_inputs and changes[0].experiment_id is not None:
        yield from marks_of_running(connection, changes[0].experiment_id)


def _forget_records(transaction: Transaction, last: int) -> None:
    unrecorded = tables.unrecorded
    transaction.connection.execute(delete(unrecorded).where(unrecorded.c.id <= last))
