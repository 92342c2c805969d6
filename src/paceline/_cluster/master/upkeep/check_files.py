"""Findings; checks of code, logs, journals and checkpoints."""

import hashlib
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from paceline._base.files import open_regular, regular_opener
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.log_files import num_damaged_lines
from paceline._cluster.master.upkeep.backup_directories import CHECKPOINTS, CONTENTS
from paceline._cluster.messages.states import AttemptState, CheckpointState
from paceline.storage._checkpoint_errors import (
    CheckpointError,
    CheckpointNotFoundError,
    first_names,
)
from paceline.storage._directory_storage import DirectoryStorage


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Difference found by a check.

    Attributes:
        kind: ``home``, ``database``, ``record``, ``context``, ``log``, ``journal``, ``file``
            or ``checkpoint``.
        where: The file or the row, by name.
        problem: The problem.
        fix: The action taken, None if none.
        hint: The advice, None if given elsewhere.
    """

    kind: str
    where: str
    problem: str
    fix: str | None = None
    hint: str | None = None

    @property
    def text(self) -> str:
        """Finding as a sentence, with its hint or fix."""
        hint = "" if self.hint is None else f" Hint: {self.hint}."
        done = hint if self.fix is None else f" Fixed: {self.fix}."
        return f"{self.where:.1000} {self.problem:.3000}.{done}"


Report = Callable[[Finding], None]


class CheckPace:
    """Limiter of file reads to a number of bytes per second; without a rate, no waits.

    Args:
        bytes_per_s: The rate.
        wait: Sleeps for a number of seconds.
    """

    def __init__(
        self, bytes_per_s: float | None = None, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._wait = wait

    def spend(self, num_bytes: int) -> None:
        """Wait for as long as reading so much may take."""
        if self._bytes_per_s is not None:
            self._wait(num_bytes / self._bytes_per_s)


_PIECE = 1024 * 1024
_MOVE = "move it away"
_CONTENT = "take it from a backup, or send the run again"
_CODE = "send the code again: `paceline experiment fork` with the code directory"
# Places of directories: readers would silently skip anything else there.
_IN_DIRECTORIES = (
    ("logs", r"trial-\d+", "log"),
    ("attempts", r"\d+", "journal"),
)


def check_directories(home: Path, connection: sa.Connection, report: Report) -> None:
    """Find missing directories of a home, and entries of the wrong kind within."""
    attempts = tables.attempts.c
    ran = connection.execute(sa.select(sa.func.count(sa.distinct(attempts.trial_id)))).scalar_one()
    if ran and not (home / "logs").exists():
        trials = f"{ran} trial{'s' * (ran > 1)}"
        problem, hint = f"is missing, with the logs of {trials}", "take it from a backup"
        report(Finding(kind="log", where="logs", problem=problem, hint=hint))
    for name, pattern, kind in _IN_DIRECTORIES:
        for path in sorted((home / name).glob("*")):
            if re.fullmatch(pattern, path.name) and (wrong := _wrong_directory(path)):
                where = _name(home, path)
                report(Finding(kind=kind, where=where, problem=wrong, hint=_MOVE))
    query = sa.select(attempts.id).where(
        attempts.state == AttemptState.RUNNING.value,
        attempts.node_id.is_(None),
        attempts.run_attempt.is_(None),
    )
    for attempt_id in connection.execute(query.order_by(attempts.id)).scalars():
        if not os.path.lexists(home / "attempts" / str(attempt_id)):
            problem = "is missing, with what its processes have reported last"
            hint = "the master starts another attempt of the trial from its latest checkpoint"
            where = f"attempts/{attempt_id}"
            report(Finding(kind="journal", where=where, problem=problem, hint=hint))


def _wrong_directory(path: Path) -> str | None:
    if path.is_dir():
        return None
    what = "a link to nothing" if path.is_symlink() and not path.exists() else "something else"
    return f"must be a directory, but is {what}"


def check_contexts(home: Path, connection: sa.Connection, report: Report, pace: CheckPace) -> None:
    """Compare uploaded code with its digests, and with the experiments using the code."""
    experiments = tables.experiments.c
    query = sa.select(experiments.id, experiments.context_digest).order_by(experiments.id)
    users: dict[str, list[int]] = {}
    for experiment_id, digest in connection.execute(query):
        if digest is not None:
            users.setdefault(digest, []).append(experiment_id)
    stored = {path.name.split(".")[0]: path for path in (home / "contexts").glob("*.tar.gz")}
    for digest, ids in users.items():
        if digest not in stored:
            where = f"contexts/{digest}.tar.gz"
            problem = f"is missing: {_experiments(ids)} cannot start trials"
            report(Finding(kind="context", where=where, problem=problem, hint=_CODE))
    for digest, path in sorted(stored.items()):
        try:
            wrong = "is damaged" if _sha256(path, pace) != digest else None
        except OSError as error:
            wrong = _unreadable(path, error)
        if wrong is not None:
            used = digest in users
            wrong += f": {_experiments(users[digest])} cannot start trials" if used else ""
            hint = _CODE if used else _MOVE
            report(Finding(kind="context", where=_name(home, path), problem=wrong, hint=hint))


def check_logs(home: Path, report: Report, pace: CheckPace) -> None:
    """Count the damaged lines of logs."""
    for path in sorted((home / "logs").glob("trial-*/attempt-*.jsonl")):
        try:
            num_damaged = num_damaged_lines(path)
            pace.spend(path.stat().st_size)
        except OSError as error:
            problem = _unreadable(path, error)
            if problem is not None:
                where = _name(home, path)
                report(Finding(kind="log", where=where, problem=problem, hint=_MOVE))
            continue
        if num_damaged:
            lines = "1 damaged line" if num_damaged == 1 else f"{num_damaged} damaged lines"
            problem = f"has {lines}, which readers leave out and count"
            report(Finding(kind="log", where=_name(home, path), problem=problem))


def check_journals(home: Path, connection: sa.Connection, report: Report) -> None:
    """Find damaged and missing lines in the journals of unfinished attempts."""
    attempts = tables.attempts.c
    query = sa.select(attempts.id).where(attempts.state != AttemptState.ENDED.value)
    for attempt_id in list(connection.execute(query.order_by(attempts.id)).scalars()):
        pattern = f"{attempt_id}/run/journal/*/*.journal"
        for path in sorted((home / "attempts").glob(pattern)):
            try:
                problem = _journal_problem(path)
            except (OSError, ValueError) as error:
                problem = _unreadable(path, error)
            if problem is not None:
                report(Finding(kind="journal", where=_name(home, path), problem=problem))


def check_run_files(
    home: Path,
    connection: sa.Connection,
    report: Report,
    pace: CheckPace,
    *,
    reads_bytes: bool = True,
) -> None:
    """Compare the contents of runs' files with their digests; the first file of each is named."""
    files = tables.run_files.c
    query = sa.select(
        files.digest, files.size, sa.func.min(files.trial_id), sa.func.min(files.path)
    )
    for digest, size, trial_id, name in connection.execute(query.group_by(files.digest)):
        path = home / CONTENTS / digest[:2] / digest
        try:
            found = _file_size(path)
            problem = None if found == size else "has another size"
            if found is None:
                problem = "is missing"
            elif problem is None and reads_bytes and _sha256(path, pace) != digest:
                problem = "is damaged"
        except OSError as error:
            problem = _unreadable(path, error)
        if problem is not None:
            where = f"the content of {name!r} of trial {trial_id}"
            report(Finding(kind="file", where=where, problem=problem, hint=_CONTENT))


