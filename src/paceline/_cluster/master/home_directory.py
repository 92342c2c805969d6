"""Home of a master: entries, secrets, address, files left by a lost database."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._base.files import (
    DamagedSecretError,
    make_secret,
    open_private,
    read_secret,
    write_atomically,
)
from paceline._base.journal_records import seal
from paceline._cluster.master.store.database import (
    DatabaseDamagedError,
    Transaction,
    check_stored_version,
)
from paceline._cluster.master.store.upgrades import KnownFiles, find_log_damage, read_known_files
from paceline._cluster.runner.attempt_directory import (
    NEWEST_NAME,
    AttemptDirectory,
    newest_attempt,
    read_secret_file,
)
from paceline.config._environment_and_secrets import hide_in_text

logger = logging.getLogger(__name__)


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
# Hints for entries of the wrong kind in place of the home's files.
_FILES = {
    "token": f"{_AGAIN}: sign in again, and copy it where it is used",
    "attempt_key": f"{_AGAIN}: attempts that run are lost, and their trials continue in others",
    "cluster_id": "move it away. The database has a copy",
    "secrets.json": _SECRETS,
    "notify.yaml": "move it away, or put the channels there again",
    "oidc.yaml": "move it away, or put the settings there again",
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
    "attempts": f"{_BACKUP}; what runs is lost, and its trials resume from checkpoints",
    "logs": _BACKUP,
    "files": _BACKUP,
    "checkpoints": _BACKUP,
    "records": "move it away. The master writes the records of the database anew",
}
# SQLite has the files beside a database that a link leads to beside that one.
_NO_LINKS = ("master.sqlite", "master.lock")


@dataclass(frozen=True, slots=True)
class WrongEntry:
    """Invalid entry of a home: its name, the problem, and a hint."""

    name: str
    problem: str
    hint: str


def find_wrong_entries(home: Path) -> list[WrongEntry]:
    """Return the entries of the wrong kind or owner in place of a home's files and directories.

    Nothing is opened. A missing file is no problem.
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


_SET_ASIDE = "set_aside"


class LostDatabaseError(RuntimeError):
    """Raised when a home holds files unknown to its database."""


@dataclass(frozen=True, slots=True)
class _UnknownFiles:
    """Unknown files of a kind, and a text naming them."""

    text: str
    paths: list[Path]


def check_for_lost_database(home: Path, database: Path, *, set_aside: bool = False) -> None:
    """Check the home's files against the database; deletes nothing.

    Args:
        home: The home; this process must hold it.
        database: The path of its database.
        set_aside: Move the files that the database does not know, and a damaged database with
            all files, into a dated directory below ``set_aside`` in the home.

    Raises:
        LostDatabaseError: There are unknown files, or an attempt to be set aside still runs.
        DatabaseVersionError: The database is damaged, or of an unknown version.
    """
    log = database.with_name(f"{database.name}-wal")
    if damage := find_log_damage(database):
        logger.warning(
            "The log %r of the database is damaged: %s, and changes may be lost. Hint: stop the"
            " master, and look with `paceline home check` what differs from the records.",
            log.name,
            damage,
        )
    known = KnownFiles()
    unknown_files: list[_UnknownFiles] = []
    state, is_lost = "does not know them", True
    if not database.exists() or database.stat().st_size == 0:
        state = "is empty" if database.exists() else "is missing"
        # SQLite deletes such a log, but it may hold all there is of the newest changes.
        if log.exists() and log.stat().st_size > 0:
            unknown_files.append(
                _UnknownFiles(f"the database's log {log.name!r}", files_of(database))
            )
    else:
        try:
            check_stored_version(database)
            known, is_lost = read_known_files(database), False
        except DatabaseDamagedError:
            if not set_aside:
                raise
            unknown_files.append(
                _UnknownFiles(f"the damaged database {database.name!r}", files_of(database))
            )
    unknown_files += _find_unknown_files(home, known)
    accounts = home / "records" / "accounts.jsonl"
    if is_lost and accounts.exists():
        unknown_files.append(_UnknownFiles("the users in 'records'", [accounts]))
    if unknown_files and set_aside:
        _move_unknown_files(home, unknown_files)
    elif unknown_files:
        raise LostDatabaseError(_lost_database_text(home, database, state, unknown_files))


def files_of(database: Path) -> list[Path]:
    """Return the existing files of a database: the database itself and its logs."""
    paths = (database.with_name(database.name + end) for end in ("", "-wal", "-shm", "-journal"))
    return [path for path in paths if path.exists()]


