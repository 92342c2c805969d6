"""Database of the master: a single writer thread with group commit, and concurrent readers."""

import itertools
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import QueuePool, StaticPool

from paceline._base.files import open_private
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.reach import REACH, changing_only, current_reach, show_only
from paceline._cluster.master.store.recovery_rows import watch_rows

logger = logging.getLogger(__name__)


class DatabaseUnavailableError(RuntimeError):
    """Error raised when a whole transaction was rolled back, not only a single job's part."""


class DatabaseLostError(DatabaseUnavailableError):
    """Error raised when a file of the open database was deleted or replaced."""


class DatabaseFiles:
    """Identities of the open database's files, compared with the files at their paths.

    SQLite continues on deleted files: changes would be stored where nobody finds them.

    Args:
        path: The path of the database.
        makes: Whether an empty file is made if there is none.

    Raises:
        DatabaseLostError: There is none, and none is to be made.
    """

    def __init__(self, path: Path, *, makes: bool = True) -> None:
        self.path = path
        if makes:
            # Made here, as SQLite gives the files beside it the same mode.
            open_private(path, "ab").close()
            path.chmod(0o600)
        elif not path.exists():
            raise DatabaseLostError(f"The database {str(path)!r} must be there, but is missing.")
        self._identities = {path: _identity(path)}

    def note_logs(self) -> None:
        """Record the `-wal` and `-shm` files of SQLite; a connection must stay open."""
        for end in ("-wal", "-shm"):
            log = self.path.with_name(f"{self.path.name}{end}")
            self._identities[log] = _identity(log)

    def open(self) -> sqlite3.Connection:
        """Open a connection to the existing database; a missing file is not created again.

        Raises:
            DatabaseLostError: A file was replaced by another one.
        """
        self.check()
        address = f"file:{quote(str(self.path.absolute()))}?mode=rw"
        # The engine's pool hands a connection to several threads, one after the other.
        return sqlite3.connect(address, uri=True, timeout=30, check_same_thread=False)

    def check(self) -> None:
        """Check the identity of each file against the identity recorded for its path.

        Raises:
            DatabaseLostError: One is not.
        """
        for path, identity in self._identities.items():
            if _identity(path) != identity:
                raise DatabaseLostError(
                    f"The database's file {str(path)!r} was deleted or replaced while the master"
                    " runs, so nothing can be stored. Hint: stop the master (`paceline down`), make"
                    " the database again from its records (`paceline home check --fix`), and start"
                    " the master (`paceline up`)."
                )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


class DatabaseReader:
    """Read access to a database kept open by a `Database` in this or another process.

    Raises:
        DatabaseLostError: It is missing.
    """

    def __init__(self, path: Path, files: DatabaseFiles | None = None) -> None:
        files = files or DatabaseFiles(path, makes=False)
        self._engine = make_engine(files, writes=False)
        # Connections whose views stay for the next request of the same reach.
        self._restricted = make_engine(files, writes=False)

    @contextmanager
    def read(self, *, everything: bool = False) -> Iterator[sa.Connection]:
        """Open a connection with a read transaction: all its reads see the same state.

        Args:
            everything: Show rows beyond the sender's reach too, to count or to schedule by them.
        """
        reach = None if everything else current_reach()
        if reach is None or reach.sees is None:
            with self._engine.connect() as connection:
                yield connection
            return
        with self._restricted.connect() as connection:
            show_only(connection, reach)
            yield connection

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
        self._restricted.dispose()


