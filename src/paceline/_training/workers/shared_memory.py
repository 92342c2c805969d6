"""Shared memory between a driver and its workers: segments, buffers of tensors, kept copies."""

import ctypes
import mmap
import os
import pickle
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline._training.workers.write_watch import WriteWatch

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
        token: Bytes behind the content, so that no other file is taken for this one.
    """

    machine: str
    pid: int
    descriptor: int
    num_bytes: int
    token: bytes


class SharedSegment:
    """Segment of shared memory with copies of buffers, freed with the last reference.

    Args:
        buffers: The data to copy, each to a place that is a multiple of 64 bytes.

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
        """Return a read-only view of the content."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.num_bytes, prot=mmap.PROT_READ)
        return memoryview(self._map)

    def has(self, buffers: Sequence[memoryview], unwritten: range = range(0)) -> bool:
        """Return whether the content still equals the buffers, byte by byte.

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
    """Return whether this system supports segments."""
    return sys.platform == "linux" and os.path.isdir("/proc/self/fd")


def memory_address_of(view: memoryview) -> int:
    """Return where a buffer is in memory."""
    # Address by numpy: `ctypes` takes no read-only views.
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def map_shared_segment(place: SharedSegmentPlace) -> memoryview | None:
    """Map a segment, and return its content; changes stay in this process.

    Returns:
        A writable view, or None if the segment is on another machine, or its driver has gone.
    """
    if place.machine != _machine():
        return None
    try:
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # No access, as from another container: the driver sends the content then.
        return None
    try:
        # Driver may have closed the file and reused the number of its descriptor.
        if os.pread(descriptor, _TOKEN_BYTES, place.num_bytes) != place.token:
            return None
        # Pages are copied only where written, so no memory is reserved for all of them.
        # Private, as a call may change its arguments, but not the driver's.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return memoryview(mmap.mmap(descriptor, place.num_bytes, flags, protection))
    except OSError:
        return None
    finally:
        os.close(descriptor)


@cache
def _machine() -> str:
    """Return an id of this machine and of its namespace of processes; empty without segments."""
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
    if not directory and num_bytes + _SPARE_BYTES <= available_bytes():
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


def available_bytes() -> int:
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


# Less than this is quicker within the rest.
_LEAST_BYTES = 4096
# A storage of less than this is copied, so that it has memory of its own.
_LEAST_USED_BYTES = 64 * 1024


class Buffer(NamedTuple):
    """Memory of this process.

    Attributes:
        view: Its bytes.
        owner: The object that holds it, if that can be watched.
    """

    view: memoryview
    owner: Any = None