def check_checkpoints(
    home: Path,
    connection: sa.Connection,
    report: Report,
    pace: CheckPace,
    *,
    reads_bytes: bool = True,
) -> list[sa.Row[Any]]:
    """Compare the checkpoints in directories with their manifests, and these with the database.

    Returns:
        The rows of checkpoints that are gone.
    """
    checkpoints = tables.checkpoints
    query = sa.select(checkpoints).order_by(checkpoints.c.trial_id, checkpoints.c.steps_completed)
    rows = connection.execute(query).all()
    gone = []
    for row in rows:
        if row.state == CheckpointState.DELETED.value or "://" in row.storage:
            continue
        problem, is_gone = _checkpoint_problem(row, pace, reads_bytes=reads_bytes)
        if problem is not None:
            where = f"checkpoint {row.uuid} of trial {row.trial_id}"
            report(Finding(kind="checkpoint", where=where, problem=problem))
        if is_gone:
            gone.append(row)
    known = {row.uuid for row in rows}
    root = home / CHECKPOINTS
    for uuid in _listed(root):
        # Word of a checkpoint of a running attempt may be on its way.
        if uuid not in known and not _has_running(connection):
            problem = "is not known to the database"
            report(Finding(kind="checkpoint", where=f"checkpoint {uuid}", problem=problem))
    return gone


