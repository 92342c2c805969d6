"""Writer of imported runs: directories that grow with their source; contents of their files."""

import fcntl
import hashlib
import mimetypes
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from paceline._base import journal_records as records
from paceline._base.files import (
    open_regular_below,
    opened_directory,
    replacing_atomically,
    sync_directory,
    write_atomically,
)
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import JournalKey, RunDirectory, RunInfo, check_file_path
from paceline.core._arguments import recordable
from paceline.storage._directory_storage import DirectoryStorage

_CHUNK_BYTES = 1024 * 1024
_UNFIT_NAME = re.compile(r"[^A-Za-z0-9._/-]+")
_KINDS = ("image", "audio", "video")


def kind_of(media_type: str) -> str:
    """Return the kind of media for a MIME type: "image", "audio", "video", "html" or "file"."""
    if media_type == "text/html":
        return "html"
    first = media_type.partition("/")[0]
    return first if first in _KINDS and media_type != "image/svg+xml" else "file"


def files_below(root: Path) -> Iterator[str]:
    """Yield the relative POSIX paths of the regular files below a directory, without links."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not os.path.islink(Path(folder, name)))
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix()


def links_below(root: Path) -> Iterator[str]:
    """Yield the relative POSIX paths of links below a directory: they are not followed."""
    for folder, folders, names in os.walk(root, followlinks=False):
        for name in sorted([*folders, *names]):
            if os.path.islink(Path(folder, name)):
                yield Path(folder, name).relative_to(root).as_posix()


class RunFiles:
    """Takes up the files of one run.

    Args:
        root: The `files` directory of the run; None only computes digests, and writes nothing.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self.num_files = 0

    def beside(self, name: str) -> "RunFiles":
        """Return one for another directory of the same run."""
        return RunFiles(None if self._root is None else self._root.parent / name)

    def add_media(
        self, name: str, steps_completed: int, data: bytes, suffix: str, **facts: Any
    ) -> records.MediaFile:
        """Store the content of media under its own name, and return the record of the file.

        Args:
            name: The name of the media.
            steps_completed: The step.
            data: The content.
            suffix: The ending of the file's name, with its dot.
            facts: Numbers and texts that describe it; `caption` and `index` have places of
                their own.
        """
        caption, index = facts.pop("caption", None), facts.pop("index", 0)
        digest = hashlib.sha256(data).hexdigest()
        folder = "/".join(part for part in _UNFIT_NAME.sub("-", name).split("/") if part.strip("."))
        path = f"media/{folder[:200]}/{steps_completed}-{index}-{digest[:12]}{suffix}"
        if self._root is not None and not (self._root / path).exists():
            (self._root / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._root / path, data)
        return self._taken(path, digest, len(data), caption, facts)

    def copy(
        self, store: Path, source: str, path: str, caption: str | None = None
    ) -> records.MediaFile:
        """Copy a file of a store, and return its record.

        Args:
            store: The directory below which no link is followed.
            source: The path of the file in it.
            path: The path below the run's files.
            caption: A text for people.

        Raises:
            ValueError: One of the paths leads outside.
            OSError: The file cannot be read, or is no regular file.
        """
        digest, size = hashlib.sha256(), 0
        with ExitStack() as stack:
            directory = stack.enter_context(opened_directory(store))
            file = stack.enter_context(open_regular_below(directory, check_file_path(source)))
            written: IO[bytes] | None = None
            if self._root is not None:
                place = self._root / check_file_path(path)
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # The block that is entered last ends first: the file is closed when it is renamed.
                part = stack.enter_context(replacing_atomically(place, mode=0o600))
                written = stack.enter_context(open(part, "wb"))
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if written is not None:
                    written.write(chunk)
        return self._taken(check_file_path(path), digest.hexdigest(), size, caption, {})

    def _taken(
        self, path: str, digest: str, size: int, caption: str | None, facts: dict[str, Any]
    ) -> records.MediaFile:
        self.num_files += 1
        media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
        return records.MediaFile(
            path=path, digest=digest, size=size, media_type=media_type, caption=caption, facts=facts
        )


