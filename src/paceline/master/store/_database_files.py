"""The files of the database: opened, and noticed when one is deleted or replaced."""

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from paceline._private_files import open_private


class DatabaseUnavailableError(RuntimeError):
    """Raised when the database took back a whole transaction, not only one job's part of it."""


class DatabaseLostError(DatabaseUnavailableError):
    """Raised when a file of the database was deleted or replaced while a master has it open."""


class DatabaseFiles:
    """The files that a database has open, which must stay those at their paths.

    SQLite goes on with files that were deleted: changes would be stored where nobody finds them.

    Args:
        path: The path of the database.
        makes: Whether an empty file is made if there is none.

    Raises:
        DatabaseLostError: There is none, and none is to be made.
    """

    def __init__(self, path: Path, *, makes: bool = True) -> None:
        self.path = path
        if makes:
            # Made here, as SQLite gives the files beside it the same mode.
            open_private(path, "ab").close()
            path.chmod(0o600)
        elif not path.exists():
            raise DatabaseLostError(f"The database {str(path)!r} must be there, but is missing.")
        self._identities = {path: _identity(path)}

    def note_logs(self) -> None:
        """Note which files SQLite has beside the database, once a connection is open that stays."""
        for end in ("-wal", "-shm"):
            log = self.path.with_name(f"{self.path.name}{end}")
            self._identities[log] = _identity(log)

    def open(self) -> sqlite3.Connection:
        """Open a connection; a database that is missing is not made again.

        Raises:
            DatabaseLostError: A file is not the one of before.
        """
        self.check()
        address = f"file:{quote(str(self.path.absolute()))}?mode=rw"
        return sqlite3.connect(address, uri=True, timeout=30, check_same_thread=False)

    def check(self) -> None:
        """Check that the files are those of before.

        Raises:
            DatabaseLostError: One is not.
        """
        for path, identity in self._identities.items():
            if _identity(path) != identity:
                raise DatabaseLostError(
                    f"The database's file {str(path)!r} was deleted or replaced while the master"
                    " runs, so nothing can be stored. Hint: stop the master (`paceline down`), make"
                    " the database again from its records (`paceline home check --fix`), and start"
                    " the master (`paceline up`)."
                )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino
