"""Copies of a driver's data in shared memory, kept from call to call."""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from paceline.workers.pools._pickled_buffers import Buffer
from paceline.workers.pools._shared_memory_segment import (
    SharedSegment,
    can_share,
    memory_address_of,
)
from paceline.workers.pools._write_watch import WriteWatch

# Buffers of this size have a segment of their own, so that each is copied again only if it changed.
_OWN_SEGMENT_BYTES = 16 * 1024 * 1024
# Each segment holds a descriptor open.
_MOST_OWN_SEGMENTS = 64
_MOST_KEPT = 128
# How many are kept of which nobody can tell whether their data still exist.
_MOST_OWNERLESS = 4

_Key = tuple[tuple[int, int], ...]


class Span(NamedTuple):
    """Place of a buffer in one of the segments of a call."""

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
        # From before the comparison on, so that no write is missed.
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
        """Keep nothing more; what calls still use stays until they have ended."""
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
        """Let go of a copy whose owner has gone; called at any moment of any thread."""
        self._orphaned.append(key)
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
    """Return a watch on a large buffer, where that is possible."""
    if len(views) != 1 or views[0].nbytes < _OWN_SEGMENT_BYTES:
        return None
    try:
        return WriteWatch(memory_address_of(views[0]), views[0].nbytes)
    except OSError:
        return None


def _groups(buffers: Sequence[Buffer]) -> list[list[int]]:
    """Return which buffers go into a segment together, by their numbers."""
    sizes = [buffer.view.nbytes for buffer in buffers]
    large = [index for index, size in enumerate(sizes) if size >= _OWN_SEGMENT_BYTES]
    own = set(sorted(large, key=sizes.__getitem__)[-_MOST_OWN_SEGMENTS:])
    rest = [index for index in range(len(buffers)) if index not in own]
    return [[index] for index in sorted(own)] + ([rest] if rest else [])
