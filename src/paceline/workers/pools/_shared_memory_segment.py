"""Memory that a driver shares with the workers of its machine.

A segment is a file without a name, which workers open through the driver's own descriptor. So the
system removes it with the last process that has it open, however those end. Workers map it
privately: what one of them writes, neither the driver nor another worker sees.
"""

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# The directory of the files; without it they are in memory while there is enough of that.
DIRECTORY_VARIABLE = "PACELINE_SHARED_DIR"

_ALIGNMENT = 64
_TOKEN_BYTES = 32
# The most that one system call writes.
_WRITE_BYTES = 256 * 1024 * 1024
# Memory that other programs keep.
_SPARE_BYTES = 256 * 1024 * 1024


class SharedSegmentPlace(NamedTuple):
    """Description of a segment for processes on the same machine.

    Attributes:
        machine: Where it is.
        pid: The driver.
        descriptor: The file in that process.
        num_bytes: The size of its content.
        token: What follows the content, so that no other file is taken for it.
    """

    machine: str
    pid: int
    descriptor: int
    num_bytes: int
    token: bytes


class SharedSegment:
    """Copy of buffers in shared memory, until nothing refers to it.

    Args:
        buffers: What is copied, each to a place that is a multiple of 64 bytes.

    Attributes:
        place: Where workers find it.
        offsets: Where each buffer begins.

    Raises:
        OSError: There is neither memory nor disk space for it.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.offsets: list[int] = []
        num_bytes = 0
        for buffer in buffers:
            self.offsets.append(num_bytes)
            num_bytes += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        token = os.urandom(_TOKEN_BYTES)
        parts: list[tuple[int, memoryview]] = list(zip(self.offsets, buffers, strict=True))
        self._descriptor = _written_file([*parts, (num_bytes, memoryview(token))])
        self._map: mmap.mmap | None = None
        weakref.finalize(self, os.close, self._descriptor)
        self.place = SharedSegmentPlace(_machine(), os.getpid(), self._descriptor, num_bytes, token)

    @property
    def num_bytes(self) -> int:
        """The size of the content."""
        return self.place.num_bytes

    def view(self) -> memoryview:
        """Return the content, which cannot be written."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.num_bytes, prot=mmap.PROT_READ)
        return memoryview(self._map)

    def has(self, buffers: Sequence[memoryview], unwritten: range = range(0)) -> bool:
        """Tell whether the content is still that of the buffers, byte by byte.

        Args:
            buffers: The buffers that were copied.
            unwritten: Addresses whose bytes are known to be the same.
        """
        compare, begin = _memcmp(), memory_address_of(self.view())
        for offset, buffer in zip(self.offsets, buffers, strict=True):
            address = memory_address_of(buffer)
            end = address + buffer.nbytes
            spans = [(address, end)]
            if unwritten and address <= unwritten.start and unwritten.stop <= end:
                spans = [(address, unwritten.start), (unwritten.stop, end)]
            for low, high in spans:
                if compare(begin + offset + low - address, low, high - low) != 0:
                    return False
        return True


def can_share() -> bool:
    """Tell whether this system has what segments need."""
    return sys.platform == "linux" and os.path.isdir("/proc/self/fd")


def memory_address_of(view: memoryview) -> int:
    """Return where a buffer is in memory."""
    # It takes read-only views, unlike `ctypes`.
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def map_shared_segment(place: SharedSegmentPlace) -> memoryview | None:
    """Return the content of a segment, whose changes stay in this process.

    Returns:
        A writable view, or None if the segment is on another machine, or its driver has gone.
    """
    if place.machine != _machine():
        return None
    try:
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(descriptor, _TOKEN_BYTES, place.num_bytes) != place.token:
            return None
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return memoryview(mmap.mmap(descriptor, place.num_bytes, flags, protection))
    except OSError:
        return None
    finally:
        os.close(descriptor)


@cache
def _machine() -> str:
    """Return what tells apart machines, and parts of one that do not see each other's processes."""
    if not can_share():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _written_file(parts: Sequence[tuple[int, memoryview]]) -> int:
    """Return the descriptor of a new file without a name, with parts at their offsets.

    Raises:
        OSError: None of the places has room.
    """
    offset, last = parts[-1]
    failure: OSError | None = None
    for descriptor in _shared_memory_files(offset + len(last)):
        try:
            for start, part in parts:
                _write(descriptor, part, start)
        except OSError as error:
            os.close(descriptor)
            failure = error
            continue
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise failure or OSError("There is no place for shared memory.")


def _shared_memory_files(num_bytes: int) -> Iterator[int]:
    """Yield new files, the best place first."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        with suppress(OSError):
            yield _unnamed(directory)
    if not directory and num_bytes + _SPARE_BYTES <= _available_bytes():
        with suppress(OSError):
            yield os.memfd_create("paceline", os.MFD_CLOEXEC)
    # The system can take its pages out of memory.
    with suppress(OSError):
        yield _unnamed(tempfile.gettempdir())


def _unnamed(directory: str) -> int:
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        num_written = os.pwrite(descriptor, data[:_WRITE_BYTES], offset)
        data, offset = data[num_written:], offset + num_written


def _available_bytes() -> int:
    """Return how much memory this process could still take."""
    with open("/proc/meminfo", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
    available = 1024 * int(line.split()[1])
    # The limit of a container.
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        used = int((group / "memory.current").read_text(encoding="ascii"))
        most = int((group / "memory.max").read_text(encoding="ascii"))
        available = min(available, most - used + _cached_bytes(group / "memory.stat"))
    return available


def _cached_bytes(path: Path) -> int:
    """Return how much of a group's memory the system would give back."""
    lines = path.read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


@cache
def _memcmp() -> Any:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function
