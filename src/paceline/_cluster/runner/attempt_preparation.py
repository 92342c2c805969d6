"""Preparation of an attempt: packed code, its uv environment, reasons of a failed start.

This module must stay light, as the client and the CLI load it.
"""

import bz2
import copy
import errno
import gzip
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline._base.files import regular_opener
from paceline._base.process_and_network import integer_setting
from paceline._cluster.messages.states import ErrorKind, ExitReason

# No space, no inodes or no quota left on a disk; no file descriptors, processes or memory.
_SHORTAGES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
}
# A disk or a file server that does not answer, or not well.
_DISTURBANCES = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
# The text of Python's error alone says that the system gave it no thread.
_NO_THREAD = "can't start new thread"


class UnusableConfigError(ValueError):
    """Raised when an attempt cannot start as its configuration says."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error or any of its causes is a temporary shortage of resources."""
    return any(
        isinstance(cause, MemoryError) or str(cause) == _NO_THREAD or _has_number(cause, _SHORTAGES)
        for cause in _causes(error)
    )


def judge_start(error: BaseException) -> tuple[ExitReason, ErrorKind]:
    """Return the exit reason and error kind for an error during an attempt's start."""
    if is_shortage(error):
        return ExitReason.SHORTAGE, ErrorKind.TRANSIENT
    kind = ErrorKind.PERMANENT
    if any(_has_number(cause, _DISTURBANCES) for cause in _causes(error)):
        kind = ErrorKind.TRANSIENT
    elif isinstance(error, UnusableConfigError):
        kind = ErrorKind.USER
    return ExitReason.START_FAILED, kind


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def _has_number(error: BaseException, numbers: set[int]) -> bool:
    return isinstance(error, OSError) and error.errno in numbers


