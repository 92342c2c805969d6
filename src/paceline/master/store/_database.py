"""The database: one writer thread with group commit, and readers beside it."""

import itertools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, insert, inspect, update
from sqlalchemy.exc import DatabaseError

from paceline.master.store import _tables as tables
from paceline.master.store._database_engine import make_engine
from paceline.master.store._database_files import (
    DatabaseFiles,
    DatabaseLostError,
    DatabaseUnavailableError,
)
from paceline.master.store._recovery_rows import watch_rows

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_JOBS_PER_COMMIT = 64
# Without changes to store, the writer looks this often whether the files are still there.
_LOOK_S = 1.0
_force = getattr(os, "fdatasync", os.fsync)  # not everywhere
_EARLIER_VERSIONS = [str(version) for version in range(1, tables.SCHEMA_VERSION)]


class DatabaseVersionError(RuntimeError):
    """Raised when the database was written by another version of Paceline."""


class DatabaseDamagedError(DatabaseVersionError):
    """Raised when the database file is damaged, or no database at all."""


class Transaction:
    """Transaction of a write job: a connection, and callbacks for after the commit."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.has_events = False
        self.is_forced = False
        self._after_commit: list[Callable[[], None]] = []
        self._after_rollback: list[Callable[[], None]] = []

    def emit(self, kind: str, experiment_id: int, trial_id: int | None = None, **data: Any) -> None:
        """Store an event for those who follow."""
        self.connection.execute(
            insert(tables.events).values(
                time=time.time(),
                experiment_id=experiment_id,
                trial_id=trial_id,
                kind=kind,
                data=data,
            )
        )
        self.has_events = True

    def force(self) -> None:
        """Let the commit be on disk before anybody hears of it, so that it survives a power cut."""
        self.is_forced = True

    def after_commit(self, action: Callable[[], None]) -> None:
        """Run `action` once the job's changes are on disk."""
        self._after_commit.append(action)

    def after_rollback(self, action: Callable[[], None]) -> None:
        """Run `action` if the job's changes are taken back."""
        self._after_rollback.append(action)

    def committed(self) -> None:
        """Run what was to follow the commit; an error there cannot undo it and is logged."""
        self._run(self._after_commit)

    def rolled_back(self) -> None:
        """Run what was to follow a rollback."""
        self._run(self._after_rollback)

    @staticmethod
    def _run(actions: list[Callable[[], None]]) -> None:
        for action in actions:
            try:
                action()
            except Exception:
                logger.exception("An action after a transaction failed.")


class _Job:
    def __init__(self, run: Callable[[Transaction], Any]) -> None:
        self.run = run
        self.future: Future[Any] = Future()
        self.transaction: Transaction | None = None
        self.result: Any = None


