"""What must be in which place of a home: regular files and directories of its owner, nothing else.

A FIFO in the place of a file would be waited for, for ever and without a word.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_AGAIN = "move it away. The master makes a new one"
_DATABASE = (
    "move it away, and make the database again from its records (`paceline home check --fix`), or"
    " restore a backup (`paceline restore`)"
)
_LOG = f"{_DATABASE}. Changes that only this file held are lost"
_SECRETS = "move it away. Experiments that need secrets have to be forked with them"
_BACKUP = "move it away, and take what it held from a backup (`paceline backup` makes them)"
# What to do if something else is there.
_FILES = {
    "token": f"{_AGAIN}: sign in again, and copy it where it is used",
    "attempt_key": f"{_AGAIN}: attempts that run are lost, and their trials go on in other ones",
    "cluster_id": "move it away. The database has a copy",
    "secrets.json": _SECRETS,
    "pools.yaml": "move it away, or put the pools there again",
    "master.sqlite": _DATABASE,
    "master.sqlite-wal": _LOG,
    "master.sqlite-shm": _AGAIN,
    "master.sqlite-journal": _LOG,
    "master.lock": _AGAIN,
    "master.json": _AGAIN,
    "master.log": _AGAIN,
    "restoring": "move it away, and run `paceline restore` once more",
    "attempts/newest": _AGAIN,
    "records/accounts.jsonl": "move it away. The master writes it anew",
}
_DIRECTORIES = {
    "contexts": f"{_BACKUP}; experiments whose code is gone have to be forked",
    "attempts": f"{_BACKUP}; what runs is lost, and its trials go on from their checkpoints",
    "logs": _BACKUP,
    "checkpoints": _BACKUP,
    "records": "move it away. The master writes the records of the database anew",
}
# SQLite has the files beside a database that a link leads to beside that one.
_NO_LINKS = ("master.sqlite", "master.lock")


@dataclass(frozen=True, slots=True)
class WrongEntry:
    """Something in a home that must not be there: its name, what is wrong, and what to do."""

    name: str
    problem: str
    hint: str


def find_wrong_entries(home: Path) -> list[WrongEntry]:
    """Return what is in the place of a home's files and directories and is none of them.

    Nothing is opened. What is missing is not wrong.
    """
    owners = {0, os.geteuid(), home.stat().st_uid}
    found = []
    for names, kind in ((_FILES, stat.S_IFREG), (_DIRECTORIES, stat.S_IFDIR)):
        for name, hint in names.items():
            problem = _problem_of(home / name, kind, owners)
            if problem is not None:
                found.append(WrongEntry(name, problem, hint))
    return found


def _problem_of(path: Path, kind: int, owners: set[int]) -> str | None:
    if any(path.name.startswith(name) for name in _NO_LINKS) and path.is_symlink():
        return f"must be {_KINDS[kind]}, but is a link to {os.readlink(path)!r}"
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return None
        return f"must be {_KINDS[kind]}, but is a link to {os.readlink(path)!r}, which is missing"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"must be {_KINDS[kind]}, but is a link to itself"
        return f"must be {_KINDS[kind]}, but cannot be looked at ({error.strerror})"
    found = stat.S_IFMT(facts.st_mode)
    if found != kind:
        return f"must be {_KINDS[kind]}, but is {_KINDS.get(found, 'something else')}"
    # A directory may lie on a disk that others write to.
    if kind == stat.S_IFREG and facts.st_uid not in owners:
        return f"must belong to the owner of the home, but belongs to user {facts.st_uid}"
    return None
