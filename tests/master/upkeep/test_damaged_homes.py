"""Each file and directory of a home, damaged in each way: `home check` and `up` name it."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline._base.journal_records import seal
from paceline._cluster.master.authentication import Tokens
from paceline._cluster.master.home_directory import Home, HomeUnusableError, LostDatabaseError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.database import (
    Database,
    DatabaseVersionError,
    settle_cluster_id,
)
from paceline._cluster.master.store.recovery_rows import begin_records
from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.backup_directories import BackupError
from paceline._cluster.master.upkeep.check import check, fix
from paceline._cluster.master.upkeep.recovery_records import write_some
from paceline._cluster.master.upkeep.restore import restore
from paceline._cluster.messages.master_models import TokenScope
from paceline._cluster.runner.attempt_directory import SecretFileError

STORED = Path(__file__).parents[2] / "stored"
# A part of the text that is told; "" if nothing is wrong with that, None if anything may be said.
MENDED = {"missing": "", "random": "", "empty": ""}
WRONG = {
    "directory": "must be a regular file, but is a directory",
    "FIFO": "must be a regular file, but is a FIFO",
    "dangling": "but is a link to",
    "foreign": "must belong to the owner of the home",
}
FILES: dict[str, dict[str, str]] = {
    "token": {"missing": "token is missing", "random": "token is damaged", "empty": "is empty"},
    "attempt_key": {"missing": "is missing", "random": "is damaged", "empty": "is empty"},
    "cluster_id": {
        "missing": "cluster_id is missing", "random": "has another identity", "empty": "is empty",
    },
    "secrets.json": {
        "missing": "lacks KEY of experiment 3", "random": "secrets.json is damaged",
        "empty": "secrets.json is damaged",
    },
    "pools.yaml": {"missing": "", "random": "pools.yaml cannot be used", "empty": "cannot be used"},
    "master.lock": MENDED | {"foreign": "is a link to"},
    "master.json": {"missing": "", "random": "master.json is damaged", "empty": "is damaged"},
    "master.log": MENDED,
    "attempts/newest": MENDED,
    "master.sqlite": {
        "missing": "master.sqlite is missing", "random": "is damaged", "empty": "is empty",
        "foreign": "is a link to",
    },
    "master.sqlite-wal": {"missing": "", "random": "-wal its header is", "empty": "",
                          "foreign": "is a link to"},
    "records/accounts.jsonl": {
        "missing": "accounts.jsonl is missing", "random": "has 1 damaged line", "empty": "",
    },
}  # fmt: skip
UNREADABLE = {"directory": "cannot be read", "FIFO": "cannot be read", "foreign": ""}
INNER: dict[str, dict[str, str]] = {
    "records/experiment-1.jsonl": {
        "missing": "1.jsonl is missing", "random": "damaged line", "empty": "lacks",
        "dangling": "is missing", "foreign": "damaged line",
    },
    "contexts/CODE.tar.gz": {
        "missing": "is missing: experiments 1, 2, 3 cannot start", "random": "is damaged: exp",
        "empty": "is damaged: exp", "dangling": "is a link to nothing: experiments 1, 2, 3",
        "foreign": "is damaged",
    },
    "logs/trial-1/attempt-1.jsonl": {
        "missing": "", "random": "has 1 damaged line", "empty": "",
        "dangling": "attempt-1.jsonl is a link to nothing",
        "foreign": "has 1 damaged line",
    },
}  # fmt: skip
DIRECTORIES: dict[str, str] = {
    "contexts": "cannot start trials",
    "logs": "logs is missing, with the logs of",
    "checkpoints": "is gone from",
    "records": "is missing",
    "attempts": "",
    "logs/trial-1": "",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home in which nothing is damaged: with records, a token, a user and a secret."""
    home = tmp_path_factory.mktemp("whole") / "home"
    with tarfile.open(STORED / "home_13.tar.xz") as archive:
        archive.extractall(home, filter="data")
    with closing(sqlite3.connect(home / "master.sqlite")) as connection, connection:
        connection.execute("UPDATE checkpoints SET storage = ?", (str(home / "checkpoints"),))
        connection.execute(
            "UPDATE experiments SET config = json_set(config, '$.environment.secrets', json(?))"
            " WHERE id = 3",
            ('{"KEY": "***"}',),
        )
    place = Home(home)
    place.prepare()
    secrets = {"version": 1, "experiments": {"3": {"KEY": "value"}}}
    (home / "secrets.json").write_bytes(seal(json.dumps(secrets).encode()))
    database = Database(home / "master.sqlite")
    place.keep_id(settle_cluster_id(database, place.cluster_id))
    Tokens(database).create("one", TokenScope.READ, None).result()
    begin_records(database)
    while write_some(database, home):
        pass
    database.close()
    return home


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the home, to be damaged, in its place: rows name the checkpoints there."""
    kept = whole.rename(tmp_path / "kept")
    shutil.copytree(kept, whole, symlinks=True)
    yield whole
    shutil.rmtree(whole)
    kept.rename(whole)


def damage(home: Path, name: str, how: str) -> None:
    if "CODE" in name:
        [context] = (home / "contexts").iterdir()
        name = name.replace("CODE", context.name.split(".")[0])
    path = home / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    other = home.parent / "elsewhere"
    other.write_bytes(b"\xfe somebody else's \x00\n")
    os.chown(other, 12345, 12345)
    does: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "directory": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
        "random": lambda: path.write_bytes(bytes(range(255, 10, -1)) * 9 + b"\n"),
        "empty": path.touch,
        "dangling": lambda: path.symlink_to(home.parent / "gone"),
        "foreign": lambda: path.symlink_to(other),
        "file": lambda: path.write_text("no directory"),
    }
    does[how]()


def told(home: Path) -> str:
    return "\n".join(finding.text for finding in check(home).findings)


CASES = [
    *((name, how, (WRONG | texts)[how]) for name, texts in FILES.items() for how in WRONG | texts),
    *(
        (name, how, (UNREADABLE | texts)[how])
        for name, texts in INNER.items()
        for how in UNREADABLE | texts
    ),
    *((name, "missing", text) for name, text in DIRECTORIES.items()),
    *(
        (name, how, "must be a directory, but is")
        for name in DIRECTORIES
        for how in ("FIFO", "file", "dangling", "foreign")
    ),
]


def opens(home: Path) -> str:
    """Open a home as a master does; return why that is refused."""
    try:
        place = Home(home)
        with place.hold():
            place.prepare()
            Master(place, ["cpu"]).database.close()
    except (
        HomeUnusableError, LostDatabaseError, DatabaseVersionError, SecretFileError,
    ) as error:  # fmt: skip
        return str(error)
    return ""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a file of another user needs root")
@pytest.mark.parametrize(
    ("name", "how", "text"), CASES, ids=[f"{name}-{how}" for name, how, _ in CASES]
)
def test_damage_is_named_by_the_check_and_keeps_no_master_waiting(
    name: str, how: str, text: str, damaged: Path
) -> None:
    damage(damaged, name, how)
    found = told(damaged)
    assert text in found
    assert (text == "") is (found == ""), found
    refusal = opens(damaged)
    assert not refusal or "Hint: " in refusal


@pytest.mark.long
def test_the_command_says_what_to_do_without_a_traceback(whole: Path) -> None:
    copy = whole.with_name("copy")
    shutil.copytree(whole, copy, symlinks=True)
    for name in ("token", "cluster_id", "logs"):
        damage(copy, name, "FIFO")
    for command in (["home", "check"], ["home", "check", "--fix"], ["up", "--port", "0"]):
        done = subprocess.run(
            [sys.executable, "-m", "paceline.cli", *command, "--home", copy],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        output = done.stdout + done.stderr
        assert "Traceback" not in output
        for name in ("token", "cluster_id", "logs"):
            assert re.search(rf"{name}'? must be a .*, but is a FIFO", output), output
        assert output.count("Hint: ") >= 3


def test_a_home_that_was_just_restored_has_no_differences(whole: Path, tmp_path: Path) -> None:
    """Its records are written when a master starts."""
    assert told(whole) == ""
    # A trial need not print anything.
    working = Path(shutil.copytree(whole, tmp_path / "working", symlinks=True))
    shutil.rmtree(working / "logs")
    (working / "logs").mkdir()
    with closing(sqlite3.connect(working / "master.sqlite")) as connection, connection:
        connection.execute("UPDATE checkpoints SET storage = ?", (str(working / "checkpoints"),))
    backup = Backup(working, tmp_path / "backups", checkpoints=True)
    with backup.hold():
        backup.make()
    other = tmp_path / "other"
    restore(tmp_path / "backups", other, keep_tokens=["all"], keep_passwords=True)
    # Secrets are in no backup.
    assert re.findall(r"^(\S+) ", told(other), re.MULTILINE) == ["secrets.json"]
    assert len(fix(other).findings) == 1
    (other / "secrets.json").write_bytes((whole / "secrets.json").read_bytes())
    assert told(other) == ""


def test_what_is_in_the_way_of_a_fix_is_named(damaged: Path) -> None:
    damage(damaged, "records/experiment-1.jsonl", "directory")
    with pytest.raises(BackupError, match="experiment-1.jsonl.* move that away"):
        fix(damaged)