GROUP, SYSTEM_GROUP = "training", "system"
"""Groups of what other trackers have logged: by a script, and by the tracker of its machine."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 200
_STAGING = ".importing"
_MAX_STEP = 2**63 - 1
# A master takes no later time.
MAX_TIME_S = 1e11


class ImportRefusedError(ValueError):
    """Raised when there is nothing to import from, or no place for it."""


@dataclass(kw_only=True, slots=True)
class SourceRun:
    """A run of a store.

    Attributes:
        source: Which run it is: the same text each time, and another one for each other run.
        name: What it is called there.
        created: When it began, in seconds since the epoch.
        read: Yields its records; each journal of it begins with `AttemptStarted`.
        hparams: Its hyperparameters, complete when `read` has ended.
        problems: What could not be read, a sentence each, complete when `read` has ended.
        info: The facts of a run that was one of Paceline's; None for another tracker's.
    """

    source: str
    name: str
    created: float
    read: "Callable[[SourceRun, RunFiles], Iterator[records.AnyRecord]]"
    hparams: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    info: RunInfo | None = None

    @property
    def run_id(self) -> str:
        """The id of the run here."""
        if self.info is not None:
            return self.info.run_id
        return hashlib.sha256(self.source.encode(errors="replace")).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedRun:
    """What an import did with a run.

    Attributes:
        name: The name of the run.
        path: Its run directory.
        state: "new", "grown" or "unchanged".
        num_points: How many metric values were added.
        num_files: How many files the run has in the store.
        problems: What did not come along, a sentence each.
    """

    name: str
    path: Path
    state: str
    num_points: int
    num_files: int
    problems: tuple[str, ...]


def started(
    record_time: float, attempt: int = 0, steps_completed: int = 0
) -> records.AttemptStarted:
    """Return the first record of a journal that an import writes."""
    return records.AttemptStarted(
        time=record_time, attempt=attempt, generation=0, rank=0, world_size=1, pid=0, host="",
        resumed_from=None, steps_completed=steps_completed,
    )  # fmt: skip


class RunWriter:
    """Writes runs of stores into a directory of runs.

    A new run is written aside and appears whole. To a run that was imported before, records are
    added that it lacks: to its journal, or after its end as its next attempt.

    Args:
        into: The directory of runs.
        dry_run: Whether nothing is written.

    Raises:
        ImportRefusedError: Another import writes there.
    """

    def __init__(self, into: Path, *, dry_run: bool = False) -> None:
        self._into = into
        self._dry_run = dry_run
        self._staging = into / _STAGING
        self._lock = -1
        if not dry_run:
            into.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock)
                raise ImportRefusedError(
                    f"Only one import at a time can write into {str(into)!r}, but another one does."
                    " Hint: wait until it has ended."
                ) from error
            # Left over from an import that was killed.
            shutil.rmtree(self._staging, ignore_errors=True)
        self._known = _known_runs(into)

    def write(self, run: SourceRun) -> ImportedRun:
        """Import a run, or what it has more than before.

        Raises:
            OSError: A file cannot be written, for example as the disk is full.
        """
        known = self._known.get(run.run_id)
        path = known or self._into / _directory_name(run)
        directory = RunDirectory(path if known else self._staging / path.name)
        writer = _Journals(directory, is_new=known is None, dry_run=self._dry_run)
        files = RunFiles(None if self._dry_run else directory.path / "files")
        try:
            for record in run.read(run, files):
                if (fit := _fit_record(record, run)) is not None:
                    writer.add(fit)
        finally:
            writer.close()
        if not self._dry_run:
            if known is None:
                self._finish_new(run, directory, path)
            elif run.info is None:
                _renew_hparams(directory, run.hparams)
        state = "new" if known is None else "grown" if writer.num_records else "unchanged"
        self._known[run.run_id] = path
        return ImportedRun(
            name=run.name,
            path=path,
            state=state,
            num_points=writer.num_points,
            num_files=files.num_files,
            problems=tuple(run.problems),
        )

    def close(self) -> None:
        """Remove what is only needed during an import."""
        if self._lock >= 0:
            shutil.rmtree(self._staging, ignore_errors=True)
            sync_directory(self._into)
            os.close(self._lock)
            self._lock = -1

    def _finish_new(self, run: SourceRun, directory: RunDirectory, path: Path) -> None:
        info = run.info or RunInfo(
            run_id=run.run_id,
            name=_fit_name(run.name),
            created=run.created,
            checkpoint_storage=DirectoryStorage(path / "checkpoints").url,
            hparams=None if run.hparams is None else recordable(run.hparams),
        )
        if run.info is not None and directory.checkpoints_path.is_dir():
            # The checkpoints came along.
            own = DirectoryStorage(path / "checkpoints").url
            info = msgspec.structs.replace(info, checkpoint_storage=own)
        RunDirectory.create(directory.path, info)
        os.rename(directory.path, path)


class _Journals:
    """Adds records to the journals of a run, without those that are there."""

    def __init__(self, directory: RunDirectory, *, is_new: bool, dry_run: bool) -> None:
        self._directory = directory
        self._dry_run = dry_run
        self._known: Counter[Any] = Counter()
        self._metadata: dict[str, Any] | None = None
        self._next: dict[JournalKey, int] = {}
        self._finished: set[int] = set()
        self._last_step = 0
        self._moved: dict[JournalKey, JournalKey] = {}
        self._writers: dict[JournalKey, JournalWriter] = {}
        self._start: records.AttemptStarted | None = None
        self.num_records = self.num_points = 0
        self._is_new = is_new
        if not is_new:
            for key in directory.journal_keys():
                self._read(key)

    def add(self, record: records.AnyRecord) -> None:
        """Write a record, unless the run has it."""
        if isinstance(record, records.AttemptStarted):
            self._start = record
        left = record if self._is_new else self._without_known(record)
        if left is None:
            return
        self.num_records += 1
        if isinstance(left, records.MetricsReported):
            self.num_points += len(left.metrics)
        if not self._dry_run:
            self._writer(left.time).append(left)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.sync()
            writer.close()
            if writer.refusal is not None:
                raise writer.refusal

    def _read(self, key: JournalKey) -> None:
        self._next[key] = 0
        for entry in self._directory.reader(key):
            record = entry.decode()
            self._next[key] = entry.sequence + 1
            self._last_step = max(self._last_step, getattr(record, "steps_completed", 0))
            if isinstance(record, records.MetricsReported):
                self._known.update(_points(record).values())
            elif isinstance(record, records.RunMetadataSet):
                self._metadata = record.metadata
            else:
                self._known[_identity(record)] += 1
            if isinstance(record, records.AttemptFinished):
                self._finished.add(key.attempt)

    def _without_known(self, record: records.AnyRecord) -> records.AnyRecord | None:
        """Return what is new of a record, None if nothing is."""
        if isinstance(record, records.MetricsReported):
            new = [name for name, point in _points(record).items() if not self._take(point)]
            if len(new) == len(record.metrics):
                return record
            metrics = {name: record.metrics[name] for name in new}
            return msgspec.structs.replace(record, metrics=metrics) if new else None
        if isinstance(record, records.RunMetadataSet):
            return None if record.metadata == self._metadata else record
        return None if self._take(_identity(record)) else record

    def _take(self, identity: Any) -> bool:
        """Return whether the run has one of this that was not met yet."""
        if self._known[identity] <= 0:
            return False
        self._known[identity] -= 1
        return True

    def _writer(self, now: float) -> JournalWriter:
        start = self._start
        key = JournalKey(0, 0, 0)
        if start is not None:
            key = JournalKey(start.attempt, start.generation, start.rank)
        key = self._moved.get(key, key)
        if key not in self._writers:
            newest = max((known.attempt for known in self._next), default=-1)
            is_over = key in self._next and (key.attempt in self._finished or key.attempt < newest)
            if is_over:
                # The newest attempt may be one that an import was killed in.
                attempt = newest + (newest in self._finished or newest == key.attempt)
                before, key = key, JournalKey(attempt, 0, key.rank)
                self._moved[before] = key
            first = self._next.get(key, 0)
            writer = JournalWriter(self._directory.journal_path(key), first_sequence=first)
            self._writers[key] = writer
            if is_over and not first:
                writer.append(
                    msgspec.structs.replace(
                        started(now, key.attempt, self._last_step), rank=key.rank
                    )
                )
        return self._writers[key]


def _fit_record(record: records.AnyRecord, run: SourceRun) -> records.AnyRecord | None:
    """Return a record that every reader takes; None, with a problem of the run, if it cannot be."""
    step = getattr(record, "steps_completed", 0)
    if not 0 <= step <= _MAX_STEP:
        run.problems.append(f"What was logged at step {step} has no place here")
        return None
    if isinstance(record, (records.RunMetadataSet, records.MediaReported)):
        size = len(records.encode_record(record))
        if size > records.MAX_METADATA_BYTES:
            what = getattr(record, "name", "the metadata")
            run.problems.append(
                f"{what!r} must have at most {records.MAX_METADATA_BYTES} bytes: {size}"
            )
            return None
    if not 0 <= record.time <= MAX_TIME_S:
        # Clients may give times in another unit.
        return msgspec.structs.replace(record, time=run.created)
    return record


def _points(record: records.MetricsReported) -> dict[str, Any]:
    """Return what identifies each value of a report: not the time, as clients may round it."""
    group, step = record.group, record.steps_completed
    return {name: (group, step, name, _hashable(value)) for name, value in record.metrics.items()}


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (float, int, str)) else msgspec.json.encode(value)


def _identity(record: records.AnyRecord) -> Any:
    if isinstance(record, records.AttemptStarted):
        return JournalKey(record.attempt, record.generation, record.rank)
    return records.encode_record(msgspec.structs.replace(record, time=0.0))


def _known_runs(into: Path) -> dict[str, Path]:
    """Return the run directories in a directory by the ids of their runs."""
    found = {}
    for path in sorted(into.iterdir()) if into.is_dir() else []:
        try:
            found[RunDirectory(path).read_info().run_id] = path
        except (OSError, ValueError):
            continue
    return found


def _fit_name(name: str) -> str:
    return _UNFIT.sub("-", name)[:_LONGEST_NAME].strip("-.") or "run"


def _directory_name(run: SourceRun) -> str:
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(max(run.created, 0)))
    return f"{moment}-{_fit_name(run.name)}-{run.run_id[:8]}"


def _renew_hparams(directory: RunDirectory, hparams: dict[str, Any] | None) -> None:
    """Take up hyperparameters that the source has got since the run was imported."""
    info = directory.read_info()
    if hparams is not None and info.hparams != (now := recordable(hparams)):
        directory.write_info(msgspec.structs.replace(info, hparams=now))