def make_engine(files: DatabaseFiles, *, writes: bool) -> sa.Engine:
    """Return an engine for the writer (a single shared connection) or for pooled readers."""
    pool: dict[str, Any] = (
        {"poolclass": StaticPool}
        if writes
        else {"poolclass": QueuePool, "pool_size": 8, "max_overflow": 32}
    )
    engine = sa.create_engine(
        "sqlite://",
        creator=files.open,
        json_serializer=_dump_json,
        # An error of a statement is logged: it must not hold the values to store.
        hide_parameters=True,
        json_deserializer=load_json,
        **pool,
    )

    # The driver's own transaction control knows no savepoints that span statements, so it is
    # switched off and BEGIN is sent here.
    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        try:
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            # The pool forgets it: a damaged file would stay open.
            connection.close()
            raise

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # IMMEDIATE takes the write lock at once: upgrading a read lock later can fail.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def load_json(text: str) -> Any:
    """Return the decoded value of a JSON column."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        # The stricter of the two knows no half of a surrogate pair, and is several times faster.
        return json.loads(text)


def _dump_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def dump_json_fast(value: Any) -> str:
    """Return a value of a JSON column whose text nobody searches.

    Raises:
        ValueError: It has a number that is not finite.
    """
    with suppress(TypeError, ValueError):
        text = msgspec.json.encode(value)
        # It writes numbers that are not finite as null, without a word.
        if b"null" not in text:
            return text.decode()
    return _dump_json(value)


Result = TypeVar("Result")

_MAX_JOBS_PER_COMMIT = 64
# Without changes to store, the writer looks this often whether the files are still there.
_LOOK_S = 1.0
_force = getattr(os, "fdatasync", os.fsync)  # not everywhere


class DatabaseVersionError(RuntimeError):
    """Raised when the database was written by another version of Paceline."""


class DatabaseDamagedError(DatabaseVersionError):
    """Raised when the database file is damaged, or no database at all."""


_EVENT = "INSERT INTO events (time, kind, data, experiment_id, trial_id) VALUES (?, ?, ?, ?, ?)"


class Transaction:
    """Transaction of a write job: a connection, and callbacks for after the commit."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.has_events = False
        self.is_forced = False
        self._after_commit: list[Callable[[], None]] = []
        self._after_rollback: list[Callable[[], None]] = []
        self._late_rows: dict[str, list[tuple[Any, ...]]] = {}

    def insert_late(self, statement: str, row: tuple[Any, ...]) -> None:
        """Insert a row at the end of the job, where many cost little more than one.

        Args:
            statement: In the driver's form, as rows of SQLAlchemy's cost several times as much.
            row: The values as SQLite stores them.
        """
        self._late_rows.setdefault(statement, []).append(row)

    def insert_late_rows(self) -> None:
        """Insert now what `insert_late` took, for a job that reads or deletes such rows."""
        late, self._late_rows = self._late_rows, {}
        for statement, rows in late.items():
            self.connection.exec_driver_sql(statement, rows)

    def emit(self, kind: str, experiment_id: int, trial_id: int | None = None, **data: Any) -> None:
        """Store an event for those who follow."""
        row = time.time(), kind, dump_json_fast(data), experiment_id, trial_id
        self.insert_late(_EVENT, row)
        self.has_events = True

    def force(self) -> None:
        """Force the commit to disk before its futures are done, to survive a power cut."""
        self.is_forced = True

    def after_commit(self, action: Callable[[], None]) -> None:
        """Run `action` once the job's changes are on disk."""
        self._after_commit.append(action)

    def after_rollback(self, action: Callable[[], None]) -> None:
        """Run `action` if the job's changes are taken back."""
        self._after_rollback.append(action)

    def committed(self) -> None:
        """Run the callbacks registered for after the commit; their errors are only logged."""
        self._run(self._after_commit)

    def rolled_back(self) -> None:
        """Run the callbacks registered for after a rollback."""
        self._run(self._after_rollback)

    @staticmethod
    def _run(actions: list[Callable[[], None]]) -> None:
        for action in actions:
            try:
                action()
            except Exception:
                # The transaction is committed: the other actions must follow all the same.
                logger.exception("An action after a transaction failed.")


class _Job:
    def __init__(self, run: Callable[[Transaction], Any]) -> None:
        self.run = run
        # The reach of the request that it is of.
        self.context = copy_context()
        self.future: Future[Any] = Future()
        self.transaction: Transaction | None = None
        self.result: Any = None