_MIB = 1024 * 1024
# Size limit of one read by `tarfile` other than file content: names and metadata of a member.
_MAX_READ_BYTES = 4 * _MIB
_SKIP_BYTES = 64 * 1024
_OPENERS: tuple[tuple[bytes, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ", lzma.LZMAFile),
)


class ArchiveTooLargeError(ValueError):
    """Raised when an archive holds more than the limits allow."""


class ArchiveLimits(NamedTuple):
    """Maximum number of bytes and files in an unpacked archive."""

    num_bytes: int
    num_files: int

    @classmethod
    def from_environment(cls) -> "ArchiveLimits":
        """Return limits from `PACELINE_MAX_UNPACKED_MIB` and `PACELINE_MAX_UNPACKED_FILES`.

        Raises:
            ValueError: One is no number above 0.
        """
        return cls(
            integer_setting("PACELINE_MAX_UNPACKED_MIB", 1024) * _MIB,
            integer_setting("PACELINE_MAX_UNPACKED_FILES", 100_000),
        )


class _LimitedFile:
    """Unpacked stream of an archive as a file; reading beyond the limits raises an error."""

    def __init__(self, file: Any, limits: ArchiveLimits) -> None:
        self._file = file
        self._limits = limits
        self._num_read = 0

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _MAX_READ_BYTES:
            raise ArchiveTooLargeError(
                "The facts of a file in an archive of code must have at most"
                f" {_MAX_READ_BYTES // _MIB} MiB, but have more."
            )
        data: bytes = self._file.read(size)
        self._count(len(data))
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        assert whence == 0
        if position < self.tell():
            # All before is unpacked once more. It is needed only for a link to a file that is gone.
            self._count(position)
            self._file.seek(position)
        while (missing := position - self.tell()) > 0:
            if not self.read(min(missing, _SKIP_BYTES)):
                break
        return self.tell()

    def _count(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        if self._num_read > self._limits.num_bytes + self._limits.num_files * tarfile.BLOCKSIZE:
            raise _too_large(self._limits)


@contextmanager
def open_archive(path: Path, limits: ArchiveLimits) -> Iterator[tarfile.TarFile]:
    """Open an archive for reading; content beyond the limits raises an error.

    Raises:
        ArchiveTooLargeError: The archive is too large, while it is read.
        tarfile.TarError: It is none.
        OSError: It cannot be read.
    """
    with open(path, "rb", opener=regular_opener) as file:
        start = file.read(8)
        file.seek(0)
        opener = next((found for magic, found in _OPENERS if start.startswith(magic)), None)
        content = _LimitedFile(file if opener is None else opener(file), limits)
        # Uncompressed mode: `content` decompresses itself, so its limits count every byte.
        with tarfile.open(fileobj=content, mode="r:") as archive:  # type: ignore[call-overload]
            yield archive


def members(archive: tarfile.TarFile, limits: ArchiveLimits) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, each before its content is read.

    Raises:
        ArchiveTooLargeError: There are too many, or they are too large together.
    """
    num_bytes = 0
    for number, member in enumerate(archive, 1):
        num_bytes += member.size
        if number > limits.num_files or num_bytes > limits.num_bytes:
            raise _too_large(limits)
        yield member


def members_inside(found: Iterable[tarfile.TarInfo], target: Path) -> Iterator[tarfile.TarInfo]:
    """Yield archive members, each checked just before its extraction like `tarfile.data_filter`.

    Owners, special modes and write access for others are left out.

    Raises:
        tarfile.TarError: A member is neither a file, a directory nor a link, or leads outside of
            the directory.
    """
    root = os.path.realpath(target)
    for member in found:
        name = member.name.lstrip("/")
        place = os.path.join(root, name)
        # Real path just before extraction: links extracted earlier may redirect the member.
        _check_inside(root, os.path.realpath(place), member)
        if member.issym():
            link = os.path.join(os.path.dirname(place), member.linkname)
            _check_inside(root, os.path.realpath(link), member)
        elif member.islnk():
            link = os.path.join(root, member.linkname)
            _check_inside(root, os.path.realpath(link), member)
        elif not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is a special file")
        own = copy.copy(member)
        own.name, own.uid, own.gid = name, os.getuid(), os.getgid()
        own.uname = own.gname = ""
        own.mode = 0o700 | member.mode & 0o755 if member.isdir() else 0o600 | member.mode & 0o755
        yield own


def _check_inside(root: str, place: str, member: tarfile.TarInfo) -> None:
    if os.path.commonpath([root, place]) != root:
        raise tarfile.TarError(f"{member.name!r} leads outside of the directory")


def check_archive(path: Path, limits: ArchiveLimits) -> None:
    """Check an archive's size; a damaged archive passes if its readable part is small enough.

    Raises:
        ArchiveTooLargeError: It is too large.
    """
    try:
        with open_archive(path, limits) as archive:
            for _ in members(archive, limits):
                pass
    except ArchiveTooLargeError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, lzma.LZMAError):
        # Unpacking reports its faults.
        return


def unpack_archive(path: Path, target: Path, limits: ArchiveLimits) -> None:
    """Unpack an archive into a directory; nothing is written outside the directory.

    Raises:
        ArchiveTooLargeError: It is too large.
        tarfile.TarError: It is no archive, or has a member that leads outside.
        OSError: It cannot be read, or there is no space.
    """
    with open_archive(path, limits) as archive:
        found = members(archive, limits)
        if hasattr(tarfile, "data_filter"):
            archive.extractall(target, found, filter="data")
        else:
            # Python 3.10 before 3.10.12, and 3.11 before 3.11.4, as in Debian 12.
            archive.extractall(target, members_inside(found, target))  # noqa: S202 - as it checks


def _too_large(limits: ArchiveLimits) -> ArchiveTooLargeError:
    return ArchiveTooLargeError(
        f"An archive of code must unpack to at most {limits.num_bytes // _MIB} MiB and"
        f" {limits.num_files} files, but has more. Hint: read data from a path outside of the code,"
        " or raise PACELINE_MAX_UNPACKED_MIB or PACELINE_MAX_UNPACKED_FILES of the master."
    )


LOCK_NAME = "uv.lock"

_POLL_S = 0.2
_NUM_LINES_TOLD = 8


def sync_environment(
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """Install the packages of the lock file, and return variables pointing to the environment.

    Args:
        directory: The copy of the code, with `pyproject.toml` and `uv.lock`.
        environment: The variables of the attempt.
        on_line: Gets each line that `uv` prints.
        is_unwanted: Tells whether the attempt is to end; the installation then ends early.

    Raises:
        UnusableConfigError: There is no `uv` or no lock file, or `uv` fails.
    """
    program = find_uv(environment)
    if program is None:
        raise UnusableConfigError(
            f"`environment.uv` needs the program `uv` on {os.uname().nodename!r}, but it is not"
            " there. Hint: `pip install uv` for the interpreter of the runner, or put it on PATH."
        )
    if not (directory / LOCK_NAME).is_file():
        raise UnusableConfigError(missing_lock(directory))
    # Variables of an environment activated for the runner must not affect `uv`.
    kept = {k: v for k, v in environment.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    place = directory / ".venv"
    kept["UV_PROJECT_ENVIRONMENT"] = str(place)
    _run_uv([program, "sync", "--frozen", "--no-progress"], directory, kept, on_line, is_unwanted)
    path = os.pathsep.join([str(place / "bin"), kept.get("PATH", os.defpath)])
    return kept | {"VIRTUAL_ENV": str(place), "PATH": path}


def find_uv(environment: Mapping[str, str]) -> str | None:
    """Return the path of `uv`: on PATH, or beside this interpreter."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("uv", path=environment.get("PATH")) or shutil.which("uv", path=beside)


def missing_lock(directory: Path) -> str:
    """Return the error message for a directory without a lock file."""
    return (
        f"`environment.uv` needs the file {LOCK_NAME!r} in the directory of the code, but"
        f" {str(directory)!r} has none. Hint: `uv lock` makes it from `pyproject.toml`."
    )


def _run_uv(
    command: list[str],
    directory: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None],
    is_unwanted: Callable[[], bool],
) -> None:
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    last: deque[str] = deque(maxlen=_NUM_LINES_TOLD)

    def pass_on() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                last.append(line.rstrip())
                on_line(line.rstrip("\n"))

    reader = threading.Thread(target=pass_on, name="uv-output", daemon=True)
    reader.start()
    while (code := _wait(process)) is None:
        if is_unwanted():
            # The whole group: uv's children hold the pipe as well.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
    reader.join()
    if code:
        text = "\n".join(last)
        raise UnusableConfigError(f"`uv sync --frozen` ended with code {code}:\n{text}")


def _wait(process: "subprocess.Popen[str]") -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None
