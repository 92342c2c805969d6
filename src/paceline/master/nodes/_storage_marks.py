"""Marks in storage directories, by which nodes see whether they share them with the master."""

import logging
import os
import secrets
import stat
from pathlib import Path

from paceline._atomic_files import replacing_below
from paceline._regular_files import open_regular_below, opened_directory, read_limited
from paceline.messages.attempts import StorageMark

logger = logging.getLogger(__name__)


class StorageMarks:
    """Write a file into each storage directory: a node that finds it there sees the same directory.

    Its text is another one whenever a master starts: a copy of the directory has an old text.
    Others may write to the directory: what they put there is replaced, neither read nor written to.

    Args:
        cluster_id: The identity of the master's home; several masters may share a directory.
    """

    def __init__(self, cluster_id: str) -> None:
        self._name = f".paceline-{cluster_id}"
        self._text = secrets.token_hex(16)
        self._warned_of: set[str] = set()

    def mark(self, storage: str) -> StorageMark | None:
        """Return the mark in a storage; None if it is no directory that this machine can write to.

        Raises:
            OSError: The disk is full or broken.
        """
        if "://" in storage:
            return None
        path = Path(storage) / self._name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened_directory(path.parent) as directory:
                self._warn_of_renames(storage, os.fstat(directory).st_mode)
                if not self._is_there(directory):
                    # Everybody may read it, as runners of other users must. The text opens nothing:
                    # who knows it can only make a directory on another machine pass for this one.
                    with replacing_below(directory, self._name) as file:
                        file.write(self._text.encode())
        except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            logger.warning(
                "Checkpoints of nodes cannot be kept in %s, which this machine cannot write to"
                " (%s): all nodes must share that directory.",
                storage,
                error.strerror,
            )
            return None
        return StorageMark(str(path), self._text)

    def _warn_of_renames(self, storage: str, mode: int) -> None:
        """Log once that others can replace what is in a storage."""
        if not mode & stat.S_IWOTH or mode & stat.S_ISVTX or storage in self._warned_of:
            return
        self._warned_of.add(storage)
        logger.warning(
            "All users of its machines can rename, replace and remove checkpoints of others in %s."
            " Hint: `chmod +t` lets each one touch their own alone.",
            storage,
        )

    def _is_there(self, directory: int) -> bool:
        """Tell whether this user has written the mark."""
        try:
            with open_regular_below(directory, self._name, owners=[os.geteuid()]) as file:
                return read_limited(file, len(self._text)) == self._text.encode()
        except OSError:
            return False
