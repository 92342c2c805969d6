"""Tokens, passwords and sign-ins of restored homes: what was shut out stays out."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from paceline._cluster.master.authentication import Passwords, SignIns, Tokens
from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.store import database as database_module
from paceline._cluster.master.store import user_tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.backup_directories import BackupError
from paceline._cluster.master.upkeep.recovery_records import Recorder
from paceline._cluster.master.upkeep.restore import RestoreResult, restore
from paceline._cluster.master.users import Users
from paceline._cluster.messages.master_models import TokenScope


class Doors:
    """The ways into the home of a master: tokens by name, the password, and a browser."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.tokens = Tokens(database)
        self.passwords = Passwords(database)
        self.sign_ins = SignIns(database)

    def make_token(self, name: str) -> str:
        return self.tokens.create(name, TokenScope.SUBMIT, None).result()[1]

    def opens(self, secret: str) -> bool:
        token = self.tokens.find(secret)
        return token is not None and token.is_usable


@contextmanager
def at_work(home: Path) -> Iterator[Doors]:
    Home(home).prepare()
    database = Database(home / "master.sqlite")
    recorder = Recorder(database, home)
    recorder.start()
    try:
        yield Doors(database)
    finally:
        recorder.close()
        database.close()


class Lost:
    """A home that was backed up; then a token was revoked, and the password was changed."""

    def __init__(self, root: Path) -> None:
        self.home, self.to = root / "home", root / "backups"
        with at_work(self.home) as doors:
            self.kept, self.revoked = doors.make_token("kept"), doors.make_token("revoked")
            doors.passwords.set("admin", "first password").result()
            self.browser = doors.sign_ins.open("admin")
            backup = Backup(self.home, self.to)
            with backup.hold():
                backup.make()
            doors.tokens.revoke(doors.tokens.find(self.revoked).id).result()  # type: ignore[union-attr]
            doors.passwords.set("admin", "second password").result()
        self.old = root / "old"
        self.home.rename(self.old)

    def restore(self, **options: Any) -> RestoreResult:
        return restore(self.to, self.home, **options)

    def check(self, *, kept: bool, revoked: bool, password: str | None) -> None:
        with at_work(self.home) as doors:
            assert (doors.opens(self.kept), doors.opens(self.revoked)) == (kept, revoked)
            right = [
                one
                for one in ("first password", "second password")
                if doors.passwords.check("admin", one)
            ]
            assert right == ([] if password is None else [password])
            assert doors.sign_ins.user_of(self.browser) is None


@pytest.fixture(scope="module")
def lost_home(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Return a lost home, which is there as the old one."""
    return Lost(tmp_path_factory.mktemp("lost"))


@pytest.fixture
def lost(lost_home: Lost) -> Iterator[Lost]:
    """Return a lost home in the place of which there is none."""
    yield lost_home
    shutil.rmtree(lost_home.home, ignore_errors=True)


@pytest.mark.parametrize("damage", ["none", "no database", "a damaged database"])
def test_what_was_revoked_and_changed_since_stays_so_where_the_old_home_is_there(
    damage: str, lost: Lost, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(lost.old, tmp_path / "old"))
    if damage != "none":
        for path in old.glob("master.sqlite*"):
            path.unlink()
    if damage == "a damaged database":
        (old / "master.sqlite").write_bytes(os.urandom(5000))
    access = lost.restore(old_home=old).access
    assert {token.name: token.is_kept for token in access.tokens} == {
        "kept": True,
        "revoked": False,
    }
    assert access.voided_passwords == []
    lost.check(kept=True, revoked=False, password="second password")


def test_without_the_old_home_no_token_and_no_password_is_kept(lost: Lost) -> None:
    access = lost.restore().access
    assert [(token.name, token.scope, token.is_kept) for token in access.tokens] == [
        ("kept", "submit", False),
        ("revoked", "submit", False),
    ]
    assert all(time.time() - token.created_at < 3600 for token in access.tokens)
    assert access.voided_passwords == ["admin"]
    lost.check(kept=False, revoked=False, password=None)


@pytest.mark.parametrize(
    ("names", "kept", "revoked"), [(["kept"], True, False), (["all"], True, True)]
)
def test_tokens_that_are_named_are_kept(
    names: list[str], kept: bool, revoked: bool, lost: Lost
) -> None:
    lost.restore(keep_tokens=names, keep_passwords=True)
    lost.check(kept=kept, revoked=revoked, password="first password")


def test_what_cannot_be_kept_is_refused_before_anything_is_restored(
    lost: Lost, tmp_path: Path
) -> None:
    with pytest.raises(BackupError, match="got 'other'. Hint: these are: kept, revoked"):
        lost.restore(keep_tokens=["kept", "other"])
    with pytest.raises(BackupError, match="must come without `--old-home`"):
        lost.restore(keep_tokens=["kept"], old_home=lost.old)
    with pytest.raises(BackupError, match="must have its database or its records"):
        lost.restore(old_home=tmp_path)
    assert not lost.home.exists()


@pytest.mark.parametrize("damage", ["none", "no database"])
def test_links_to_people_are_those_of_the_old_home(damage: str, tmp_path: Path) -> None:
    """A backup does not bring back somebody whose link was taken away since."""
    home, old, to = tmp_path / "home", tmp_path / "old", tmp_path / "backups"
    issuer = "https://id.example.org"

    def linked(home: Path) -> dict[str, tuple[str | None, str | None]]:
        with at_work(home) as doors, doors.database.read() as connection:
            columns = user_tables.users.c
            query = select(columns.name, columns.oidc_issuer, columns.oidc_subject)
            return {row[0]: (row[1], row[2]) for row in connection.execute(query)}

    with at_work(home) as doors:
        users = Users(doors.database, doors.tokens.load)
        for name in ("ann", "bob"):
            users.add(name, role=None, is_admin=False, is_service=False).result()
            users.link(name, issuer, f"id of {name}".replace(" ", "-")).result()
        backup = Backup(home, to)
        with backup.hold():
            backup.make()
    with at_work(home) as doors:
        Users(doors.database, doors.tokens.load).link("ann", issuer, "").result()
    home.rename(old)
    if damage != "none":
        for path in old.glob("master.sqlite*"):
            path.unlink()
    restore(to, home, old_home=old)
    assert linked(home)["ann"] == (None, None)
    assert linked(home)["bob"] == (issuer, "id-of-bob")


def test_the_command_tells_names_scopes_and_ages(lost: Lost) -> None:
    command = [sys.executable, "-m", "paceline.cli", "restore", lost.to, "--home", lost.home]
    done = subprocess.run([*command, "--keep-tokens", "kept"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert "Tokens that stay valid:\n  kept (scope submit, made " in output
    assert "Tokens that are revoked:\n  revoked (scope submit, made " in output
    assert "Without a password until one is set again: admin." in output


@pytest.mark.parametrize("what", ["token", "sign-in", "password"])
def test_what_shuts_somebody_out_is_on_the_disk_before_it_is_told(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []

    def force(descriptor: int) -> None:
        os.fdatasync(descriptor)
        forced.append(descriptor)

    with at_work(tmp_path) as doors:
        token, browser = doors.make_token("one"), doors.sign_ins.open("admin")
        found = doors.tokens.find(token)
        assert found is not None
        shut: dict[str, Callable[[], object]] = {
            "token": lambda: doors.tokens.revoke(found.id).result(),
            "sign-in": lambda: doors.sign_ins.close(browser),
            "password": lambda: doors.passwords.set("admin", "a new password").result(),
        }
        monkeypatch.setattr(database_module, "_force", force)
        shut[what]()
        assert forced
