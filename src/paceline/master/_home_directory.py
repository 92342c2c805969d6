"""The master's home directory: database, contexts, attempts, checkpoints, token and address."""

import errno
import fcntl
import json
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline._checked_secrets import DamagedSecretError, make_secret, read_secret
from paceline._private_files import open_private
from paceline._sealed_json import seal
from paceline.journal import write_atomically
from paceline.master._home_entries import find_wrong_entries
from paceline.master._lost_database import LostDatabaseError, check_for_lost_database

logger = logging.getLogger(__name__)

# In a home that is being restored; `paceline restore` removes it at its end.
RESTORING_NAME = "restoring"


class HomeInUseError(RuntimeError):
    """Raised when another master serves the home."""


class HomeUnusableError(RuntimeError):
    """Raised when the home is no directory, cannot be written to, or has what must not be there."""


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
        """Make what is missing; existing directories keep their content.

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
            " lost, and their trials go on in other attempts.",
        )
        if not _read_id(self._id_path):
            self._write_id(str(uuid.uuid4()))

    def make_directories(self) -> None:
        """Make the directories that every home has."""
        self.path.chmod(0o700)
        checkpoints = self.path / "checkpoints"
        for path in (self.contexts_path, self.attempts_path, self.logs_path, checkpoints):
            path.mkdir(mode=0o700, exist_ok=True)

    @property
    def token(self) -> str:
        """The token that opens every route."""
        return read_secret(self._token_path)

    def renew_token(self) -> str:
        """Put another token in place of the home's, and return it."""
        return _write_secret(self._token_path)

    @property
    def attempt_key(self) -> bytes:
        """The key by which the tokens of attempts are made."""
        return read_secret(self._attempt_key_path).encode()

    @property
    def cluster_id(self) -> str:
        """The identity of this home, for ever."""
        return self._id_path.read_text().strip()

    def keep_id(self, stored: str) -> None:
        """Have the identity that the database holds, should the file be damaged."""
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
        """Say where the master listens, and by which certificate it is known.

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
        """Say that no master listens."""
        self._address_path.unlink(missing_ok=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make the home if there is none, and hold it for this process.

        The directory itself is locked as well: a file of it can be removed.

        Raises:
            HomeInUseError: Another master has it.
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
    """Check that each file and directory of a home is one, before anything is opened.

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
    """Lock a file or directory for this process; False if another one has it."""
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
    """Make a secret unless there is one, also in the place of one that is damaged."""
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
    """Return the identity that a file holds, None without one that can be read."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if text.isprintable() else None


def _write_secret(path: Path) -> str:
    """Write a new random text to a private file, and return it."""
    secret = make_secret()
    write_atomically(path, secret.encode() + b"\n", is_durable=True)
    return secret
