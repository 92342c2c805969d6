"""Backups of a home, also while the master runs, once or after each change."""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import sqlalchemy as sa

import paceline
from paceline import faults
from paceline._base.files import sync_directory
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import DatabaseVersionError, check_stored_version
from paceline._cluster.master.store.run_files import used_digests
from paceline._cluster.master.store.upgrades import (
    check_copy,
    copy_database,
    open_read_only,
    read_known_files,
)
from paceline._cluster.master.upkeep.backup_directories import (
    CHECKPOINTS,
    CONTENT_NAME,
    DATABASE,
    BackedUp,
    BackupError,
    Content,
    backup_part,
    backup_parts,
    grows,
    new_name,
    read_backup_content,
    select_files,
    whole_backups,
)
from paceline._cluster.master.upkeep.recovery_records import whole_lines
from paceline._cluster.messages.states import AttemptState, CheckpointState
from paceline.storage import _checkpoint_files

faults.register("backup.database_copied", "backup.between_files", "backup.before_content")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupResult:
    """Complete backup: its directory, its content, and the amount copied for the backup."""

    path: Path
    content: Content
    num_copied: int
    num_bytes_copied: int


class Backup:
    """Maker of backups of a home in a directory; unchanged files are shared between backups.

    Args:
        home: The home.
        to: The directory of its backups, outside the home.
        checkpoints: Whether to take the checkpoints that lie in the home.

    Raises:
        BackupError: `to` is within the home, or there is no home.
    """

    def __init__(self, home: Path, to: Path, *, checkpoints: bool = False) -> None:
        self._home = home.resolve()
        self._to = to.resolve()
        self._checkpoints = checkpoints
        if self._to.is_relative_to(self._home):
            raise BackupError(
                f"A backup must lie outside the home, but {str(to)!r} is within {str(home)!r}."
                " Hint: choose a directory on another disk."
            )
        if not (self._home / DATABASE).is_file():
            raise BackupError(
                f"A home must have a database to be backed up, but {str(home)!r} has no"
                f" {DATABASE}. Hint: `--home` names the home of the master; `paceline home check`"
                " says what is there."
            )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the directory of the backups for this process.

        Raises:
            BackupError: Another backup is at work there.
        """
        try:
            self._to.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise BackupError(
                "The place of backups must be a directory, but"
                f" {str(_first_file(self._to))!r} is a file."
            ) from error
        except OSError as error:
            raise BackupError(
                f"The directory of backups {str(self._to)!r} must be writable, but cannot be made"
                f" ({error.strerror})."
            ) from error
        with (self._to / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BackupError(
                    f"One backup at a time must write to {str(self._to)!r}, but another is at"
                    " work. Hint: wait for its end, or choose another directory."
                ) from error
            yield

    def make(self) -> BackupResult:
        """Make a backup and return the result; the caller must hold the directory.

        Raises:
            DatabaseVersionError: The database is damaged, or cannot be read.
            OSError: It cannot be written; earlier backups are untouched.
        """
        for path in backup_parts(self._to):
            _remove_backup(path)
        earlier = self._newest()
        name = new_name(self._to)
        part = backup_part(self._to, name)
        part.mkdir(mode=0o700)
        work = _BackupWork(self._home, part, *earlier)
        try:
            content = work.copy(checkpoints=self._checkpoints)
            _checkpoint_files.sync_tree(part)
            faults.reach("backup.before_content")
            _checkpoint_files.write_durably(part / CONTENT_NAME, msgspec.json.encode(content))
            # Rename last: a crash before leaves a part to be cleaned up, never a broken backup.
            part.rename(self._to / name)
            sync_directory(self._to)
        except BaseException:
            _remove_backup(part)
            raise
        return BackupResult(
            path=self._to / name,
            content=content,
            num_copied=work.num_copied,
            num_bytes_copied=work.num_bytes_copied,
        )

    def remove(self, path: Path) -> None:
        """Remove a backup, renamed first so a partial removal never looks complete."""
        gone = backup_part(self._to, path.name)
        path.rename(gone)
        _remove_backup(gone)

    def keep(self, number: int) -> None:
        """Remove the oldest backups beyond a number."""
        for path in whole_backups(self._to)[:-number]:
            self.remove(path)

    def _newest(self) -> tuple[Path | None, Content | None]:
        """Return this home's newest readable backup and its content; None for both without."""
        for path in reversed(whole_backups(self._to)):
            try:
                content = read_backup_content(path)
            except BackupError:
                continue
            if content.home != str(self._home):
                raise BackupError(
                    f"A directory must hold backups of one home, but {str(self._to)!r} has those"
                    f" of {content.home!r}. Hint: choose another directory."
                )
            return path, content
        return None, None


