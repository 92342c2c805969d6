"""Sources of a script, packed for nodes that do not have its directory."""

import io
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_BYTES = 100 * 1024 * 1024
_SKIPPED = {"__pycache__", "node_modules", "paceline_runs"}
_NUM_LISTED = 3


# Equal on nodes that share a file system, and only there as a rule.
Mark = tuple[tuple[str, int, int, int], ...]


class ScriptSources(NamedTuple):
    """Directory of the driver, with a mark to tell the same directory from a namesake.

    Attributes:
        directory: Its path.
        mark: Its `script_directory_mark`.
    """

    directory: str
    mark: Mark | None

    @classmethod
    def of_driver(cls) -> "ScriptSources":
        """Return the directory of this process's script, else the working directory."""
        file = getattr(sys.modules["__main__"], "__file__", None)
        directory = os.path.dirname(os.path.abspath(file)) if file else os.getcwd()
        if is_installed(directory):
            # A program such as pytest or Jupyter runs the user's code.
            directory = os.getcwd()
        return cls(directory, script_directory_mark(directory))


def is_installed(directory: str) -> bool:
    """Return whether a directory belongs to the running Python."""
    path = Path(os.path.realpath(directory))
    prefixes = (sys.prefix, sys.base_prefix)
    return any(path.is_relative_to(os.path.realpath(prefix)) for prefix in prefixes)


def script_directory_mark(directory: str) -> Mark | None:
    """Return a mark to tell a directory from its namesakes, or None if there is no directory.

    That is its number in the file system, and the numbers, sizes and times of the Python files in
    it. Its own times are not, as whoever writes something there changes them.
    """
    try:
        number = os.stat(directory).st_ino
        files = [path for path in os.scandir(directory) if path.name.endswith(".py")]
        marks = [(file.name, file.stat()) for file in files]
    except OSError:
        return None
    parts = [(name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in marks]
    return (("", number, 0, 0), *sorted(parts))


def pack_script_directory(directory: str) -> bytes:
    """Return the files of a directory as an archive.

    Hidden files, virtual environments, run directories and compiled Python stay out.

    Raises:
        ValueError: They are more than 100 MB.
    """
    files = list(_files(Path(directory)))
    size = sum(path.stat().st_size for path in files)
    if size > MAX_BYTES:
        largest = sorted(files, key=lambda path: -path.stat().st_size)[:_NUM_LISTED]
        named = ", ".join(str(path) for path in largest)
        raise ValueError(
            f"The directory of the driver's script must have at most {MAX_BYTES // 2**20} MiB to be"
            f" sent to nodes that lack it, but {directory!r} has {size / 2**20:.0f} MiB. The"
            f" largest files: {named}. Hint: keep data elsewhere, or start the script from a"
            " directory that all nodes share."
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in files:
            archive.add(path, arcname=str(path.relative_to(directory)), recursive=False)
    return buffer.getvalue()


def unpack_script_directory(archive: bytes) -> str:
    """Put the files of an archive into a new private directory, and return its path."""
    directory = tempfile.mkdtemp(prefix="paceline-sources-")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            # Archive from the driver is trusted like its code.
            files.extractall(directory)  # noqa: S202
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return directory


def _files(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if _is_wanted(Path(folder, name))]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.suffix != ".pyc" and path.is_file():
                yield path


def _is_wanted(folder: Path) -> bool:
    name = folder.name
    is_skipped = name.startswith(".") or name in _SKIPPED
    return not is_skipped and not (folder / "pyvenv.cfg").exists()
