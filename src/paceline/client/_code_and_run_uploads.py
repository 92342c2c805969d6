"""Uploads to the master: archives of user code, and runs made without the master."""

import gzip
import hashlib
import os
import stat
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

import msgspec

from paceline._base.journal_reading_and_writing import Entry
from paceline._base.journal_records import MediaFile
from paceline._base.process_and_network import integer_setting
from paceline._base.run_directory import (
    MAX_SMALL_BYTES,
    REFUSED_FILE_STATUSES,
    JournalKey,
    RunDirectory,
)
from paceline._base.run_tail_and_files import FileShipping, LostFileError, RunTail
from paceline.client._http_session import ApiError, ContextError, MasterUnreachableError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    from paceline._cluster.messages import runner_messages as messages
    from paceline.client._client import Client


IGNORE_FILE = ".pacelineignore"
_MIB = 1024 * 1024
MAX_CONTEXT_BYTES = 95 * _MIB
DEFAULT_IGNORES = (
    "__pycache__/",
    "*.py[co]",
    ".git/",
    ".venv/",
    "paceline_runs/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".idea/",
    ".vscode/",
    ".ipynb_checkpoints/",
    "node_modules/",
    ".DS_Store",
)

# Marks of directories that are never sent: a virtual environment holds absolute paths and never
# works elsewhere; the home of a master holds its token and all data.
_MARKS = ("pyvenv.cfg", "master.lock")
_NUM_LISTED = 5
# A fixed time later than 1980, which ZIP-based tools need.
_FIXED_TIME = 315_532_800 + 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextEntry:
    """File, directory or link to upload; `link` is its target relative to its directory."""

    name: str
    path: Path
    mode: int
    size: int
    link: str | None = None

    @property
    def is_directory(self) -> bool:
        """Whether this is a directory, and no link to a directory."""
        return self.link is None and self.path.is_dir()