class Database:
    """SQLite in WAL mode.

    All changes go through `write`, in one thread: jobs that wait are committed together, the
    urgent ones first. Each job is all or nothing. Reads continue beside it and see the last commit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = DatabaseFiles(path)
        self._log_path = path.with_name(f"{path.name}-wal")
        self._broken: DatabaseUnavailableError | None = None
        self._writer_engine = make_engine(self._files, writes=True)
        self._reader = DatabaseReader(path, self._files)
        try:
            check_stored_version(path)
            self._prepare_schema()
            self._files.note_logs()
            # Kept open: where a process runs out of descriptors, commits can still be forced to
            # disk.
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
        """Error raised by all writes until the master restarts; None while writes work."""
        return self._broken

    @property
    def num_waiting(self) -> int:
        """How many jobs wait for the writer thread."""
        return self._queue.qsize()

    def write(
        self, job: Callable[[Transaction], Result], *, is_urgent: bool = False
    ) -> "Future[Result]":
        """Queue a job for the writer thread; the future is done after the commit.

        It is cancelled if the database was closed before.
        """
        entry = _Job(job)
        self._queue.put((0 if is_urgent else 1, next(self._order), entry))
        if not self._thread.is_alive():
            self._cancel_jobs()
        return entry.future

    def _cancel_jobs(self) -> None:
        with suppress(queue.Empty):
            while True:
                _, _, entry = self._queue.get_nowait()
                if entry is not None:
                    entry.future.cancel()

    def read(self, *, everything: bool = False) -> AbstractContextManager[sa.Connection]:
        """Open a connection with a read transaction: all its reads see the last commit.

        Args:
            everything: Show rows beyond the sender's reach too, to count or to schedule by them.
        """
        return self._reader.read(everything=everything)

    @property
    def path(self) -> Path:
        """Path of the database file."""
        return self._path

    def on_commit(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(has_events)` in the writer thread after each commit."""
        self._on_commit.append(listener)

    def close(self) -> None:
        """Finish the queued jobs and close the connections."""
        # Priority 2: the end marker is taken only after all queued jobs.
        self._queue.put((2, next(self._order), None))
        self._thread.join()
        self._cancel_jobs()
        # Closing the log frees no lock: SQLite holds its locks on the other files.
        self._log.close()
        self._writer_engine.dispose()
        self._reader.close()

    def _prepare_schema(self) -> None:
        try:
            with self._writer_engine.begin() as connection:
                # Schema creation in one transaction: a crash leaves a whole schema or none.
                if not sa.inspect(connection).get_table_names():
                    version = str(tables.SCHEMA_VERSION)
                    user_tables.metadata.create_all(connection)
                    connection.execute(
                        sa.insert(tables.meta).values(key="schema_version", value=version)
                    )
                    watch_rows(connection)
                found = connection.execute(tables.VERSION).scalar()
        except DatabaseError as error:
            raise unreadable(self._path, error.orig) from error
        if earlier := check_version(self._path, found):
            self._upgrade(earlier)

    def _upgrade(self, version: int) -> None:
        # Alembic is slow to load, and seldom needed.
        from paceline._cluster.master.store.upgrades import back_up_before_upgrade, upgrade

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
                sa.update(tables.meta)
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
                # Callbacks undo in-memory effects of jobs whose own savepoints had succeeded.
                job.transaction.rolled_back()
            for job in jobs:
                # The waiting caller may have given up at this moment, or has its answer already.
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
        """Force the WAL file to disk: commits are in the log, or were forced at a checkpoint.

        Without this, a commit survives the end of the process, but a power cut only after SQLite's
        next checkpoint.
        """
        try:
            _force(self._log.fileno())
        except OSError as error:
            # Fsync errors are final: after a failed fsync, lost pages may look written.
            self._broken = DatabaseUnavailableError(
                f"The database cannot be forced to disk: {error}. Hint: start the master again."
            )
            raise self._broken from error

    def _run_job(self, job: _Job, connection: sa.Connection) -> bool:
        # Claim first: from here on the waiting thread can no longer cancel the job.
        if not job.future.set_running_or_notify_cancel():
            return False
        transaction = job.transaction = Transaction(connection)
        try:
            # Savepoint per job: a failed job must not undo the other jobs of the transaction.
            with connection.begin_nested(), changing_only(connection, job.context.get(REACH)):
                job.result = job.context.run(job.run, transaction)
                transaction.insert_late_rows()
        except Exception as error:
            transaction.rolled_back()
            job.future.set_exception(error)
            if not _is_in_transaction(connection):
                # A full disk ends the transaction itself: the writes of other jobs are gone as
                # well.
                raise DatabaseUnavailableError(
                    f"The database cannot be written: {getattr(error, 'orig', error)}."
                ) from error
            return False
        return True


