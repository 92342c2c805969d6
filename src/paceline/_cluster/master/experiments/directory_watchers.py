"""Following the run directories of a directory, live; base of such watchers."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from paceline._base.files import NotRegularFileError
from paceline._base.journal_reading_and_writing import Entry
from paceline._base.journal_records import MediaFile, decode_record
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._base.run_tail_and_files import FileShipping, LostFileError, RunTail
from paceline._cluster.master.experiments.unmanaged_runs import Unmanaged, open_directory_runs
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.run_files import MAX_FILE_BYTES, FileContents, put_file
from paceline._cluster.messages.runner_messages import RunBatch
from paceline.core._read_runs import moved_storage

logger = logging.getLogger(__name__)

_SCAN_S = 1.0
_MAX_RECORDS = 1000
# One run with much to read must not keep the others waiting.
_TURN_BYTES = 4 * 2**20
# A run that is over is looked at again now and then: on a file system that keeps locks to one
# machine, a run on another one looks dead while it is not.
_SETTLED_S = 10.0
# Time of errors after which a run has ended here: its disk may be away for a while.
_GIVEN_UP_S = 60.0
_GONE = "The directory of the run is gone: it was moved or removed, or its disk is not there."
_MAX_REASON = 500
# Permanent errors: the directory is damaged, of another version, or an attempt of a master;
# another look would end in the same way.
_UNUSABLE = (
    ArithmeticError, NotRegularFileError, RecursionError, TypeError, ValueError,
    msgspec.MsgspecError,
)  # fmt: skip


class DirectoryWatcher(ABC):
    """Thread that looks at a directory about once a second.

    Args:
        directory: The directory; it may be made later.
        database: The database for the records.
        unmanaged: The ingest of unmanaged runs.
        contents: The place for the contents of files.
    """

    def __init__(
        self, directory: Path, database: Database, unmanaged: Unmanaged, contents: FileContents
    ) -> None:
        self._directory = directory
        self._database = database
        self._unmanaged = unmanaged
        self._contents = contents
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop following; all records read so far are stored."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @abstractmethod
    def scan(self) -> None:
        """Look at everything once; returns early when `_stopping` is set."""

    def has_more(self) -> bool:
        """Return whether the last scan left something to read."""
        return False

    def _run(self) -> None:
        while True:
            try:
                self.scan()
            except Exception:
                # The next scan may succeed, so the thread stays.
                logger.exception("What is in %s could not be read.", self._directory)
            if self._stopping.wait(0.0 if self.has_more() else _SCAN_S):
                return


class RunsWatcher(DirectoryWatcher):
    """Thread to ingest the records of runs in a directory, within about a second.

    Args:
        directory: It holds run directories, or is one; it may be made later.
        database: The database for their records.
        unmanaged: The ingest of unmanaged runs.
        contents: The place for the contents of their files.
    """

    def __init__(
        self, directory: Path, database: Database, unmanaged: Unmanaged, contents: FileContents
    ) -> None:
        super().__init__(directory, database, unmanaged, contents)
        self._runs: dict[Path, _Run] = {}
        self._skipped: dict[Path, int] = {}
        # Time of the first of the present errors, by run directory.
        self._failing: dict[Path, float] = {}
        self._is_first_scan = True

    def scan(self) -> None:
        """Look at every run once."""
        found = self._find()
        for path in found:
            if self._stopping.is_set():
                return
            self._follow(path)
        gone = (self._runs.keys() | self._failing.keys()) - found
        if self._is_first_scan:
            gone |= self._known() - found
            self._is_first_scan = False
        for path in gone:
            # Directory removed: no further records can come, so the run ends here.
            self._leave_out(path, _GONE)
            self._failing.pop(path, None)

    def has_more(self) -> bool:
        """Return whether the last scan left something to read."""
        return any(run.tail.has_more for run in self._runs.values())

    def _find(self) -> set[Path]:
        """Return the run directories, except those marked unusable and unchanged since."""
        own = _changed_at(self._directory)
        if own is not None:
            stamps = {self._directory: own}
        else:
            paths = self._directory.iterdir() if self._directory.is_dir() else ()
            stamps = {path: stamp for path in paths if (stamp := _changed_at(path)) is not None}
        return {path for path, stamp in stamps.items() if self._skipped.get(path) != stamp}

    def _known(self) -> set[Path]:
        """Return the run directories here with open runs in the database."""
        with self._database.read() as connection:
            rows = open_directory_runs(connection)
        paths = {Path(row.external_path) for row in rows}
        return {path for path in paths if self._directory in (path, path.parent)}

    def _follow(self, path: Path) -> None:
        try:
            run = self._runs.get(path) or self._open(path)
            if run is not None and run.is_due():
                self._take_up(run)
            self._failing.pop(path, None)
        except _UNUSABLE as error:
            logger.warning("The run directory %s is left out: %s", path, error)
            # Stamp of `run.json`: the directory is tried again only after this file changes.
            self._skipped[path] = _changed_at(path) or 0
            self._failing.pop(path, None)
            self._leave_out(path, f"The directory of the run cannot be read: {error}")
        except Exception as error:
            if path not in self._failing:
                logger.exception("The run directory %s cannot be followed now.", path)
            since = self._failing.setdefault(path, time.monotonic())
            if time.monotonic() - since > _GIVEN_UP_S:
                self._leave_out(path, f"The directory of the run cannot be followed: {error}")
            # Stored marks are unknown after an error; the next scan reads them from the database.
            self._runs.pop(path, None)

    def _open(self, path: Path) -> "_Run | None":
        directory = RunDirectory.open(path)
        if not directory.journal_keys():
            return None  # it has only just begun, or never did
        info = directory.read_info()
        reply = self._database.write(
            lambda transaction: self._unmanaged.register(transaction, info, str(path))
        ).result()
        marks = {JournalKey(m.attempt, m.generation, m.rank): m.sequence for m in reply.marks}
        files = FileShipping(directory, partial(self._copy_file, info.run_id), ())
        run = self._runs[path] = _Run(directory, info.run_id, RunTail(directory, marks), files)
        run.moved.update(moved_storage(directory, info))
        return run

    def _take_up(self, run: "_Run") -> None:
        run.note_look()
        # Asked before reading: all that a dead run wrote is there.
        is_alive = run.directory.is_alive()
        num_left = _TURN_BYTES
        while num_left > 0 and not self._stopping.is_set():
            found = run.tail.read(_MAX_RECORDS, max_bytes=num_left)
            num_left -= run.tail.num_read
            is_rest = not run.tail.has_more
            if is_rest and not is_alive:
                found += run.tail.finish()
            batches = [_decode(key, entries, run.files) for key, entries in found]
            if batches or is_alive != run.was_alive:
                self._store(run, batches, is_alive=is_alive or not is_rest)
            if is_rest:
                run.was_alive = is_alive
                return

    def _copy_file(self, run_id: str, file: MediaFile, content: IO[bytes]) -> None:
        """Take in a file of a run.

        Raises:
            LostFileError: It has another content than recorded, or cannot be stored.
        """
        if file.size > MAX_FILE_BYTES:
            raise LostFileError(f"must have at most {MAX_FILE_BYTES:,} bytes")
        try:
            if self._contents.keep(file.digest) is None:
                self._contents.copy(content, file.digest)
        except ValueError as error:
            raise LostFileError(f"has changed: {error}") from error
        except OSError as error:
            # A full disk: the records behind it take less room.
            raise LostFileError(f"cannot be kept ({error})") from error
        self._database.write(
            lambda transaction: put_file(
                transaction.connection,
                self._unmanaged.reported_trial(transaction.connection, run_id),
                file.path,
                file.digest,
                file.size,
                file.media_type,
            )
        ).result()

    def _leave_out(self, path: Path, reason: str) -> None:
        """Stop following a run, and end the run unless ended before."""
        run = self._runs.pop(path, None)
        run_id = None if run is None else run.run_id
        if any(other.run_id == run_id for other in self._runs.values()):
            run_id = None  # moved within the directory, and followed in its new place
        try:
            self._database.write(
                lambda transaction: self._unmanaged.leave_out(
                    transaction, str(path), reason[:_MAX_REASON], run_id=run_id
                )
            ).result()
        except Exception:
            logger.exception("The end of the run %s could not be stored.", path)

    def _store(self, run: "_Run", batches: list[RunBatch], *, is_alive: bool) -> None:
        self._database.write(
            lambda transaction: self._unmanaged.take(
                transaction, run.run_id, batches, is_alive=is_alive, moved=run.moved
            )
        ).result()


class _Run:
    """Run being followed; `was_alive` is None before the first look."""

    def __init__(
        self, directory: RunDirectory, run_id: str, tail: RunTail, files: FileShipping
    ) -> None:
        self.directory = directory
        self.run_id = run_id
        self.tail = tail
        self.files = files
        self.moved: dict[str, str] = {}
        self.was_alive: bool | None = None
        self._journals_changed_at = 0
        self._next_look = 0.0

    def is_due(self) -> bool:
        """Whether there may be news: always while the run is alive, else seldom."""
        if self.tail.has_more or self.was_alive is not False or time.monotonic() >= self._next_look:
            return True
        return _journals_changed_at(self.directory) != self._journals_changed_at

    def note_look(self) -> None:
        """Record the time and the journals' stamp; called before the journals are read."""
        self._next_look = time.monotonic() + _SETTLED_S
        self._journals_changed_at = _journals_changed_at(self.directory)


def _decode(key: JournalKey, entries: list[Entry], files: FileShipping) -> RunBatch:
    records = [(entry.sequence, decode_record(files.ship(entry.payload))) for entry in entries]
    return RunBatch(key.attempt, key.generation, key.rank, records)


def _changed_at(path: Path) -> int | None:
    """Return the change time of `run.json` in ns; None for other directories."""
    try:
        return (path / "run.json").stat().st_mtime_ns
    except OSError:
        return None


def _journals_changed_at(directory: RunDirectory) -> int:
    """Return the change time of the journal directory in ns: new attempts change this stamp."""
    try:
        return (directory.path / "journal").stat().st_mtime_ns
    except OSError:
        return 0