def _find_unknown_files(home: Path, known: KnownFiles) -> list[_UnknownFiles]:
    contexts = [
        path
        for path in _entries(home / "contexts", r"(\w+)\.tar\.gz")
        if path.name.split(".")[0] not in known.contexts
    ]
    attempts = _numbered(home / "attempts", r"(\d+)(?:\..*)?", known.newest_attempt)
    # The directory of an attempt is removed at its end; this file still has its id.
    newest = newest_attempt(home / "attempts")
    if newest > known.newest_attempt:
        attempts[home / "attempts" / NEWEST_NAME] = newest
    # The memory of a trial alone is no reason to ask: a look at the attempts removes it.
    memories = _numbered(home / "attempts", r"memory-(\d+)", known.newest_trial)
    records = _numbered(home / "records", r"experiment-(\d+)\.jsonl", known.newest_experiment)
    logs = _numbered(home / "logs", r"trial-(\d+)", known.newest_trial)
    checkpoints: list[Path] = []
    if known.newest_trial == 0:
        # Otherwise a checkpoint may wait in the journal of an attempt that is known.
        checkpoints = _entries(home / "checkpoints", r"([^.].*)")
    texts = [
        (_count_with_noun(len(contexts), "context"), "contexts", contexts),
        (
            _range("attempt", "attempts", attempts),
            "attempts",
            [*attempts, *memories] if attempts else [],
        ),
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
    """Move files of a home into a new directory of the same layout, and return the directory."""
    target = home / _SET_ASIDE / time.strftime(f"%Y-%m-%dT%H%M%S-{time.time_ns() % 10**9:09d}")
    target.mkdir(mode=0o700, parents=True)
    for path in paths:
        place = target / path.relative_to(home)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.move(path, place)  # may lead to another disk
    return target


# Marker in a home during a restore; `paceline restore` removes the file at its end.
RESTORING_NAME = "restoring"


class HomeInUseError(RuntimeError):
    """Raised when another master serves the home."""


class HomeUnusableError(RuntimeError):
    """Raised for a home of the wrong kind, without write access, or with invalid entries."""


class Home:
    """``$PACELINE_HOME``, mode 0700."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.database_path = self.path / "master.sqlite"
        self.contexts_path = self.path / "contexts"
        self.attempts_path = self.path / "attempts"
        self.logs_path = self.path / "logs"
        self.master_log_path = self.path / "master.log"
        self._address_path = self.path / "master.json"
        self._token_path = self.path / "token"
        self._id_path = self.path / "cluster_id"
        self._attempt_key_path = self.path / "attempt_key"

    def prepare(self, *, set_aside: bool = False) -> None:
        """Create the missing parts of the home; existing directories keep their content.

        Args:
            set_aside: Move files that the database does not know away, instead of an error.

        Raises:
            LostDatabaseError: There are files that the database does not know.
            DatabaseVersionError: The database cannot be read.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (self.path / RESTORING_NAME).exists():
            raise LostDatabaseError(
                f"A home must be whole, but the restore of {str(self.path)!r} was cut off. Hint:"
                " run `paceline restore` once more."
            )
        check_for_lost_database(self.path, self.database_path, set_aside=set_aside)
        self.make_directories()
        _ensure_secret(self._token_path, "Sign in again, and copy the new token where it is used.")
        _ensure_secret(
            self._attempt_key_path,
            "Attempts that run have tokens of the old one: they end once their runner counts as"
            " lost, and their trials continue in other attempts.",
        )
        if not _read_id(self._id_path):
            self._write_id(str(uuid.uuid4()))

    def make_directories(self) -> None:
        """Create the standard directories of a home."""
        # `mkdir` leaves the mode of an existing directory.
        self.path.chmod(0o700)
        checkpoints = self.path / "checkpoints"
        files = self.path / "files"
        for path in (self.contexts_path, self.attempts_path, self.logs_path, files, checkpoints):
            path.mkdir(mode=0o700, exist_ok=True)

    @property
    def token(self) -> str:
        """Token with access to every route."""
        return read_secret(self._token_path)

    def renew_token(self) -> str:
        """Replace the home's token, and return the new token."""
        return _write_secret(self._token_path)

    @property
    def attempt_key(self) -> bytes:
        """Key for deriving the tokens of attempts."""
        return read_secret(self._attempt_key_path).encode()

    @property
    def cluster_id(self) -> str:
        """The identity of this home, for ever."""
        return self._id_path.read_text().strip()

    def keep_id(self, stored: str) -> None:
        """Restore the identity file from the database's identity, if they differ."""
        if stored != self.cluster_id:
            logger.warning(
                "%s held %s in place of %s, the identity in the database, and is mended.",
                self._id_path,
                self.cluster_id,
                stored,
            )
            self._write_id(stored)

    def _write_id(self, cluster_id: str) -> None:
        write_atomically(self._id_path, cluster_id.encode() + b"\n")

    def write_address(
        self,
        url: str,
        port: int,
        version: str,
        certificate: str | None = None,
        public_url: str = "",
        host: str = "",
    ) -> None:
        """Write the address file: the master's addresses, and its certificate for clients.

        Args:
            url: Where programs on this machine reach it.
            port: Its port.
            version: The version of Paceline.
            certificate: Its certificate (PEM) if it is asked by TLS.
            public_url: Where other machines reach it, if that is another URL.
            host: The address that it listens on.
        """
        address: dict[str, Any] = {
            "url": url, "public_url": public_url, "pid": os.getpid(), "port": port,
            "version": version, "host": host,
        }  # fmt: skip
        if certificate is not None:
            address["certificate"] = certificate
        write_atomically(self._address_path, seal(json.dumps(address).encode()))

    def remove_address(self) -> None:
        """Remove the address file, as no master listens any more."""
        self._address_path.unlink(missing_ok=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Create the home if missing, and hold its lock for this process.

        The directory itself is locked as well: the lock file can be removed.

        Raises:
            HomeInUseError: Another master uses the home.
            HomeUnusableError: It is no directory, cannot be written to, or has something else in
                the place of a file or directory.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_entries(self.path)
                file = stack.enter_context(open_private(self.path / "master.lock", "w"))
                directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise HomeUnusableError(
                    f"A home must be a directory that can be written to, but {str(self.path)!r} is"
                    f" not ({error.strerror}). Hint: choose another one by `--home` or"
                    " PACELINE_HOME."
                ) from error
            stack.callback(os.close, directory)
            if not (_try_lock(file.fileno()) and _try_lock(directory)):
                raise HomeInUseError(
                    f"A home must be served by one master, but {str(self.path)!r} has one already."
                    " Hint: `paceline status` shows it, `paceline down` stops it."
                )
            yield


def check_entries(home: Path) -> None:
    """Check the kind of each file and directory of a home before any is opened.

    Raises:
        HomeUnusableError: Something is not.
        OSError: The home cannot be looked at.
    """
    wrong = find_wrong_entries(home)
    if wrong:
        raise HomeUnusableError(
            "\n".join(f"{str(home / one.name)!r} {one.problem}. Hint: {one.hint}." for one in wrong)
        )


def _try_lock(descriptor: int) -> bool:
    """Lock a file or directory for this process; return False if locked by another process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # A file system that locks no directories, as some network ones.
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOTSUP):
            raise
    return True


def _ensure_secret(path: Path, consequence: str) -> None:
    """Create a secret if missing or damaged."""
    try:
        # A power cut can leave a file empty; an empty token would let everybody in.
        if read_secret(path):
            return
    except FileNotFoundError:
        pass
    except DamagedSecretError as error:
        logger.warning("%s A new one was made. %s", error, consequence)
    _write_secret(path)


def _read_id(path: Path) -> str | None:
    """Return the identity in a file, None if missing or unreadable."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if text.isprintable() else None


def _write_secret(path: Path) -> str:
    """Write a new random text to a private file, and return the text."""
    secret = make_secret()
    write_atomically(path, secret.encode() + b"\n", is_durable=True)
    return secret


class SecretStore:
    """The file `secrets.json` of a home, mode 0600; thread-safe.

    Raises:
        SecretFileError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._secrets = read_secret_file(path)

    def of(self, experiment_id: int) -> dict[str, str]:
        """Return the secrets of an experiment by name."""
        return dict(self._secrets.get(experiment_id, {}))

    def keep(self, transaction: Transaction, experiment_id: int, secrets: dict[str, str]) -> None:
        """Replace an experiment's secrets in the file before the commit.

        After a rollback the earlier values are back.

        Raises:
            OSError: The file cannot be written.
        """
        before = self._secrets.get(experiment_id, {})
        if before == secrets:
            return
        self._set(experiment_id, secrets)
        transaction.after_rollback(lambda: self._set(experiment_id, before))

    def forget(self, experiment_id: int) -> None:
        """Remove an experiment's secrets.

        Raises:
            OSError: The file cannot be written.
        """
        self._set(experiment_id, {})

    def _set(self, experiment_id: int, secrets: dict[str, str]) -> None:
        with self._lock:
            changed = {k: v for k, v in self._secrets.items() if k != experiment_id}
            if secrets:
                changed[experiment_id] = dict(secrets)
            if changed == self._secrets:
                return
            content = {"version": 1, "experiments": changed}
            sealed = seal(json.dumps(content, indent=1).encode())
            write_atomically(self._path, sealed, is_durable=True)
            self._secrets = changed


def text_to_store(submitted: str | None, secrets: dict[str, str]) -> str | None:
    """Return a submitted text without secrets; None if they cannot be separated."""
    if submitted is None or not secrets:
        return submitted
    return hide_in_text(submitted, secrets.values())
