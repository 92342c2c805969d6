"""Archive of an experiment's code: checked against limits, and unpacked inside a directory.

This module must stay light, as the client and the CLI load it.
"""

import bz2
import copy
import gzip
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from paceline._base.files import regular_opener
from paceline._base.process_and_network import integer_setting

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
