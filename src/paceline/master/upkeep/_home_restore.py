"""Restoring a home from a backup."""

import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline import faults
from paceline.master._home_directory import RESTORING_NAME, Home
from paceline.master._lost_database import files_of, move_lost_files_aside
from paceline.master.store import RECORDS_BEGUN, check_copy, tables
from paceline.master.upkeep._backup_snapshots import (
    BackedUp,
    BackupError,
    Content,
    find_backup,
    read_backup_content,
)
from paceline.master.upkeep._files_to_back_up import CHECKPOINTS, DATABASE
from paceline.master.upkeep._restored_access import (
    RestoredAccess,
    check_kept_names,
    read_old_access,
    settle_access,
)
from paceline.messages.states import AttemptState, CheckpointState
from paceline.storage import copy_file, sync_directory, sync_tree

faults.register("restore.before_database")


@dataclass(kw_only=True, slots=True)
class RestoreResult:
    """What was restored: the backup, its content, and the files that were damaged in it.

    `num_lost_checkpoints` counts those that neither the backup nor the home has: they are deleted
    for the restored database, so that trials do not start from them. `access` says which tokens and
    passwords open the restored home.
    """

    path: Path
    content: Content
    damaged: list[str] = field(default_factory=list)
    num_lost_checkpoints: int = 0
    access: RestoredAccess = field(default_factory=lambda: RestoredAccess(old_home=None))


def restore(
    source: Path,
    home: Path,
    *,
    old_home: Path | None = None,
    keep_tokens: Collection[str] = (),
    keep_passwords: bool = False,
) -> RestoreResult:
    """Make a home from a backup.

    The database comes last, so a restore that was cut off is never taken for a home. It is made
    good by a second one. All browsers are signed out.

    Args:
        source: A backup, or a directory of backups, whose newest is taken.
        home: The home to make: missing, empty, or with checkpoints only.
        old_home: The home of before, which tells the tokens that were revoked since the backup and
            the passwords of now.
        keep_tokens: Without it: the names of the tokens that go on to open the home, or ``all``.
            The others are revoked, as one of them may have been since the backup.
        keep_passwords: Without it: whether passwords are kept.

    Raises:
        BackupError: There is no whole backup, the home is not empty, the backup is newer than this
            version, the old home is none, or the backup has not the tokens to be kept.
        DatabaseDamagedError: The backup's database is damaged.
        HomeInUseError: A master serves the home.
    """
    path = find_backup(source)
    content = read_backup_content(path)
    if content.schema_version > tables.SCHEMA_VERSION:
        raise BackupError(
            f"A backup must be of this version or an earlier one, but {str(path)!r} was made by"
            f" Paceline {content.paceline} (version {content.schema_version} of the database; this"
            f" one has {tables.SCHEMA_VERSION}). Hint: restore it with that version."
        )
    _check_empty(home)
    old = None if old_home is None else read_old_access(old_home)
    if old is not None and (keep_tokens or keep_passwords):
        raise BackupError(
            "`--keep-tokens` and `--keep-passwords` must come without `--old-home`, which says"
            " what is kept. Hint: leave them out."
        )
    check_kept_names(path / DATABASE, keep_tokens)
    place = Home(home)
    result = RestoreResult(path=path, content=content)
    with place.hold(), _marked_as_restoring(place.path):
        place.make_directories()
        for name, file in sorted(content.files.items()):
            if name != DATABASE:
                _copy_from_backup(path / name, place.path / name, name, file, result)
        settle = partial(settle_access, old=old, keep=keep_tokens, keep_passwords=keep_passwords)
        _restore_database(path, place.path, result, settle)
    return result


def restore_copy(copy: Path) -> tuple[Path, RestoredAccess]:
    """Put the copy that an upgrade has kept in the place of its home's database.

    The files that came after the upgrade stay: a master of the earlier version moves them away.
    Tokens that were revoked since stay so, passwords are those of now, and browsers are signed out.

    Args:
        copy: The copy, such as ``master.version-5.sqlite`` in the home.

    Returns:
        The directory that has the newer database now, and which tokens and passwords are kept.

    Raises:
        BackupError: It is no such copy.
        DatabaseDamagedError: It is damaged.
        HomeInUseError: A master serves the home.
    """
    home = copy.parent
    database = home / DATABASE
    if not re.fullmatch(rf"{database.stem}\.version-\d+\{database.suffix}", copy.name):
        raise BackupError(
            f"{str(copy)!r} must be a backup, or a copy that an upgrade has kept, such as"
            f" '{database.stem}.version-5{database.suffix}' in a home."
        )
    with Home(home).hold():
        check_copy(copy)
        try:
            old = read_old_access(home)
        except BackupError:
            old = None
        with closing(sqlite3.connect(copy)) as connection, connection:
            access = settle_access(connection, old)
        moved_to = move_lost_files_aside(home, files_of(database))
        os.replace(copy, database)
        sync_directory(home)
    return moved_to, access