class Database:
    """SQLite in WAL mode.

    All changes go through `write`, in one thread: jobs that wait are committed together, the
    urgent ones first. Each job is all or nothing. Reads go on beside it and see the last commit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = DatabaseFiles(path)
        self._log_path = path.with_name(f"{path.name}-wal")
        self._broken: DatabaseUnavailableError | None = None
        self._writer_engine = make_engine(self._files, writes=True)
        self._reader_engine = make_engine(self._files, writes=False)
        try:
            self._prepare_schema()
            self._files.note_logs()
            # Kept open: where a process runs out of descriptors, what was committed can be forced.
            self._log = self._log_path.open("rb", buffering=0)
        except BaseException:
            self._writer_engine.dispose()
            raise
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, _Job | None]] = queue.PriorityQueue()
        self._on_commit: list[Callable[[bool], None]] = []
        self._thread = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> DatabaseUnavailableError | None:
        """Why nothing can be stored until the master starts again, if that is so."""
        return self._broken

    @property
    def num_waiting(self) -> int:
        """How many jobs wait for the writer thread."""
        return self._queue.qsize()

    def write(
        self, job: Callable[[Transaction], Result], *, is_urgent: bool = False
    ) -> "Future[Result]":
        """Queue a job for the writer thread; the future is done after the commit."""
        entry = _Job(job)
        self._queue.put((0 if is_urgent else 1, next(self._order), entry))
        return entry.future

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a connection that sees one consistent state."""
        with self._reader_engine.connect() as connection:
            yield connection

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    def on_commit(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(has_events)` in the writer thread after each commit."""
        self._on_commit.append(listener)

    def close(self) -> None:
        """Finish the queued jobs and close the connections."""
        self._queue.put((2, next(self._order), None))
        self._thread.join()
        # This frees no lock: SQLite's are on other files.
        self._log.close()
        self._writer_engine.dispose()
        self._reader_engine.dispose()

    def _prepare_schema(self) -> None:
        try:
            with self._writer_engine.begin() as connection:
                # One transaction: after a crash there is a whole schema or none.
                if not inspect(connection).get_table_names():
                    version = str(tables.SCHEMA_VERSION)
                    tables.metadata.create_all(connection)
                    connection.execute(
                        insert(tables.meta).values(key="schema_version", value=version)
                    )
                    watch_rows(connection)
                found = connection.execute(tables.VERSION).scalar()
        except DatabaseError as error:
            raise unreadable(self._path, error.orig) from error
        if found in _EARLIER_VERSIONS:
            self._upgrade(int(found))
        elif found != str(tables.SCHEMA_VERSION):
            raise DatabaseVersionError(
                f"The database {str(self._path)!r} must have version {tables.SCHEMA_VERSION}, but"
                f" has {found}. Nothing was changed. Hint: {self._way_on(found)}"
            )

    def _way_on(self, found: str | None) -> str:
        """Say what to do with a database of another version."""
        copies = [
            copy
            for version in range(1, tables.SCHEMA_VERSION + 1)
            if (copy := copy_of_version(self._path, version)).exists()
        ]
        if found is None or not copies:
            return "start the Paceline version that wrote it, or move the whole home away."
        return (
            "start the Paceline version that wrote it. To stay with this one, go back to the copy"
            " of before the upgrade: with the version that wrote the database, `paceline restore"
            f" {copies[-1]}`; then, with this one, `paceline up --set-aside`."
        )

    def _upgrade(self, version: int) -> None:
        # Alembic is slow to load, and seldom needed.
        from paceline.master.store._upgrades import back_up_before_upgrade, upgrade

        copy = back_up_before_upgrade(self._path, version)
        logger.warning(
            "The database is brought from version %d to %d; %s holds it as it was.",
            version,
            tables.SCHEMA_VERSION,
            copy,
        )
        with self._writer_engine.begin() as connection:
            upgrade(connection, version)
            watch_rows(connection)
            connection.execute(
                update(tables.meta)
                .where(tables.meta.c.key == "schema_version")
                .values(value=str(tables.SCHEMA_VERSION))
            )

    def _run(self) -> None:
        is_open = True
        while is_open:
            jobs, is_open = self._next_jobs()
            self._look_at_files()
            if jobs:
                try:
                    self._commit(jobs)
                except Exception:
                    # Without this thread, nothing would be stored any more, without a word.
                    logger.exception("A commit failed.")

    def _look_at_files(self) -> None:
        try:
            self._files.check()
        except DatabaseLostError as error:
            if self._broken is None:
                logger.error("%s", error)
                self._broken = error
        except OSError:
            # A disk that cannot answer now is no reason to stop for good.
            logger.exception("The files of the database cannot be looked at.")

    def _next_jobs(self) -> tuple[list[_Job], bool]:
        try:
            _, _, job = self._queue.get(timeout=_LOOK_S)
        except queue.Empty:
            return [], True
        if job is None:
            return [], False
        jobs = [job]
        while len(jobs) < _MAX_JOBS_PER_COMMIT:
            try:
                _, _, job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return jobs, False
            jobs.append(job)
        return jobs, True

    def _commit(self, jobs: list[_Job]) -> None:
        done: list[_Job] = []
        try:
            if self._broken is not None:
                raise self._broken
            with self._writer_engine.begin() as connection:
                for job in jobs:
                    if self._run_job(job, connection):
                        done.append(job)
            if any(job.transaction is not None and job.transaction.is_forced for job in done):
                self._force_log()
        except Exception as error:
            for job in done:
                assert job.transaction is not None
                job.transaction.rolled_back()
            for job in jobs:
                # Whoever waits may have given up at this moment, or was told before.
                with suppress(InvalidStateError):
                    job.future.set_exception(error)
            return
        for job in done:
            assert job.transaction is not None
            job.transaction.committed()
            job.future.set_result(job.result)
        has_events = any(job.transaction is not None and job.transaction.has_events for job in done)
        for listener in self._on_commit:
            try:
                listener(has_events)
            except Exception:
                logger.exception("A listener of commits failed.")

    def _force_log(self) -> None:
        """Force what was committed to disk: it is in the log, or was forced with the database.

        Without this, a commit survives the end of the process, and a power cut only from SQLite's
        next checkpoint on.
        """
        try:
            _force(self._log.fileno())
        except OSError as error:
            # What the disk refused once may look written afterwards, and be lost all the same.
            self._broken = DatabaseUnavailableError(
                f"The database cannot be forced to disk: {error}. Hint: start the master again."
            )
            raise self._broken from error

    def _run_job(self, job: _Job, connection: Connection) -> bool:
        if not job.future.set_running_or_notify_cancel():
            return False
        transaction = job.transaction = Transaction(connection)
        try:
            with connection.begin_nested():
                job.result = job.run(transaction)
        except Exception as error:
            transaction.rolled_back()
            job.future.set_exception(error)
            if not _is_in_transaction(connection):
                # A full disk ends the transaction itself: what other jobs wrote is gone as well.
                raise DatabaseUnavailableError(
                    f"The database cannot be written: {getattr(error, 'orig', error)}."
                ) from error
            return False
        return True


def copy_of_version(path: Path, version: int) -> Path:
    """Return where a database is copied to before it is brought up from a version."""
    return path.with_name(f"{path.stem}.version-{version}{path.suffix}")


def unreadable(path: Path, reason: BaseException | None) -> DatabaseVersionError:
    """Return the error for a database that cannot be read, for a reason that SQLite gave."""
    problem = f"{str(path)!r} must be a Paceline database, but it cannot be read as one ({reason})."
    if type(reason) is not sqlite3.DatabaseError:
        return DatabaseVersionError(
            f"{problem} Hint: move the whole home away, or set another one."
        )
    return DatabaseDamagedError(
        f"{problem} Nothing was changed. Hint: make it again from the files of the home"
        " (`paceline home check --fix`), restore it from a backup, or start with"
        " `paceline up --set-aside`, which moves it and the files that belong to it into"
        f" {str(path.parent / 'set_aside')!r} and deletes nothing."
    )


def _is_in_transaction(connection: Connection) -> bool:
    driver: Any = connection.connection.dbapi_connection
    return bool(driver.in_transaction)