def buffer_taker(buffers: list[Buffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a callback for `pickle` to take large buffers; small buffers are pickled."""

    def take(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _LEAST_BYTES:
            return True
        buffers.append(Buffer(view, _owner_of(view.obj)))
        return False

    return take


def reduce_memory(torch: Any, value: Any, storages: dict[tuple[int, int], Any]) -> Any:
    """Return how a storage or parameter is pickled with its memory as a buffer.

    Args:
        torch: The module.
        value: What may be one.
        storages: The storages that were pickled before, by their memory; tensors that share one
            share it after the journey too.
    """
    if isinstance(value, torch.storage.TypedStorage):
        return _typed_storage, (value._untyped_storage, value.dtype)
    if type(value) is torch.nn.Parameter:
        rebuild, args = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2]
        return _parameter, (rebuild, *args)
    if type(value) is not torch.UntypedStorage or value.device.type != "cpu":
        return NotImplemented
    if value.nbytes() == 0:
        return torch.UntypedStorage, (0,)
    first = storages.setdefault((value.data_ptr(), value.nbytes()), value)
    if first is not value:
        return _same, (first,)
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(value)
    return _untyped_storage, (pickle.PickleBuffer(bytes_.numpy()),)


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=untyped, dtype=dtype, _internal=True)


def _untyped_storage(data: Any) -> Any:
    import torch

    bytes_ = torch.frombuffer(data, dtype=torch.uint8)
    # Data pickled in the stream are not in a buffer, and become a storage like any other.
    is_buffer = isinstance(data, memoryview)
    if not is_buffer or bytes_.nbytes < _LEAST_USED_BYTES:
        bytes_ = bytes_.clone()
    return bytes_.untyped_storage()


def _parameter(rebuild: Callable[..., Any], data: Any, *args: Any) -> Any:
    if not data.untyped_storage().resizable():
        # Sharding gives the memory of whole parameters back.
        data = data.clone()
    return rebuild(data, *args)


def _same(value: Any) -> Any:
    return value


def _owner_of(value: Any) -> Any:
    """Return the object holding an array's memory while its data exist, or None if unknown."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return None
    while isinstance(value, numpy.ndarray) and value.base is not None:
        value = value.base
    if torch is not None and isinstance(value, torch.Tensor):
        return value.untyped_storage()
    return value


# Buffers of this size have a segment of their own, so that each is copied again only if it changed.
_OWN_SEGMENT_BYTES = 16 * 1024 * 1024
# Each segment holds a descriptor open.
_MOST_OWN_SEGMENTS = 64
_MOST_KEPT = 128
# How many to keep while nobody knows whether their data still exist.
_MOST_OWNERLESS = 4

_Key = tuple[tuple[int, int], ...]


class Span(NamedTuple):
    """Position of a buffer in a segment of a call."""

    segment: int
    offset: int
    num_bytes: int
    is_readonly: bool


class _Kept(NamedTuple):
    segment: SharedSegment
    owner: "weakref.ref[Any] | None"
    watch: WriteWatch | None

    def is_current(self, views: Sequence[memoryview]) -> bool:
        """Tell whether the copy still has the bytes of its buffers."""
        if self.watch is None:
            return self.segment.has(views)
        if self.watch.is_unwritten():
            return self.segment.has(views, range(self.watch.begin, self.watch.end))
        # Watch begins before the comparison, so that no write is missed.
        self.watch.set()
        return self.segment.has(views)


class SharedBuffers:
    """Copies of buffers in shared memory; may be used from any thread.

    A copy is used again if its buffer is at the same place and has the same bytes. It is kept until
    the owner of the buffer has gone, or `clear`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Key, _Kept] = {}
        self._orphaned: deque[_Key] = deque()

    def share(self, buffers: Sequence[Buffer]) -> tuple[list[SharedSegment], list[Span]] | None:
        """Return segments with copies of buffers, and where each is; None if there is no room."""
        if not can_share():
            return None
        spans: dict[int, Span] = {}
        segments = []
        with self._lock:
            for number, group in enumerate(_groups(buffers)):
                try:
                    segment = self._segment([buffers[index] for index in group])
                except OSError:
                    return None
                segments.append(segment)
                for index, offset in zip(group, segment.offsets, strict=True):
                    view = buffers[index].view
                    spans[index] = Span(number, offset, view.nbytes, view.readonly)
            self._trim()
        return segments, [spans[index] for index in range(len(buffers))]

    def clear(self) -> None:
        """Drop all kept copies; copies in use by calls stay until the calls end."""
        with self._lock:
            self._kept = {}

    def _segment(self, buffers: Sequence[Buffer]) -> SharedSegment:
        views = [buffer.view for buffer in buffers]
        key = tuple((memory_address_of(view), view.nbytes) for view in views)
        # At the end again: the oldest go first.
        kept = self._kept.pop(key, None)
        watch = kept.watch if kept is not None else _watch(views)
        # The data may have changed, or others may be in their place.
        if kept is None or not kept.is_current(views):
            # The old copy makes room for the new one.
            kept = None
            if watch is not None:
                watch.set()
            kept = _Kept(SharedSegment(views), None, watch)
        self._kept[key] = kept._replace(owner=self._reference(buffers[0].owner, key))
        return kept.segment

    def _reference(self, owner: Any, key: _Key) -> "weakref.ref[Any] | None":
        try:
            return weakref.ref(owner, partial(_forget, weakref.ref(self), key))
        except TypeError:
            return None

    def _orphan(self, key: _Key) -> None:
        """Drop the copy of an owner now gone; called at any moment in any thread."""
        self._orphaned.append(key)
        # Garbage collection can call this in the very thread that holds the lock.
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._orphaned:
            key = self._orphaned.popleft()
            kept = self._kept.get(key)
            if kept is not None and kept.owner is not None and kept.owner() is None:
                del self._kept[key]

    def _trim(self) -> None:
        self._sweep()
        ownerless = [key for key, kept in self._kept.copy().items() if kept.owner is None]
        for key in {*ownerless[:-_MOST_OWNERLESS], *list(self._kept)[:-_MOST_KEPT]}:
            del self._kept[key]


def _forget(buffers: "weakref.ref[SharedBuffers]", key: _Key, owner: object) -> None:
    kept_by = buffers()
    if kept_by is not None:
        kept_by._orphan(key)


def _watch(views: Sequence[memoryview]) -> WriteWatch | None:
    """Return a write watch on a single large buffer, or None if impossible."""
    if len(views) != 1 or views[0].nbytes < _OWN_SEGMENT_BYTES:
        return None
    try:
        return WriteWatch(memory_address_of(views[0]), views[0].nbytes)
    except OSError:
        return None


def _groups(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Return the indices of buffers, grouped by common segment."""
    sizes = [buffer.view.nbytes for buffer in buffers]
    large = [index for index, size in enumerate(sizes) if size >= _OWN_SEGMENT_BYTES]
    own = set(sorted(large, key=sizes.__getitem__)[-_MOST_OWN_SEGMENTS:])
    rest = [index for index in range(len(buffers)) if index not in own]
    return [[index] for index in sorted(own)] + ([rest] if rest else [])
