"""Restore, and who may use a restored home."""

import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import sqlalchemy as sa

from paceline import faults
from paceline._base.files import sync_directory
from paceline._cluster.master.home_directory import (
    RESTORING_NAME,
    Home,
    files_of,
    move_lost_files_aside,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import DatabaseVersionError, check_stored_version
from paceline._cluster.master.store.recovery_rows import RECORDS_BEGUN
from paceline._cluster.master.store.upgrades import check_copy, open_read_only
from paceline._cluster.master.upkeep.backup_directories import (
    CHECKPOINTS,
    DATABASE,
    BackedUp,
    BackupError,
    Content,
    find_backup,
    read_backup_content,
)
from paceline._cluster.master.upkeep.recovery_records import read_record, record_path
from paceline._cluster.messages.states import AttemptState, CheckpointState
from paceline.storage._checkpoint_files import copy_file, sync_tree

ALL_TOKENS = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredToken:
    """Usable token of a backup, and whether the restore keeps the token."""

    name: str
    scope: str
    created_at: float
    is_kept: bool


@dataclass(kw_only=True, slots=True)
class RestoredAccess:
    """Tokens and passwords of a backup after the restore.

    Attributes:
        old_home: The home with the newer revocations and changes; None if there was none.
        tokens: Those that were neither revoked nor expired in the backup.
        voided_passwords: The users whose passwords were removed.
    """

    old_home: Path | None
    tokens: list[RestoredToken] = field(default_factory=list)
    voided_passwords: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OldAccess:
    """Access data of a lost home: passwords by user, and times of revocation by digest.

    Each user has a hash, the time of its change, whether the user is active, and the person at
    a provider.
    """

    home: Path
    users: dict[str, "_Access"]
    revoked_at: dict[str, float | None]


def read_old_access(home: Path) -> OldAccess:
    """Return a home's users and tokens, from its database or else its records.

    Raises:
        BackupError: It has neither.
    """
    database = home / DATABASE
    try:
        if database.is_file() and database.stat().st_size:
            return _database_access(home)
    except DatabaseVersionError:
        pass  # damaged
    records = record_path(home, None)
    if not records.is_file():
        raise BackupError(
            "An old home must have its database or its records, to tell which tokens were revoked"
            f" since the backup, but {str(home)!r} has neither that can be read. Hint: leave"
            " `--old-home` out, and name the tokens that are to be kept by `--keep-tokens`."
        )
    return _record_access(home, records)


def _database_access(home: Path) -> OldAccess:
    with open_read_only(home / DATABASE) as connection:
        users = connection.execute(sa.text("SELECT * FROM users")).mappings()
        tokens = connection.execute(sa.text("SELECT digest, revoked_at FROM tokens"))
        return OldAccess(
            home,
            {row["name"]: _access_of({**row}) for row in users},
            {row.digest: row.revoked_at for row in tokens},
        )


def _record_access(home: Path, records: Path) -> OldAccess:
    users: dict[str, _Access] = {}
    revoked_at: dict[str, float | None] = {}
    for _, row in read_record(records):
        if row is None or row.values is None:
            continue
        values = row.values
        if row.table == "users":
            users[values["name"]] = _access_of(values)
        elif row.table == "tokens":
            revoked_at[values["digest"]] = values["revoked_at"]
    return OldAccess(home, users, revoked_at)


class _Access(NamedTuple):
    password_hash: str
    changed_at: float
    is_active: bool
    issuer: str | None
    subject: str | None


def _access_of(row: Mapping[str, Any]) -> _Access:
    # Homes of earlier versions have no users that were removed.
    is_active = bool(row.get("is_active", True))
    person = row.get("oidc_issuer"), row.get("oidc_subject")
    return _Access(row["password_hash"], row["changed_at"], is_active, *person)


def check_kept_names(database: Path, keep: Collection[str]) -> None:
    """Check the presence of the tokens to keep in a backup.

    Raises:
        BackupError: It has not.
    """
    address = f"file:{quote(str(database.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            known = {row["name"] for row in _usable_tokens(connection)}
    except sqlite3.Error:
        return  # the check of the database names the damage
    for name in keep:
        if name != ALL_TOKENS and name not in known:
            raise BackupError(
                f"`--keep-tokens` must be {ALL_TOKENS!r} or a token of the backup that is neither"
                f" revoked nor expired, but got {name!r}. Hint: these are:"
                f" {', '.join(sorted(known)) or 'none'}."
            )


def settle_access(
    connection: sqlite3.Connection,
    old: OldAccess | None,
    keep: Collection[str] = (),
    *,
    keep_passwords: bool = False,
) -> RestoredAccess:
    """End all sign-ins of a restored database; revoke tokens and change passwords as is due.

    Args:
        connection: The database.
        old: Newer revocations and changes; tokens that it does not know are revoked. If None, all
            are revoked except those to keep.
        keep: The names of tokens that are kept without an old home, or `ALL_TOKENS`.
        keep_passwords: Whether passwords are kept without an old home.
    """
    result = RestoredAccess(old_home=None if old is None else old.home)
    now = time.time()
    if _has_table(connection, "sign_ins"):
        connection.execute("DELETE FROM sign_ins")
    for token in _usable_tokens(connection):
        if old is None:
            is_kept = ALL_TOKENS in keep or token["name"] in keep
            revoked_at: float | None = now
        else:
            revoked_at = old.revoked_at.get(token["digest"], now)
            is_kept = revoked_at is None
        if not is_kept:
            change = "UPDATE tokens SET revoked_at = ? WHERE id = ?"
            connection.execute(change, (revoked_at, token["id"]))
        result.tokens.append(
            RestoredToken(
                name=token["name"],
                scope=token["scope"],
                created_at=token["created_at"],
                is_kept=is_kept,
            )
        )
    if _has_table(connection, "users"):
        _settle_passwords(connection, old, result, keep_passwords=keep_passwords)
    return result


def _settle_passwords(
    connection: sqlite3.Connection,
    old: OldAccess | None,
    result: RestoredAccess,
    *,
    keep_passwords: bool,
) -> None:
    if old is None and keep_passwords:
        return
    query = "SELECT name FROM users WHERE password_hash <> '' ORDER BY name"
    users = {} if old is None else old.users
    result.voided_passwords = [
        name for (name,) in connection.execute(query) if not users.get(name, ("",))[0]
    ]
    connection.execute("UPDATE users SET password_hash = ''")
    connection.executemany(
        "INSERT INTO users (name, password_hash, changed_at) VALUES (?, ?, ?) ON CONFLICT (name)"
        " DO UPDATE SET password_hash = excluded.password_hash, changed_at = excluded.changed_at",
        [(name, one.password_hash, one.changed_at) for name, one in users.items()],
    )
    columns = {row[1] for row in connection.execute("PRAGMA table_info(users)")}
    if "is_active" in columns:
        removed = [(name,) for name, one in users.items() if not one.is_active]
        connection.executemany("UPDATE users SET is_active = 0 WHERE name = ?", removed)
    if "oidc_subject" in columns:
        connection.executemany(
            "UPDATE users SET oidc_issuer = ?, oidc_subject = ? WHERE name = ?",
            [(one.issuer, one.subject, name) for name, one in users.items()],
        )


def _usable_tokens(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    if not _has_table(connection, "tokens"):
        return []
    names = ("id", "name", "scope", "digest", "created_at")
    found = connection.execute(
        f"SELECT {', '.join(names)} FROM tokens WHERE revoked_at IS NULL"  # noqa: S608
        " AND (expires_at IS NULL OR expires_at > ?) ORDER BY id",
        (time.time(),),
    )
    return [dict(zip(names, row, strict=True)) for row in found]


def _has_table(connection: sqlite3.Connection, name: str) -> bool:
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(query, (name,)).fetchone() is not None


faults.register("restore.before_database")


@dataclass(kw_only=True, slots=True)
class RestoreResult:
    """Result of a restore: the backup, its content, and the damaged files.

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

    The database comes last, so an interrupted restore is never taken for a home. A second restore
    completes it. All browsers are signed out.

    Args:
        source: A backup, or a directory of backups, whose newest is taken.
        home: The home to make: missing, empty, or with checkpoints only.
        old_home: The earlier home, which has the tokens that were revoked since the backup and
            the passwords of now.
        keep_tokens: Without it: the names of the tokens that stay valid, or ``all``.
            The others are revoked, as one of them may have been since the backup.
        keep_passwords: Without it: whether passwords are kept.

    Raises:
        BackupError: There is no whole backup, the home is not empty, this version does not take the
            backup's database, the old home is none, or the backup has not the tokens to be kept.
        DatabaseDamagedError: The backup's database is damaged.
        HomeInUseError: A master serves the home.
    """
    path = find_backup(source)
    content = read_backup_content(path)
    if content.schema_version not in range(tables.FIRST_SCHEMA_VERSION, tables.SCHEMA_VERSION + 1):
        raise BackupError(
            f"A backup must have a database of version {tables.FIRST_SCHEMA_VERSION} to"
            f" {tables.SCHEMA_VERSION}, but {str(path)!r}, made by Paceline {content.paceline}, has"
            f" {content.schema_version}. Hint: restore it with that version."
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
    """Put the copy kept by an upgrade in place of its home's database.

    Newer files stay: a master of the earlier version moves them away.
    Tokens that were revoked since stay so, passwords are those of now, and browsers are signed out.

    Args:
        copy: The copy, such as ``master.version-13.sqlite`` in the home.

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
            f" '{database.stem}.version-13{database.suffix}' in a home."
        )
    with Home(home).hold():
        check_copy(copy)
        check_stored_version(copy)
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
    """Keep a marker file in the home until the home is complete."""
    home.chmod(0o700)
    (home / RESTORING_NAME).touch()
    yield
    sync_tree(home)
    # Marker removed after the sync: a power cut must not leave an unmarked partial home.
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
    """Copy the database, adapt the copy to this home, and move the copy into place."""
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
            # Records beside the backup may be newer than its database, so they must begin anew.
            connection.execute("DELETE FROM meta WHERE key = ?", (RECORDS_BEGUN,))
        running = connection.execute(
            "SELECT id, state FROM attempts WHERE state != ?", (AttemptState.ENDED.value,)
        ).fetchall()
    for attempt_id, state in running:
        directory = home / "attempts" / str(attempt_id)
        # Attempts pending without a directory never began: they start normally.
        if state != AttemptState.PENDING.value or directory.exists():
            _mark_started(directory)
    faults.reach("restore.before_database")
    os.replace(part, target)


def _move_checkpoints(connection: sqlite3.Connection, home: Path, result: RestoreResult) -> None:
    """Adapt checkpoint rows to this home, and mark missing checkpoints as deleted."""
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
    """Mark a running attempt as started: the attempt ends, and its trial resumes in another.

    The records in its journals are taken over before.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / "started").touch(mode=0o600)