def pack_context(directory: Path, target: IO[bytes], *, limit_bytes: int | None = None) -> str:
    """Write `directory` as a tar.gz archive and return the archive's SHA-256 in hexadecimal.

    Args:
        directory: The directory.
        target: Where to write the archive.
        limit_bytes: The largest archive; by default `PACELINE_MAX_CONTEXT_MIB`, else 95 MiB.

    Raises:
        ContextError: The directory is none, holds links that lead outside, sockets, devices or
            unreadable files, or its archive is larger than `limit_bytes`.
    """
    if limit_bytes is None:
        limit_bytes = integer_setting("PACELINE_MAX_CONTEXT_MIB", MAX_CONTEXT_BYTES // _MIB) * _MIB
    entries = list_context(directory)
    sink = _LimitedSink(target, entries, limit_bytes)
    try:
        with (
            # Header without name and time: equal code gives an equal digest.
            gzip.GzipFile(filename="", mode="wb", fileobj=sink, compresslevel=6, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for entry in entries:
                _add_to_code_archive(archive, entry)
    except OSError as error:
        raise ContextError(
            f"Every file of {str(directory)!r} must stay readable while it is packed, but one did"
            f" not: {error}. Hint: name it in {IGNORE_FILE} if the experiment does not need it."
        ) from error
    return sink.digest.hexdigest()


def list_context(directory: Path) -> list[ContextEntry]:
    """Return the entries to be packed, sorted by name.

    Raises:
        ContextError: As `pack_context`.
    """
    if not directory.is_dir():
        raise ContextError(
            f"`model_dir` must be a directory, but got {str(directory)!r}."
            " Hint: give the directory that holds the training script."
        )
    walk = _CodeWalk(directory, _read_ignores(directory))
    try:
        entries = sorted(walk.entries(directory, ""), key=lambda entry: entry.name)
    except OSError as error:
        raise ContextError(
            f"Every file of {str(directory)!r} must be readable, but one is not: {error}."
            f" Hint: name it in {IGNORE_FILE} if the experiment does not need it."
        ) from error
    walk.raise_for_refused()
    return entries


class _CodeWalk:
    """Pass over a directory; collects all refused entries to name them together."""

    def __init__(self, root: Path, ignores: "GitIgnoreSpec") -> None:
        self._root = root
        self._real_root = os.path.realpath(root)
        self._ignores = ignores
        self._outside: list[str] = []
        self._special: list[str] = []

    def entries(self, directory: Path, prefix: str) -> Iterator[ContextEntry]:
        with os.scandir(directory) as scan:
            found = sorted(scan, key=lambda item: item.name)
        for item in found:
            name = prefix + item.name
            status = item.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                yield from self._directory(Path(item.path), name)
            elif name == IGNORE_FILE or self._ignores.match_file(name):
                continue
            elif stat.S_ISLNK(status.st_mode):
                yield from self._link(Path(item.path), name)
            elif stat.S_ISREG(status.st_mode):
                # Two modes only: a user's umask must not change the digest.
                mode = 0o755 if status.st_mode & 0o100 else 0o644
                yield ContextEntry(name=name, path=Path(item.path), mode=mode, size=status.st_size)
            else:
                self._special.append(name)

    def _directory(self, path: Path, name: str) -> Iterator[ContextEntry]:
        if self._ignores.match_file(name + "/") or any((path / m).exists() for m in _MARKS):
            return
        yield ContextEntry(name=name, path=path, mode=0o755, size=0)
        yield from self.entries(path, name + "/")

    def _link(self, path: Path, name: str) -> Iterator[ContextEntry]:
        target = os.readlink(path)
        if os.path.isabs(target):
            # Rewritten below as a relative link, as the copy lies elsewhere.
            target = os.path.relpath(target, os.path.dirname(path.absolute()))
        written = os.path.normpath(os.path.join(os.path.dirname(name), target))
        leaves = written == os.pardir or written.startswith(os.pardir + os.sep)
        # Real target as well: an inner path may lead outside through another link.
        real = os.path.realpath(path)
        if leaves or not (real + os.sep).startswith(self._real_root + os.sep):
            self._outside.append(f"{name} -> {os.readlink(path)}")
            return
        yield ContextEntry(name=name, path=path, mode=0o777, size=0, link=target)

    def raise_for_refused(self) -> None:
        if self._outside:
            raise ContextError(
                f"Links in {str(self._root)!r} must lead to files inside it, but these lead"
                f" outside: {_join(self._outside)}."
                f" Hint: copy what they lead to, or name them in {IGNORE_FILE}."
            )
        if self._special:
            raise ContextError(
                f"Everything in {str(self._root)!r} must be a file, a directory or a link, but"
                f" these are sockets, pipes or devices: {_join(self._special)}."
                f" Hint: name them in {IGNORE_FILE}."
            )


class _LimitedSink:
    """Passes bytes on, computes their digest, and refuses more than the limit."""

    def __init__(self, target: IO[bytes], entries: list[ContextEntry], limit_bytes: int) -> None:
        self.digest = hashlib.sha256()
        self._target = target
        self._entries = entries
        self._limit_bytes = limit_bytes
        self._size = 0

    def write(self, data: bytes) -> int:
        self._size += len(data)
        if self._size > self._limit_bytes:
            raise self._too_large()
        self.digest.update(data)
        return self._target.write(data)

    def flush(self) -> None:
        self._target.flush()

    def _too_large(self) -> ContextError:
        largest = sorted(self._entries, key=lambda entry: -entry.size)[:_NUM_LISTED]
        listed = ", ".join(f"{entry.name} ({_mebibytes(entry.size)})" for entry in largest)
        total = _mebibytes(sum(entry.size for entry in self._entries))
        return ContextError(
            f"The packed code must be at most {_mebibytes(self._limit_bytes)}, but it is larger"
            f" ({total} before compression). The largest files: {listed}."
            f" Hint: name what the experiment does not need in {IGNORE_FILE}, and read data from"
            " a path outside the directory."
        )


def _read_ignores(directory: Path) -> "GitIgnoreSpec":
    from pathspec import GitIgnoreSpec

    path = directory / IGNORE_FILE
    try:
        own = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return GitIgnoreSpec.from_lines([*DEFAULT_IGNORES, *own])
    except ValueError as error:
        raise ContextError(
            f"{str(path)!r} must hold patterns as in .gitignore, but one is wrong: {error}."
        ) from error


def _add_to_code_archive(archive: tarfile.TarFile, entry: ContextEntry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.mode, info.mtime = entry.mode, _FIXED_TIME
    if entry.link is not None:
        info.type, info.linkname = tarfile.SYMTYPE, entry.link
        archive.addfile(info)
    elif entry.is_directory:
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    else:
        info.size = entry.size
        with entry.path.open("rb") as file:
            archive.addfile(info, file)


def _join(names: list[str]) -> str:
    listed = ", ".join(names[:_NUM_LISTED])
    more = len(names) - _NUM_LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def _mebibytes(size: int) -> str:
    return f"{size / 1024**2:.1f} MiB"


_MAX_RECORDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """Result of a sync: the experiment on the master, and the number of records just sent."""

    experiment_id: int
    trial_id: int
    num_records: int
    is_alive: bool


class RunSync:
    """Sends the content of a run directory to the master, to show as an unmanaged experiment.

    Files that the master has already are not sent again, whoever sent them. Call this as often as
    you like: while the run continues, after its end, and after it was resumed.

    Args:
        client: The master to send to.
        path: The run directory; it stays as it is.
        lease_s: Time without news after which the master takes an unfinished run for lost, in
            seconds. Whoever gives it calls `send` again and again. By default for ever.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """

    def __init__(
        self, client: "Client", path: str | os.PathLike[str], *, lease_s: float | None = None
    ) -> None:
        self._session = client._session
        self._run = RunDirectory.open(Path(os.path.abspath(path)))
        self._info = self._run.read_info()
        self._tail: RunTail | None = None
        self._lease_s = lease_s
        self._sent: dict[JournalKey, int] = {}
        passing = (ApiError, MasterUnreachableError)
        self._files = FileShipping(self._run, self._send_file, passing)
        self._last: messages.RunReply | None = None
        self._last_at = 0.0

    @property
    def name(self) -> str:
        """The run's name."""
        return self._info.name

    def send(self) -> SyncResult:
        """Send everything still missing on the master.

        Raises:
            ApiError: The master refused the run, for example as a master started it.
            MasterUnreachableError: No master answers; the next call asks for its state first.
            JournalVersionError: A journal has another format version.
        """
        try:
            return self._send()
        except BaseException:
            # The master may have stored any part of the request.
            self._tail = self._last = None
            raise

    def _send(self) -> SyncResult:
        tail = self._tail or self._register()
        # Asked before reading: all that a dead run wrote is there then.
        is_alive = self._run.is_alive()
        num_records = 0
        while True:
            found = tail.read(_MAX_RECORDS)
            num_read = sum(len(entries) for _, entries in found)
            num_records += num_read
            is_rest = num_read < _MAX_RECORDS
            if is_rest and not is_alive:
                found += tail.finish()
            if is_alive and not found and (kept := self._kept_reply()) is not None:
                reply = kept
            else:
                reply = self._post(found, is_alive=is_alive or not is_rest)
            if _lacks_records(reply, found):
                # The master lost its records, for example its database. The journals have them.
                tail, num_records = self._register(), 0
                continue
            if is_rest:
                return SyncResult(
                    experiment_id=reply.experiment_id,
                    trial_id=reply.trial_id,
                    num_records=num_records,
                    is_alive=is_alive,
                )

    def _register(self) -> RunTail:
        from paceline._cluster.messages import runner_messages as messages

        body = messages.RunRegistration(info=self._info, path=str(self._run.path))
        response = self._session.send("PUT", self._url, content=msgspec.json.encode(body))
        reply = msgspec.json.decode(response.content, type=messages.RunReply)
        marks = {JournalKey(m.attempt, m.generation, m.rank): m.sequence for m in reply.marks}
        self._sent = dict(marks)
        self._tail = RunTail(self._run, marks)
        return self._tail

    def _post(
        self, found: list[tuple[JournalKey, list[Entry]]], *, is_alive: bool
    ) -> "messages.RunReply":
        from paceline._cluster.messages import runner_messages as messages

        batches = [
            messages.RawRunBatch(
                key.attempt,
                key.generation,
                key.rank,
                [(one.sequence, msgspec.Raw(self._files.ship(one.payload))) for one in entries],
                self._sent.get(key, -1),
            )
            for key, entries in found
        ]
        body = messages.RawRunRecords(
            batches=batches, is_alive=is_alive, moved=self._moved(), lease_s=self._lease_s
        )
        content = msgspec.json.encode(body)
        # Time before the request: the master may start the lease before its answer arrives.
        sent_at = time.monotonic()
        response = self._session.send("POST", f"{self._url}/records", content=content)
        self._last = msgspec.json.decode(response.content, type=messages.RunReply)
        self._last_at = sent_at
        self._sent |= {key: entries[-1].sequence for key, entries in found if entries}
        return self._last

    def _send_file(self, file: MediaFile, content: IO[bytes]) -> None:
        """Send a file of a record, unless the master has its content.

        Raises:
            LostFileError: The master refuses it.
        """
        url = f"{self._url}/files/{quote(file.path)}"
        params = {"digest": file.digest, "media_type": file.media_type}
        try:
            if file.size > MAX_SMALL_BYTES:
                try:
                    self._session.send("PUT", url, params={**params, "is_known": True})
                    return
                except ApiError as error:
                    if error.code != "content_wanted":
                        raise
            self._session.send("PUT", url, params=params, content=content)
        except ApiError as error:
            if error.status in REFUSED_FILE_STATUSES:
                raise LostFileError(f"is refused: {error.detail}") from error
            raise

    def _kept_reply(self) -> "messages.RunReply | None":
        """Return the last reply while the master needs no news of the run; None if due."""
        # The master must hear of the run well before its lease expires.
        if self._lease_s is None or time.monotonic() > self._last_at + self._lease_s / 3:
            return None
        return self._last

    @property
    def _url(self) -> str:
        return f"runs/{self._info.run_id}"

    def _moved(self) -> dict[str, str]:
        """Return where the run's checkpoints are, if its directory was renamed or copied."""
        from paceline.core._read_runs import moved_storage

        return moved_storage(self._run, self._info)


def _lacks_records(reply: "messages.RunReply", sent: list[tuple[JournalKey, list[Entry]]]) -> bool:
    stored = {JournalKey(m.attempt, m.generation, m.rank): m.sequence for m in reply.marks}
    return any(entries[-1].sequence > stored.get(key, -1) for key, entries in sent if entries)
