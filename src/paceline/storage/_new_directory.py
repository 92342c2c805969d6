"""A directory that is being written: what others put in its place is left alone."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline._regular_files import NotRegularFileError, open_directory_below
from paceline.storage import _durable_files
from paceline.storage._checkpoint_directory import CheckpointDirectory
from paceline.storage._directory_trees import (
    empty_directory,
    made_below,
    no_regular_file,
    walk_below,
)
from paceline.storage._errors import CheckpointWriteError
from paceline.storage._manifest import FileEntry, check_file_names


class NewDirectory(CheckpointDirectory):
    """The directory of a new checkpoint, or of a rank's part of it.

    Args:
        descriptor: The descriptor; the caller closes it.
        path: Where the directory is. A script writes to it by this path.
        parent: The descriptor of the directory that it is in.
    """

    def __init__(self, descriptor: int, path: Path, parent: int) -> None:
        super().__init__(descriptor, path, has_one_owner=False)
        self._parent = parent

    def check_place(self) -> None:
        """Refuse what was written if it may be elsewhere.

        Raises:
            CheckpointWriteError: Something else is in the place of the directory.
        """
        with suppress(OSError):
            found = os.stat(self.path.name, dir_fd=self._parent, follow_symlinks=False)
            if os.path.samestat(found, self.facts):
                return
        raise CheckpointWriteError(
            f"The directory {str(self.path)!r} must stay in its place while a checkpoint is written"
            " to it, but was moved or replaced. Hint: see who can write there; the sticky bit"
            f" (chmod +t {self.path.parent}) forbids it to other users."
        )

    def copy_in(self, source: Path, name: str) -> FileEntry:
        """Copy a file durably."""
        folder, _, last = name.rpartition("/")
        with source.open("rb") as file, made_below(self.descriptor, folder) as parent:
            return _durable_files.copy_stream(file, Path(last), durable=True, directory=parent)

    def sealed(self) -> dict[str, FileEntry]:
        """Force the files to disk, and return their entries.

        Raises:
            CheckpointWriteError: Something else is in the place of the directory.
            ValueError: There is a link or a special file, or a name is one of the commit protocol.
        """
        self.check_place()
        with _durable_files.naming_files_below(self.path):
            names = []
            for found in walk_below(self.descriptor):
                if stat.S_ISREG(found.facts.st_mode):
                    names.append(found.path)
                elif not stat.S_ISDIR(found.facts.st_mode):
                    raise no_regular_file(found.path)
            return _durable_files.seal_files(self.descriptor, check_file_names(sorted(names)))

    def remove(self) -> None:
        """Remove the directory with all that is in it, as far as possible."""
        with suppress(OSError):
            empty_directory(self.descriptor)
            os.rmdir(self.path.name, dir_fd=self._parent)


@contextmanager
def made_directory(parent: int, path: Path, *, exist_ok: bool = False) -> Iterator[NewDirectory]:
    """Yield a directory in another one; it is made.

    Args:
        parent: The descriptor of the other one.
        path: The path of the directory.
        exist_ok: Whether another process may have made it.

    Raises:
        CheckpointWriteError: A link is there.
        FileExistsError: It exists.
    """
    with _durable_files.naming_files_below(path.parent):
        try:
            os.mkdir(path.name, dir_fd=parent)
        except FileExistsError:
            if not exist_ok:
                raise
        try:
            descriptor = open_directory_below(parent, path.name)
        except NotRegularFileError as error:
            raise CheckpointWriteError(
                f"The directory of checkpoint {path.name} must be no link, but {str(path)!r} is"
                " one. Hint: see who can write there."
            ) from error
    try:
        yield NewDirectory(descriptor, path, parent)
    finally:
        os.close(descriptor)
