"""Following the run directories of a directory, live.

Following the TensorBoard log directories of a directory, live: each is shown as a run.

Base of the threads that follow what scripts write into a directory.
"""

import hashlib
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import msgspec

from paceline._base.files import NotRegularFileError
from paceline._base.journal_reading_and_writing import Entry
from paceline._base.journal_records import (
    AnyRecord,
    MediaFile,
    MediaReported,
    MetricsReported,
    decode_record,
)
from paceline._base.run_directory import (
    FileShipping,
    JournalKey,
    LostFileError,
    RunDirectory,
    RunTail,
)
from paceline._cluster.master.experiments.logged_runs import LoggedRuns
from paceline._cluster.master.experiments.unmanaged_runs import (
    Unmanaged,
    experiment_of_run,
    open_directory_runs,
    run_reply,
)
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.run_files import MAX_FILE_BYTES, FileContents, put_file
from paceline._cluster.messages.runner_messages import RunBatch
from paceline.core._read_runs import moved_storage
from paceline.importers._run_writer import RunFiles
from paceline.importers._tensorboard_logs import LogDirectoryReader, is_event_file

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


# Directories are looked for less often than new points, as a tree may be large.
_SEARCH_S = 5.0
_MAX_DIRECTORIES, _MAX_DEPTH = 20_000, 8
# Event files have no end: one that is silent for so long counts as completed.
_QUIET_S = 600.0
_MAX_NAME = 200


class TensorboardWatcher(DirectoryWatcher):
    """Thread to show TensorBoard log directories as runs, within seconds.

    Directories of runs (with `run.json`) and links are left out.

    Args:
        directory: It has event files, or directories below it have; it may be made later.
        database: The database for the records.
        unmanaged: The ingest of unmanaged runs.
        contents: Takes images and audio.
    """

    def __init__(
        self, directory: Path, database: Database, unmanaged: Unmanaged, contents: FileContents
    ) -> None:
        super().__init__(directory, database, unmanaged, contents)
        self._runs = LoggedRuns(unmanaged)
        self._logs: dict[Path, _Log] = {}
        self._next_search = 0.0
        self._warned: set[str] = set()

    def scan(self) -> None:
        """Look at every log directory once."""
        if time.monotonic() >= self._next_search:
            self._search()
            self._next_search = time.monotonic() + _SEARCH_S
        for path, log in list(self._logs.items()):
            if self._stopping.is_set():
                return
            try:
                self._follow(log)
            except Exception as error:
                # What is stored is unknown after an error; a new reader begins behind it.
                self._logs[path] = _Log(self._directory, path)
                self._warn(f"The TensorBoard logs in {path} could not be read: {error!r}")

    def _search(self) -> None:
        found, num_looked = set(), 0
        for folder, folders, names in os.walk(self._directory, followlinks=False):
            path = Path(folder)
            num_looked += 1
            is_deep = len(path.relative_to(self._directory).parts) >= _MAX_DEPTH
            if "run.json" in names or is_deep or num_looked > _MAX_DIRECTORIES:
                folders.clear()
            folders[:] = [name for name in folders if not (path / name).is_symlink()]
            if "run.json" not in names and any(map(is_event_file, names)):
                found.add(path)
        if num_looked > _MAX_DIRECTORIES:
            self._warn(
                f"{self._directory} has more than {_MAX_DIRECTORIES} directories: TensorBoard logs"
                " in the others are not shown. Hint: name a directory further below by --runs."
            )
        for path in sorted(found - self._logs.keys()):
            self._logs[path] = _Log(self._directory, path)
        for path in self._logs.keys() - found:
            self._finish(self._logs.pop(path))

    def _follow(self, log: "_Log") -> None:
        stamps = log.stamps()
        if stamps == log.seen:
            newest = max((changed for _, changed in stamps.values()), default=0.0)
            if time.time() - newest > _QUIET_S:
                self._finish(log)
            return
        try:
            for name in stamps:
                if stamps[name] != log.seen.get(name):
                    self._read(log, name)
        except ImportError as error:
            self._warn(f"The TensorBoard logs in {self._directory} are not shown: {error}")
        log.seen = stamps

    def _read(self, log: "_Log", name: str) -> None:
        file = log.files.get(name)
        if file is None:
            with self._database.read() as connection:
                known = experiment_of_run(connection, log.run_id)
                marks = [] if known is None else run_reply(connection, known.id).marks
            media = _MediaFiles(self._contents)
            file = log.files[name] = _EventFile(log.path, name, media, marks)
        records = file.new_records()
        while (slice_ := list(islice(records, _MAX_RECORDS))) and not self._stopping.is_set():
            self._store(log, file, slice_)
        for problem in file.take_problems():
            self._warn(problem)

    def _store(self, log: "_Log", file: "_EventFile", records: list[tuple[int, AnyRecord]]) -> None:
        def write(transaction: Transaction) -> None:
            connection = transaction.connection
            if experiment_of_run(connection, log.run_id) is None:
                self._runs.open(
                    transaction, log.run_id, name=log.name, created=records[0][1].time,
                    lease_s=2 * _QUIET_S, hparams=file.reader.hparams,
                )  # fmt: skip
            elif file.reader.hparams:
                self._runs.set_hparams(transaction, log.run_id, file.reader.hparams)
            trial = self._runs.get(connection, log.run_id).trial
            for each in file.media.taken:
                put_file(connection, trial, each.path, each.digest, each.size, each.media_type)
            self._unmanaged.take(
                transaction, log.run_id, [RunBatch(0, 0, file.rank, records)],
                is_alive=True, lease_s=2 * _QUIET_S, is_trusted=False,
            )  # fmt: skip

        self._database.write(write).result()
        file.media.taken.clear()
        log.is_finished = False

    def _finish(self, log: "_Log") -> None:
        if log.is_finished or not log.files:
            return
        log.is_finished = True

        def write(transaction: Transaction) -> None:
            if experiment_of_run(transaction.connection, log.run_id) is not None:
                self._runs.finish(transaction, log.run_id, "completed")

        self._database.write(write).result()

    def _warn(self, text: str) -> None:
        """Log a warning once; a damaged tree must not fill the log."""
        if text not in self._warned and len(self._warned) < _MAX_RECORDS:
            self._warned.add(text)
            logger.warning("%s", text)