def check_stored_version(path: Path) -> None:
    """Refuse a database of an unknown schema version, before it is opened for writing.

    Raises:
        DatabaseVersionError: This version of Paceline neither takes nor upgrades it.
    """
    if not path.exists() or not path.stat().st_size:
        return
    # Without a log, nobody has it open, and SQLite would leave an empty log behind.
    mode = "ro" if path.with_name(f"{path.name}-wal").exists() else "ro&immutable=1"
    if path.with_name(f"{path.name}-journal").exists():
        mode = "rw"  # read only once an interrupted change is taken back
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=30)) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                query = "SELECT value FROM meta WHERE key = 'schema_version'"
                check_version(path, *(connection.execute(query).fetchone() or [None]))
    except sqlite3.DatabaseError as error:
        raise unreadable(path, error) from error


def check_version(path: Path, found: str | None) -> int | None:
    """Return the version to upgrade a database from; None for one of the current version.

    Raises:
        DatabaseVersionError: This version of Paceline neither takes nor upgrades it.
    """
    first, current = tables.FIRST_SCHEMA_VERSION, tables.SCHEMA_VERSION
    known = {str(version): version for version in range(first, current)}
    if found in known or found == str(current):
        return known.get(found)
    hint = "start the Paceline version that wrote it, or move the whole home away."
    copies = [
        copy for one in range(first, current + 1) if (copy := copy_of_version(path, one)).exists()
    ]
    if copies and str(found).isdecimal() and int(str(found)) > current:
        hint = (
            "start the Paceline version that wrote it. To stay with this one, go back to the copy"
            " of before the upgrade: with the version that wrote the database, `paceline restore"
            f" {copies[-1]}`; then, with this one, `paceline up --set-aside`."
        )
    allowed = f"version {current}" if first == current else f"a version from {first} to {current}"
    raise DatabaseVersionError(
        f"The database {str(path)!r} must have {allowed}, but has {found}. Nothing was changed."
        f" Hint: {hint}"
    )


def copy_of_version(path: Path, version: int) -> Path:
    """Return the path of the copy made before a database is upgraded from a version."""
    return path.with_name(f"{path.stem}.version-{version}{path.suffix}")


def unreadable(path: Path, reason: BaseException | None) -> DatabaseVersionError:
    """Return the error for an unreadable database; `reason` is SQLite's error."""
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


def _is_in_transaction(connection: sa.Connection) -> bool:
    driver: Any = connection.connection.dbapi_connection
    return bool(driver.in_transaction)


_KEY = "cluster_id"


def settle_cluster_id(database: Database, in_file: str) -> str:
    """Return the cluster id in the database; if there is none, store and return the file's id."""
    with database.read() as connection:
        stored = read_cluster_id(connection)
    if stored is None:
        row = sa.insert(tables.meta).values(key=_KEY, value=in_file)
        database.write(lambda transaction: transaction.connection.execute(row)).result()
        return in_file
    return stored


def read_cluster_id(connection: sa.Connection) -> str | None:
    """Return the cluster id in the database, None if there is none."""
    value: str | None = connection.scalar(
        sa.select(tables.meta.c.value).where(tables.meta.c.key == _KEY)
    )
    return value