class _BackupWork:
    """Backup in progress, next to the newest earlier backup."""

    def __init__(
        self, home: Path, part: Path, earlier: Path | None, content: Content | None
    ) -> None:
        self._home = home
        self._part = part
        self._earlier = earlier
        self._known = {} if content is None else content.files
        self.num_copied = 0
        self.num_bytes_copied = 0
        self._files: dict[str, BackedUp] = {}

    def copy(self, *, checkpoints: bool) -> Content:
        # The database comes first: newer files are left to the next backup.
        created = time.time()
        copy = self._part / DATABASE
        copy_database(self._home / DATABASE, copy)
        check_copy(copy)
        faults.reach("backup.database_copied")
        check_stored_version(copy)
        known = read_known_files(copy)
        with open_read_only(copy) as connection:
            version = int(connection.execute(tables.VERSION).scalar_one())
            running = set(_running_attempts(connection))
            elsewhere = _num_elsewhere(connection, str(self._home / CHECKPOINTS))
            # A database of an earlier version knows no files.
            has_files = sa.inspect(connection).has_table(tables.run_files.name)
            contents = used_digests(connection) if has_files else set()
        self._take_database(copy)
        selection = select_files(self._home, known, running, contents, checkpoints=checkpoints)
        for name in selection.names:
            self._copy_file(name)
        if elsewhere:
            selection.left_out.append(f"{elsewhere} checkpoints in other storages")
        self._drop_torn_checkpoints(selection.names, selection.left_out)
        return Content(
            created=created,
            paceline=paceline.__version__,
            schema_version=version,
            home=str(self._home),
            files=self._files,
            left_out=selection.left_out,
        )

    def _take_database(self, copy: Path) -> None:
        entry = _checkpoint_files.digest_file(copy)
        before = self._known.get(DATABASE)
        if before is not None and before.entry == entry and self._link(DATABASE):
            self._files[DATABASE] = before
            return
        # Later backups share the file by links, so nobody must change it.
        copy.chmod(0o400)
        self._note_entry(DATABASE, entry, entry.size, 0)

    def _copy_file(self, name: str) -> None:
        source, target = self._home / name, self._part / name
        try:
            facts = source.stat()
            before = self._known.get(name)
            is_same = before is not None and (facts.st_size, facts.st_mtime_ns) == (
                before.source_size,
                before.source_time_ns,
            )
            # Unchanged files are links to the earlier backup.
            if is_same and before is not None and self._link(name):
                self._files[name] = before
                return
            # A growing file may end within a line.
            limit = whole_lines(source) if grows(name) else None
            entry = _checkpoint_files.copy_file(source, target, durable=True, num_bytes=limit)
        except FileNotFoundError:
            return  # deleted since the names were read
        target.chmod(0o400)
        self._note_entry(name, entry, facts.st_size, facts.st_mtime_ns)
        faults.reach("backup.between_files")

    def _note_entry(
        self, name: str, entry: _checkpoint_files.FileEntry, size: int, time_ns: int
    ) -> None:
        self._files[name] = BackedUp(
            size=entry.size, digest=entry.digest, source_size=size, source_time_ns=time_ns
        )
        self.num_copied += 1
        self.num_bytes_copied += entry.size

    def _link(self, name: str) -> bool:
        """Share a file with the earlier backup by a link; return False if impossible."""
        assert self._earlier is not None
        target = self._part / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            if (self._earlier / name).stat().st_size != self._known[name].size:
                return False  # damaged
            # Temporary name first: `os.link` cannot replace a present target, such as a fresh copy.
            link = target.with_name(f".{target.name}.link")
            os.link(self._earlier / name, link)
            link.replace(target)
        except OSError:
            return False
        return True

    def _drop_torn_checkpoints(self, names: list[str], left_out: list[str]) -> None:
        """Leave out checkpoints deleted during the copy."""
        wanted = [name for name in names if name.startswith(f"{CHECKPOINTS}/")]
        torn = {name.split("/")[1] for name in wanted if name not in self._files}
        for name in wanted:
            if name.split("/")[1] in torn:
                self._files.pop(name, None)
                (self._part / name).unlink(missing_ok=True)
        left_out += [f"checkpoint {uuid} (deleted meanwhile)" for uuid in sorted(torn)]


def _running_attempts(connection: sa.Connection) -> list[int]:
    attempts = tables.attempts.c
    query = sa.select(attempts.id).where(attempts.state != AttemptState.ENDED.value)
    return list(connection.execute(query).scalars())


def _num_elsewhere(connection: sa.Connection, storage: str) -> int:
    checkpoints = tables.checkpoints.c
    query = sa.select(checkpoints.uuid).where(
        checkpoints.storage != storage, checkpoints.state != CheckpointState.DELETED.value
    )
    return len(connection.execute(query).all())


def _remove_backup(path: Path) -> None:
    """Remove a backup directory with its read-only files; errors are ignored."""
    shutil.rmtree(path, ignore_errors=True)


def _first_file(path: Path) -> Path:
    """Return the first existing path among a path and its parents."""
    return next(one for one in (path, *path.parents) if one.exists())


# A backup takes at most a tenth of the time.
_REST = 9


def follow_home(
    backup: Backup,
    home: Path,
    every_s: float,
    stop: threading.Event,
    on_error: Callable[[Exception], None],
) -> Iterator[BackupResult]:
    """Make and yield a backup after each change of the home; each replaces the last backup.

    A failed backup is reported and tried again: the one before it stays.

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