def _listed(root: Path) -> list[str]:
    try:
        return list(DirectoryStorage(root).list())
    except (CheckpointError, OSError):
        return []  # another check names the object in its place


def _checkpoint_problem(
    row: sa.Row[Any], pace: CheckPace, *, reads_bytes: bool
) -> tuple[str | None, bool]:
    place = Path(row.storage) / row.uuid
    try:
        storage = DirectoryStorage(row.storage, has_one_owner=True)
        manifest = storage.manifest(row.uuid)
        if not reads_bytes:
            problems = {
                name: "has another size"
                for name, size in manifest.resources.items()
                if _file_size(place / name) != size
            }
        else:
            problems = storage.problems(manifest)
            pace.spend(sum(manifest.resources.values()))
    except CheckpointNotFoundError:
        return f"is gone from {row.storage!r}", True
    except (CheckpointError, OSError, ValueError, RuntimeError) as error:
        return f"cannot be read ({error!s:.500})", False
    if problems:
        details = first_names([f"{name} {problem}" for name, problem in sorted(problems.items())])
        return f"is damaged: {details}", False
    if manifest.resources != row.resources:
        return "has other files than the database says", False
    return None, False


def _file_size(path: Path) -> int | None:
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _has_running(connection: sa.Connection) -> bool:
    attempts = tables.attempts.c
    query = sa.select(attempts.id).where(attempts.state != AttemptState.ENDED.value)
    return connection.execute(query.limit(1)).first() is not None


def _journal_problem(path: Path) -> str | None:
    damaged, missing, last = 0, 0, int(path.stem) - 1
    with open(path, "rb", opener=regular_opener) as file:
        for line in _whole_lines(file):
            checksum, _, body = line.partition(b" ")
            number = body.partition(b" ")[0]
            try:
                is_whole = int(checksum, 16) == zlib.crc32(body)
                sequence = int(number)
            except ValueError:
                is_whole = False
            if not is_whole:
                damaged += 1
            elif sequence > last:
                missing += sequence - last - 1
                last = sequence
    if not damaged and not missing:
        return None
    return f"has {damaged} damaged lines, and lacks {missing} records"


def _whole_lines(file: Any) -> Iterator[bytes]:
    for line in file:
        if line.endswith(b"\n") and line != b"\n":
            yield line[:-1]


def _sha256(path: Path, pace: CheckPace) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            pace.spend(len(piece))
    return digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> str | None:
    """Return why a file cannot be read; None if removed meanwhile."""
    if isinstance(error, FileNotFoundError):
        return "is a link to nothing" if path.is_symlink() else None
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot be read ({reason})"


def _experiments(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:5])) + ", ..." * (len(ids) > 5)
    return f"experiment{'s' * (len(ids) > 1)} {shown}"


def _name(home: Path, path: Path) -> str:
    return path.relative_to(home).as_posix()
