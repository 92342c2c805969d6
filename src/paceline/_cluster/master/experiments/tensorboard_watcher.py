"""Following the TensorBoard log directories of a directory, live: each is shown as a run."""

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

from paceline._base.journal_records import AnyRecord, MediaFile, MediaReported, MetricsReported
from paceline._cluster.master.experiments.directory_watchers import _MAX_RECORDS, DirectoryWatcher
from paceline._cluster.master.experiments.logged_runs import LoggedRuns
from paceline._cluster.master.experiments.unmanaged_runs import (
    Unmanaged,
    experiment_of_run,
    run_reply,
)
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.run_files import FileContents, put_file
from paceline._cluster.messages.runner_messages import RunBatch
from paceline.importers._run_writer import RunFiles
from paceline.importers._tensorboard_logs import LogDirectoryReader, is_event_file

logger = logging.getLogger(__name__)


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