def _check_empty(home: Path) -> None:
    if (home / RESTORING_NAME).exists() or not home.exists():
        return
    found = sorted(path.name for path in home.iterdir() if path.name != CHECKPOINTS)
    if found:
        raise BackupError(
            f"A home must be empty, or have {CHECKPOINTS!r} only, to be restored into, but"
            f" {str(home)!r} has {', '.join(map(repr, found[:3]))}. Hint: choose another `--home`,"
            " or move this one away."
        )


@contextmanager
def _marked_as_restoring(home: Path) -> Iterator[None]:
    """Keep a file in the home for as long as it is not whole."""
    home.chmod(0o700)
    (home / RESTORING_NAME).touch()
    yield
    sync_tree(home)
    (home / RESTORING_NAME).unlink()
    sync_tree(home)


def _copy_from_backup(
    source: Path, target: Path, name: str, file: BackedUp, result: RestoreResult
) -> None:
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copied = copy_file(source, target, durable=True, writable=True)
    except FileNotFoundError:
        result.damaged.append(f"{name} is missing")
        return
    if copied != file.entry:
        result.damaged.append(f"{name} {file.entry.difference(copied)}")
    target.chmod(0o400 if name.startswith(f"{CHECKPOINTS}/") else 0o600)


def _restore_database(
    path: Path,
    home: Path,
    result: RestoreResult,
    settle: Callable[[sqlite3.Connection], RestoredAccess],
) -> None:
    """Copy the database, have it name this home, and put it in its place."""
    target = home / DATABASE
    part = target.with_name(f".{DATABASE}.part")
    entry = result.content.files.get(DATABASE)
    found = copy_file(path / DATABASE, part, durable=True, writable=True)
    part.chmod(0o600)
    if entry is None or found != entry.entry:
        # Damage in a page that holds nothing does no harm.
        check_copy(part)
        result.damaged.append(f"{DATABASE} was altered, but can be read")
    with closing(sqlite3.connect(part)) as connection:
        with connection:
            _move_checkpoints(connection, home, result)
            result.access = settle(connection)
            # Those beside the backup may be newer than its database.
            connection.execute("DELETE FROM meta WHERE key = ?", (RECORDS_BEGUN,))
        running = connection.execute(
            "SELECT id, state FROM attempts WHERE state != ?", (AttemptState.ENDED.value,)
        ).fetchall()
    for attempt_id, state in running:
        directory = home / "attempts" / str(attempt_id)
        # One that never began starts as if nothing had been.
        if state != AttemptState.PENDING.value or directory.exists():
            _mark_started(directory)
    faults.reach("restore.before_database")
    os.replace(part, target)


def _move_checkpoints(connection: sqlite3.Connection, home: Path, result: RestoreResult) -> None:
    """Have the database name the home's checkpoints, and no others that were in a home."""
    storage = str(home / CHECKPOINTS)
    connection.execute(
        "UPDATE checkpoints SET storage = ? WHERE storage = ?",
        (storage, f"{result.content.home}/{CHECKPOINTS}"),
    )
    stored = connection.execute(
        "SELECT uuid FROM checkpoints WHERE storage = ? AND state != ?",
        (storage, CheckpointState.DELETED.value),
    ).fetchall()
    lost = [
        (CheckpointState.DELETED.value, uuid)
        for (uuid,) in stored
        if not (home / CHECKPOINTS / uuid / "manifest.json").is_file()
    ]
    connection.executemany("UPDATE checkpoints SET state = ? WHERE uuid = ?", lost)
    result.num_lost_checkpoints = len(lost)


def _mark_started(directory: Path) -> None:
    """Have an attempt end that ran when the backup was made: its trial goes on with another one.

    What its journals say is taken over before.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "started").touch(mode=0o600)