class _Log:
    """A log directory that is followed.

    Attributes:
        seen: Size and change time of each event file at the last look.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        place = path.relative_to(root)
        self.name = (place.as_posix() if place.parts else path.name)[-_MAX_NAME:]
        self.run_id = "tensorboard-" + hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
        self.files: dict[str, _EventFile] = {}
        self.seen: dict[str, tuple[int, float]] = {}
        self.is_finished = False

    def stamps(self) -> dict[str, tuple[int, float]]:
        """Return size and change time of the event files, in the order of their names."""
        try:
            with os.scandir(self.path) as entries:
                stats = {
                    each.name: each.stat(follow_symlinks=False)
                    for each in entries
                    if is_event_file(each.name) and each.is_file(follow_symlinks=False)
                }
        except OSError:
            return self.seen
        return {name: (stats[name].st_size, stats[name].st_mtime) for name in sorted(stats)}


class _MediaFiles(RunFiles):
    """Takes contents up into the master's own files."""

    def __init__(self, contents: FileContents) -> None:
        super().__init__(None)
        self._contents = contents
        self.taken: list[MediaFile] = []

    def add_media(
        self, name: str, steps_completed: int, data: bytes, suffix: str, **facts: Any
    ) -> MediaFile:
        self._contents.put(data)
        self.taken.append(super().add_media(name, steps_completed, data, suffix, **facts))
        return self.taken[-1]


class _OneFileReader(LogDirectoryReader):
    def __init__(self, directory: Path, name: str, files: RunFiles) -> None:
        super().__init__(directory, files)
        self._name = name

    def event_files(self) -> list[str]:
        return [self._name]


class _EventFile:
    """An event file as a journal: the number of a record is that of its last point in the file.

    The same file gives the same numbers however it is cut into rows, so that a restarted master
    reads it again from the beginning, and stores what is new.

    Attributes:
        rank: Tells the journals of the log's files apart; 0 is for the start and the end.
    """

    def __init__(self, path: Path, name: str, media: _MediaFiles, marks: Iterable[Any]) -> None:
        self.media = media
        self.reader = _OneFileReader(path, name, media)
        self.rank = 1 + crc32(os.fsencode(name)) % (2**31 - 1)
        self._known = max((each.sequence for each in marks if each.rank == self.rank), default=-1)
        self._number = -1
        self._num_problems = 0

    def new_records(self) -> Iterable[tuple[int, AnyRecord]]:
        """Yield further records with their numbers."""
        for record in self.reader.read():
            begin = self._number
            self._number += len(record.metrics) if isinstance(record, MetricsReported) else 1
            if self._number <= self._known:
                continue
            if isinstance(record, MetricsReported) and begin < self._known:
                left = list(record.metrics.items())[self._known - begin :]
                record = MetricsReported(
                    time=record.time, group=record.group, steps_completed=record.steps_completed,
                    metrics=dict(left),
                )  # fmt: skip
            if isinstance(record, (MetricsReported, MediaReported)):
                yield self._number, record

    def take_problems(self) -> list[str]:
        """Return the problems since the last call."""
        new = self.reader.problems[self._num_problems :]
        self._num_problems = len(self.reader.problems)
        return new
