"""Files of a home that its database does not know: a sign that the database was lost.

A file is made only after the database knows it. So a killed master leaves no such file, but a
database that was deleted, replaced by an older one or robbed of its log does. A new database would
give the same ids again and mix new trials with old files.
"""

import logging
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.master.store import (
    DatabaseDamagedError,
    KnownFiles,
    find_log_damage,
    read_known_files,
)
from paceline.runner import NEWEST_NAME, AttemptDirectory, newest_attempt

logger = logging.getLogger(__name__)

_SET_ASIDE = "set_aside"


class LostDatabaseError(RuntimeError):
    """Raised when a home holds files that its database does not know."""


@dataclass(frozen=True, slots=True)
class _UnknownFiles:
    """Unknown files of one kind, and a text that says which."""

    text: str
    paths: list[Path]


def check_for_lost_database(home: Path, database: Path, *, set_aside: bool = False) -> None:
    """Check that the database knows the files of its home; nothing is deleted.

    Args:
        home: The home; this process must hold it.
        database: The path of its database.
        set_aside: Move the files that the database does not know, and a damaged database with
            all files, into a dated directory below ``set_aside`` in the home.

    Raises:
        LostDatabaseError: There are unknown files, or an attempt to be set aside still runs.
        DatabaseDamagedError: The database is damaged.
    """
    log = database.with_name(f"{database.name}-wal")
    if damage := find_log_damage(database):
        logger.warning(
            "The log %r of the database is damaged: %s, and changes may be lost. Hint: stop the"
            " master, and look with `paceline home check` what differs from the records.",
            log.name,
            damage,
        )
    known: KnownFiles | None = KnownFiles()
    unknown_files: list[_UnknownFiles] = []
    state = "does not know them"
    if not database.exists() or database.stat().st_size == 0:
        state = "is empty" if database.exists() else "is missing"
        # SQLite deletes such a log, but it may hold all there is of the newest changes.
        if log.exists() and log.stat().st_size > 0:
            unknown_files.append(
                _UnknownFiles(f"the database's log {log.name!r}", files_of(database))
            )
    else:
        try:
            known = read_known_files(database)
        except DatabaseDamagedError:
            if not set_aside:
                raise
            unknown_files.append(
                _UnknownFiles(f"the damaged database {database.name!r}", files_of(database))
            )
    if known is None:
        return
    unknown_files += _find_unknown_files(home, known)
    if unknown_files and set_aside:
        _move_unknown_files(home, unknown_files)
    elif unknown_files:
        raise LostDatabaseError(_lost_database_text(home, database, state, unknown_files))


def files_of(database: Path) -> list[Path]:
    """Return the files that are there of a database: itself and its logs."""
    paths = (database.with_name(database.name + end) for end in ("", "-wal", "-shm", "-journal"))
    return [path for path in paths if path.exists()]


def _find_unknown_files(home: Path, known: KnownFiles) -> list[_UnknownFiles]:
    contexts = [
        path
        for path in _entries(home / "contexts", r"(\w+)\.tar\.gz")
        if known.contexts is not None and path.name.split(".")[0] not in known.contexts
    ]
    attempts = _numbered(home / "attempts", r"(\d+)(?:\..*)?", known.newest_attempt)
    # The directory of an attempt is removed at its end; this file still tells its id.
    newest = newest_attempt(home / "attempts")
    if newest > known.newest_attempt:
        attempts[home / "attempts" / NEWEST_NAME] = newest
    records = _numbered(home / "records", r"experiment-(\d+)\.jsonl", known.newest_experiment)
    logs = _numbered(home / "logs", r"trial-(\d+)", known.newest_trial)
    checkpoints: list[Path] = []
    if known.newest_trial == 0:
        # Otherwise a checkpoint may wait in the journal of an attempt that is known.
        checkpoints = _entries(home / "checkpoints", r"([^.].*)")
    texts = [
        (_count_with_noun(len(contexts), "context"), "contexts", contexts),
        (_range("attempt", "attempts", attempts), "attempts", list(attempts)),
        (_range("the log of trial", "the logs of trials", logs), "logs", list(logs)),
        (_count_with_noun(len(checkpoints), "checkpoint"), "checkpoints", checkpoints),
        (_range("experiment", "experiments", records), "records", list(records)),
    ]
    return [_UnknownFiles(f"{text} in {name!r}", paths) for text, name, paths in texts if paths]


def _entries(directory: Path, pattern: str) -> list[Path]:
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in found if re.fullmatch(pattern, path.name))


def _numbered(directory: Path, pattern: str, newest: int) -> dict[Path, int]:
    numbers = {
        path: int(match[1])
        for path in _entries(directory, pattern)
        if (match := re.fullmatch(pattern, path.name))
    }
    return {path: number for path, number in numbers.items() if number > newest}


def _count_with_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _range(one: str, several: str, numbers: dict[Path, int]) -> str:
    first, last = min(numbers.values(), default=0), max(numbers.values(), default=0)
    return f"{one} {first}" if first == last else f"{several} {first} to {last}"


def _lost_database_text(
    home: Path, database: Path, state: str, unknown_files: list[_UnknownFiles]
) -> str:
    found = ", ".join(one.text for one in unknown_files)
    copies = sorted(path.name for path in home.glob(f"{database.stem}.version-*.sqlite"))
    copied = f" (copies from before an upgrade: {', '.join(copies)})" if copies else ""
    return (
        f"The database of a home must know all that the home holds, but {str(home)!r} has {found},"
        f" and its database {database.name!r} {state}. Nothing was changed. Hint: restore the"
        f" database from a backup{copied}, make it again with `paceline home check --fix`, or"
        " start with `paceline up --set-aside`, which moves these files into"
        f" {str(home / _SET_ASIDE)!r} and deletes nothing."
    )


def _move_unknown_files(home: Path, unknown_files: list[_UnknownFiles]) -> None:
    """Move files into a new directory with the same layout."""
    paths = [path for one in unknown_files for path in one.paths]
    for path in paths:
        if path.parent.name == "attempts" and AttemptDirectory(path).runner_pid() is not None:
            raise LostDatabaseError(
                f"An attempt must have ended to be set aside, but attempt {path.name} in"
                f" {str(path.parent)!r} still runs (process {AttemptDirectory(path).runner_pid()})."
                " Hint: wait for its end, or end that process."
            )
    target = move_lost_files_aside(home, paths)
    found = ", ".join(one.text for one in unknown_files)
    logger.warning("Moved what the database does not know to %s: %s.", target, found)


def move_lost_files_aside(home: Path, paths: list[Path]) -> Path:
    """Move files of a home into a new directory with the same layout, and return that."""
    target = home / _SET_ASIDE / time.strftime(f"%Y-%m-%dT%H%M%S-{time.time_ns() % 10**9:09d}")
    target.mkdir(mode=0o700, parents=True)
    for path in paths:
        place = target / path.relative_to(home)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.move(path, place)  # may lead to another disk
    return target
