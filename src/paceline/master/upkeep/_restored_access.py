"""Who may use a restored home: nobody whom the home of before had shut out since the backup."""

import sqlite3
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import text

from paceline.master.store import DatabaseVersionError, open_read_only
from paceline.master.upkeep._backup_snapshots import BackupError
from paceline.master.upkeep._files_to_back_up import DATABASE
from paceline.master.upkeep._recovery_records import read_record, record_path

ALL_TOKENS = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredToken:
    """A token of a backup that was neither revoked nor expired, and whether it is kept."""

    name: str
    scope: str
    created_at: float
    is_kept: bool


@dataclass(kw_only=True, slots=True)
class RestoredAccess:
    """What became of the tokens and passwords of a backup.

    Attributes:
        old_home: The home that told what was revoked and changed since; None if there was none.
        tokens: Those that were neither revoked nor expired in the backup.
        voided_passwords: The users whose passwords were removed.
    """

    old_home: Path | None
    tokens: list[RestoredToken] = field(default_factory=list)
    voided_passwords: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OldAccess:
    """What a lost home knows: passwords by user, and when each token was revoked, by digest."""

    home: Path
    users: dict[str, tuple[str, float]]
    revoked_at: dict[str, float | None]


def read_old_access(home: Path) -> OldAccess:
    """Return what a home knows of users and tokens: by its database, or else by its records.

    Raises:
        BackupError: It has neither.
    """
    database = home / DATABASE
    try:
        if database.is_file() and database.stat().st_size:
            return _access_of_database(home)
    except DatabaseVersionError:
        pass  # damaged
    records = record_path(home, None)
    if not records.is_file():
        raise BackupError(
            "An old home must have its database or its records, to tell which tokens were revoked"
            f" since the backup, but {str(home)!r} has neither that can be read. Hint: leave"
            " `--old-home` out, and name the tokens that are to be kept by `--keep-tokens`."
        )
    return _access_of_records(home, records)


def _access_of_database(home: Path) -> OldAccess:
    with open_read_only(home / DATABASE) as connection:
        users = connection.execute(text("SELECT name, password_hash, changed_at FROM users"))
        tokens = connection.execute(text("SELECT digest, revoked_at FROM tokens"))
        return OldAccess(
            home,
            {row.name: (row.password_hash, row.changed_at) for row in users},
            {row.digest: row.revoked_at for row in tokens},
        )


def _access_of_records(home: Path, records: Path) -> OldAccess:
    users: dict[str, tuple[str, float]] = {}
    revoked_at: dict[str, float | None] = {}
    for _, row in read_record(records):
        if row is None or row.values is None:
            continue
        values = row.values
        if row.table == "users":
            users[values["name"]] = (values["password_hash"], values["changed_at"])
        elif row.table == "tokens":
            revoked_at[values["digest"]] = values["revoked_at"]
    return OldAccess(home, users, revoked_at)


def check_kept_names(database: Path, keep: Collection[str]) -> None:
    """Check that a backup has the tokens that are to be kept.

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
        old: What was revoked and changed since; what it does not know is revoked. If None, all is
            revoked but what is to be kept.
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
    names = [name for (name,) in connection.execute("SELECT name FROM users ORDER BY name")]
    users = {} if old is None else old.users
    result.voided_passwords = [name for name in names if name not in users]
    connection.execute("DELETE FROM users")
    connection.executemany(
        "INSERT INTO users (name, password_hash, changed_at) VALUES (?, ?, ?)",
        [(name, *values) for name, values in users.items()],
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
