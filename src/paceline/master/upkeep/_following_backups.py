"""Backups that follow a home all the time."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.master.store import DatabaseVersionError
from paceline.master.upkeep._backup_snapshots import BackupError
from paceline.master.upkeep._files_to_back_up import DATABASE
from paceline.master.upkeep._home_backup import Backup, BackupResult

# A backup takes at most a tenth of the time.
_REST = 9


def follow_home(
    backup: Backup,
    home: Path,
    every_s: float,
    stop: threading.Event,
    on_error: Callable[[Exception], None],
) -> Iterator[BackupResult]:
    """Make a backup whenever the home has changed, and yield it; each replaces the one before.

    A backup that fails is told of and tried again: the one before it stays.

    Args:
        backup: Whose directory this process holds.
        home: The home.
        every_s: The shortest time between two backups, in seconds.
        stop: Ends it when set.
        on_error: Called with the error of a backup that failed.
    """
    made: Path | None = None
    state: object = None
    while not stop.is_set():
        begun = time.monotonic()
        # All that is stored changes the database, lines of output too.
        now = _database_file_state(home)
        if now != state:
            try:
                result = backup.make()
            except (BackupError, DatabaseVersionError, OSError) as error:
                on_error(error)
            else:
                if made is not None:
                    backup.remove(made)
                made, state = result.path, now
                yield result
        stop.wait(max(every_s, _REST * (time.monotonic() - begun)))


def _database_file_state(home: Path) -> list[tuple[int, int]]:
    found = []
    for name in (DATABASE, f"{DATABASE}-wal"):
        try:
            facts = (home / name).stat()
        except FileNotFoundError:
            continue
        found.append((facts.st_size, facts.st_mtime_ns))
    return found
