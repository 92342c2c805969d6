"""Watch of memory for writes, by the kernel's page tracking."""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from functools import cache
from typing import Any

_SYSCALLS = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API = 0xAA
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_MODE_WP = 2
_PROTECT = 1
_WPALLOWED, _WRITTEN, _PRESENT, _SWAPPED = 1 << 0, 1 << 1, 1 << 3, 1 << 4
_PAGE = mmap.PAGESIZE


def _request(direction: int, kind: int, number: int, num_bytes: int) -> int:
    return direction << 30 | num_bytes << 16 | kind << 8 | number


_API_REQUEST = _request(3, _API, 0x3F, 24)
_REGISTER = _request(3, _API, 0x00, 32)
_UNREGISTER = _request(2, _API, 0x01, 16)
_WRITEPROTECT = _request(3, _API, 0x06, 24)
_PAGEMAP_SCAN = _request(3, ord("f"), 16, 96)


class _Range:
    """Pages, and whether their marks were taken away for somebody else."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.is_outdated = False


class WriteWatch(_Range):
    """Watch on the whole pages of a range of this process's private memory.

    Args:
        address: Where the range begins.
        num_bytes: Its size.

    Attributes:
        begin: The first byte that is watched.
        end: The first one after it that is not.

    Raises:
        OSError: This memory cannot be watched, or not on this system.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        super().__init__(-(-address // _PAGE) * _PAGE, (address + num_bytes) // _PAGE * _PAGE)
        tracker = _tracker()
        if tracker is None:
            raise OSError("Writes cannot be watched on this system.")
        self._tracker = tracker
        tracker.add(self)
        weakref.finalize(self, tracker.unregister, self.begin, self.end)

    def set(self) -> None:
        """Watch for writes from now on."""
        self.is_outdated = not self._tracker.protect(self)

    def is_unwritten(self) -> bool:
        """Return whether memory is unwritten since `set`; false if unknown."""
        if self.is_outdated or _may_be_written_by_devices():
            return False
        return self._tracker.is_unwritten(self)


class _Tracker:
    """The marks of this process's pages."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        number = _SYSCALLS.get(os.uname().machine)
        if sys.platform != "linux" or number is None:
            raise OSError("This system has no marks.")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[_Range] = weakref.WeakSet()
        self._descriptor = self._libc.syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "There is no userfaultfd.")
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._ask(self._descriptor, _API_REQUEST, _API, _WP_UNPOPULATED | _WP_ASYNC, 0)

    def add(self, watch: _Range) -> None:
        """Take a range up."""
        if watch.end <= watch.begin or not _is_private(watch.begin, watch.end):
            raise OSError("Only private memory can be watched.")
        size = watch.end - watch.begin
        self._ask(self._descriptor, _REGISTER, watch.begin, size, _MODE_WP, 0)
        with self._lock:
            self._watches.add(watch)

    def protect(self, watch: _Range) -> bool:
        """Clear the marks of a range; return whether this was possible."""
        with self._lock:
            for other in self._watches:
                if other is not watch and other.begin < watch.end and watch.begin < other.end:
                    # Marks of overlapping watches go too.
                    other.is_outdated = True
        size = watch.end - watch.begin
        try:
            self._ask(self._descriptor, _WRITEPROTECT, watch.begin, size, _PROTECT)
        except OSError:
            return False
        # Forked children inherit the descriptor, which still watches the parent's memory.
        return os.getpid() == self._pid

    def is_unwritten(self, watch: _Range) -> bool:
        """Return whether all pages of a range still exist, without a mark of a write."""
        if os.getpid() != self._pid:
            return False
        is_there = _PRESENT | _SWAPPED
        return not (
            self._has_page(watch, inverted=_WPALLOWED, any_of=_WRITTEN | _WPALLOWED)
            or self._has_page(watch, inverted=is_there, all_of=is_there)
        )

    def unregister(self, begin: int, end: int) -> None:
        """Stop tracking a range; its memory may be gone."""
        if os.getpid() == self._pid:
            request = (ctypes.c_uint64 * 2)(begin, end - begin)
            self._libc.ioctl(self._descriptor, ctypes.c_ulong(_UNREGISTER), request)

    def _has_page(self, watch: _Range, *, inverted: int, any_of: int = 0, all_of: int = 0) -> bool:
        found = (ctypes.c_uint64 * 3)()
        words = (96, 0, watch.begin, watch.end, 0, ctypes.addressof(found), 1, 1)
        masks = (inverted, all_of, any_of, _PRESENT)
        try:
            return self._ask(self._pagemap, _PAGEMAP_SCAN, *words, *masks) > 0
        except OSError:
            return True

    def _ask(self, descriptor: int, request: int, *words: int) -> int:
        arguments = (ctypes.c_uint64 * len(words))(*words)
        answer = int(self._libc.ioctl(descriptor, ctypes.c_ulong(request), arguments))
        if answer < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return answer


@cache
def _tracker() -> _Tracker | None:
    """Return the page marks of this process, or None if missing or unreliable."""
    try:
        tracker = _Tracker()
    except (OSError, AttributeError):
        return None
    return tracker if _tells_the_truth(tracker) else None


def _tells_the_truth(tracker: _Tracker) -> bool:
    """Return whether test writes, by the program and by the system, leave marks."""
    with mmap.mmap(-1, 4 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        first = ctypes.c_char.from_buffer(pages)
        begin = ctypes.addressof(first)
        watch = _Range(begin, begin + 4 * _PAGE)
        told = []
        try:
            tracker.add(watch)
            pages.write(bytes(4 * _PAGE))
            for write in (_nothing, _fill, _read_into):
                tracker.protect(watch)
                write(pages)
                told.append(tracker.is_unwritten(watch))
        except OSError:
            return False
        finally:
            tracker.unregister(watch.begin, watch.end)
            del first
    return told == [True, False, False]


def _nothing(pages: mmap.mmap) -> None:
    return


def _fill(pages: mmap.mmap) -> None:
    pages[2 * _PAGE] = 1


def _read_into(pages: mmap.mmap) -> None:
    with open("/dev/zero", "rb", buffering=0) as zeros, memoryview(pages) as view:
        zeros.readinto(view[3 * _PAGE : 3 * _PAGE + 8])


def _is_private(begin: int, end: int) -> bool:
    """Return whether a range is memory of this process alone, without a file."""
    at = begin
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            places, access, _, _, inode, *_ = line.split()
            low, high = (int(place, 16) for place in places.split("-"))
            if high <= at:
                continue
            if low > at or access[3] != "p" or inode != "0":
                return False
            at = high
            if at >= end:
                return True
    return False


def _may_be_written_by_devices() -> bool:
    """Return whether a GPU may write to this process's memory, without leaving marks."""
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())
