"""The master's home directory: database, contexts, attempts, checkpoints, token and address."""

import errno
import fcntl
import json
import os
import secrets
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline._private_files import open_private
from paceline.journal import write_atomically
from paceline.master._unknown_files import LostDatabaseError, check_home

# In a home that is being restored; `paceline restore` removes it at its end.
RESTORING_NAME = "restoring"


class HomeInUseError(RuntimeError):
    """Raised when another master serves the home."""


class HomeUnusableError(RuntimeError):
    """Raised when the home is no directory, or cannot be written to."""


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
        check_home(self.path, self.database_path, set_aside=set_aside)
        self.path.chmod(0o700)
        checkpoints = self.path / "checkpoints"
        for path in (self.contexts_path, self.attempts_path, self.logs_path, checkpoints):
            path.mkdir(mode=0o700, exist_ok=True)
        if not self._has_text(self._token_path):
            self.renew_token()
        if not self._has_text(self._attempt_key_path):
            _write_secret(self._attempt_key_path)
        if not self._has_text(self._id_path):
            write_atomically(self._id_path, str(uuid.uuid4()).encode() + b"\n")

    @staticmethod
    def _has_text(path: Path) -> bool:
        # A power cut can leave a file empty; an empty token would let everybody in.
        return path.exists() and bool(path.read_text().strip())

    @property
    def token(self) -> str:
        """The token that opens every route."""
        return self._token_path.read_text().strip()

    def renew_token(self) -> str:
        """Put another token in place of the home's, and return it."""
        return _write_secret(self._token_path)

    @property
    def attempt_key(self) -> bytes:
        """The key by which the tokens of attempts are made."""
        return self._attempt_key_path.read_bytes().strip()

    @property
    def cluster_id(self) -> str:
        """The identity of this home, for ever."""
        return self._id_path.read_text().strip()

    def write_address(self, url: str, port: int, version: str) -> None:
        """Say where the master listens."""
        address = {"url": url, "pid": os.getpid(), "port": port, "version": version}
        write_atomically(self._address_path, json.dumps(address).encode())

    def remove_address(self) -> None:
        """Say that no master listens."""
        self._address_path.unlink(missing_ok=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make the home if there is none, and hold it for this process.

        The directory itself is locked as well: a file of it can be removed.

        Raises:
            HomeInUseError: Another master has it.
            HomeUnusableError: It is no directory, or cannot be written to.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _write_secret(path: Path) -> str:
    """Write a new random text to a private file, and return it."""
    secret = secrets.token_urlsafe(32)
    write_atomically(path, secret.encode() + b"\n", is_durable=True)
    return secret
