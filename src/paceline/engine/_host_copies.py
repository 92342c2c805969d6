"""Copies of a training's state in host memory: all that a checkpoint stops training for."""

import _thread
import ctypes
import logging
import math
import mmap
import operator
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, compress, takewhile
from typing import Any, TypeAlias

import torch

from paceline.engine._sharded_state import Divided, OwnPiece, own_piece
from paceline.engine._sharded_tensors import is_sharded
from paceline.engine._stored_tensors import LazyTensor

logger = logging.getLogger(__name__)

# Each copy begins at a cache line; copies to other addresses are slower.
_ALIGNMENT_BYTES = 64
# Room for a state that grows a little, such as by the metrics since the last report.
_SPARE_BYTES = 2**20
# So large a state is copied by two threads: one that begins costs less than this takes.
_SHARED_BYTES = 2**24
# What one of them takes at most at once, as the other may have to wait for it.
_MOVE_BYTES = 2**22
# A child process sees zeros. Python has no name for it.
_MADV_WIPEONFORK = 18
# Flag of cudaHostRegister: page-locked for all devices.
_PORTABLE = 1
_PLAIN = frozenset((int, float, str, bool, type(None)))

_Kind = tuple[torch.Size, torch.dtype]
_kind = operator.attrgetter("shape", "dtype")
_num_bytes = operator.attrgetter("nbytes")
_Move: TypeAlias = tuple[int, int, int]
"""To an address, from an address, so many bytes."""


class HostCopies:
    """Copy nested states into one block of host memory, which is used again for the next copy.

    The block is as large as the tensors of the state. It is page-locked if some of them are on a
    CUDA device. Those are copied without waiting: their streams do it before whatever training
    asks of them next, and `result` returns when the copies have arrived.

    Args:
        is_crowded: Whether this machine has fewer cores than ranks. If all of them copy pieces of
            sharded tensors at once, each does it by one thread.
    """

    def __init__(self, *, is_crowded: bool = False) -> None:
        self._is_crowded = is_crowded
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._owners: Sequence[int] = range(0)
        self._kinds: list[_Kind] = []
        self._ends: list[int] = []
        self._copies: list[torch.Tensor] = []
        self._tree: Any = None
        self._events: list[torch.cuda.Event] = []

    @torch.no_grad()
    def copy(self, value: Any) -> None:
        """Copy what is in `value`, over the copies of an earlier call.

        Tensors that share their memory, such as tied weights, share their copy.
        """
        tensors = _Tensors()
        self._tree = _collected(value, tensors)
        owners = _owners(tensors)
        kinds = [*map(_kind, tensors)]
        if owners != self._owners or kinds != self._kinds:
            self._lay_out(owners, kinds, is_pinned=any(tensor.is_cuda for tensor in tensors))
        targets: list[torch.Tensor] = self._copies
        sources: list[torch.Tensor] = tensors
        if not isinstance(owners, range):
            own = [index for index, owner in enumerate(owners) if index == owner]
            targets, sources = [targets[index] for index in own], [tensors[index] for index in own]
        _copy_all(targets, sources, with_help=not (self._is_crowded and tensors.has_pieces))
        devices = {t.device for t in tensors if t.is_cuda} if self._is_pinned else ()
        self._events = [_recorded(device) for device in devices]

    def result(self) -> Any:
        """Wait until the copies have arrived, and return the copied value; from any thread."""
        for event in self._events:
            event.synchronize()
        return _filled(self._tree, self._copies)

    def _lay_out(self, owners: Sequence[int], kinds: list[_Kind], *, is_pinned: bool) -> None:
        """Give every tensor a place in the block, or that of the tensor whose memory it shows.

        The first ones keep their places as far as they are like before: the last few of a state
        change from time to time, and places for all would take as long as copying a small state.
        """
        new, before = zip(owners, kinds, strict=True), zip(self._owners, self._kinds, strict=True)
        num_kept = sum(1 for _ in takewhile(bool, map(operator.eq, new, before)))
        ends = self._ends[:num_kept]
        for index in range(num_kept, len(kinds)):
            end = ends[-1] if ends else 0
            if owners[index] == index:
                shape, dtype = kinds[index]
                end += math.prod(shape) * dtype.itemsize
                end += -end % _ALIGNMENT_BYTES
            ends.append(end)
        if ends and (ends[-1] > self._block.numel() or is_pinned > self._is_pinned):
            num_kept = 0
            self._allocate(ends[-1] + _SPARE_BYTES, is_pinned=is_pinned)
        del self._copies[num_kept:]
        for index in range(num_kept, len(kinds)):
            if owners[index] == index:
                shape, dtype = kinds[index]
                start = ends[index - 1] if index else 0
                stop = start + math.prod(shape) * dtype.itemsize
                self._copies.append(self._block[start:stop].view(dtype).view(shape))
            else:
                self._copies.append(self._copies[owners[index]])
        self._owners, self._kinds, self._ends = owners, kinds, ends

    def _allocate(self, num_bytes: int, *, is_pinned: bool) -> None:
        # The old block is given back first, so that there are never two.
        self._copies = []
        self._block = torch.empty(0, dtype=torch.uint8)
        self._block = torch.frombuffer(_mapped(num_bytes), dtype=torch.uint8)
        self._is_pinned = is_pinned
        if is_pinned:
            _lock_pages(self._block)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, with_help: bool) -> None:
    """Copy tensors; a large state in memory with the help of a second thread.

    Training stands still, so there is a core for it unless other ranks copy too. With two threads,
    torch would have both meet at the end of each tensor, which takes as long as the copy of a small
    one, and on a busy machine much longer.
    """
    if not sources:
        return
    are_plain = [torch.get_num_threads() <= 2 and _is_plain(source) for source in sources]
    if not all(are_plain):
        others = [not is_plain for is_plain in are_plain]
        to, start = [*compress(targets, others)], [*compress(sources, others)]
        torch._foreach_copy_(to, start, non_blocking=True)
        targets, sources = [*compress(targets, are_plain)], [*compress(sources, are_plain)]
    if sources:
        _move_all(targets, sources, with_help=with_help)


def _move_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, with_help: bool) -> None:
    sizes = [*map(_num_bytes, sources)]
    addresses = [map(torch.Tensor.data_ptr, each) for each in (targets, sources)]
    moves = deque(zip(*addresses, sizes, strict=True))
    if not with_help or sum(sizes) <= _SHARED_BYTES:
        _move(moves.popleft)
        return
    if max(sizes) > _MOVE_BYTES:
        moves = deque(chain.from_iterable(map(_divided, moves)))
    is_helping = threading.Lock()

    def help_moving() -> None:
        with is_helping:
            _move(moves.pop)

    # Nobody waits until it has begun: on a busy machine this thread may be done by then.
    _thread.start_new_thread(help_moving, ())
    try:
        _move(moves.popleft)
    finally:
        # After Ctrl-C, tensors may be gone before the other thread comes to them.
        moves.clear()
        with is_helping:
            pass


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is what its memory holds, from its first byte to its last."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _move(take: Callable[[], _Move]) -> None:
    """Copy memory as long as there is some to take; other threads run beside it."""
    with suppress(IndexError):
        while True:
            ctypes.memmove(*take())


def _divided(move: _Move) -> Iterator[_Move]:
    to, start, size = move
    for done in range(0, size, _MOVE_BYTES):
        yield to + done, start + done, min(_MOVE_BYTES, size - done)


class _Tensors(list[torch.Tensor]):
    """The tensors of a state; `has_pieces` tells whether some are pieces of sharded ones."""

    has_pieces = False


class _Slot(int):
    """Placeholder for a tensor in a nested value: its number."""


def _collected(value: Any, tensors: _Tensors, *, whole: bool = True, first_rank: int = 0) -> Any:
    """Return a copy of a nested value with a slot for each tensor, which is added to a list.

    Training stands still for it, so what most of a state consists of is looked at without a call.

    Args:
        value: The value.
        tensors: The list. Of a sharded tensor it gets this rank's piece.
        whole: Whether tensors that are not sharded are copied too.
        first_rank: As for `take_pieces`.
    """
    if isinstance(value, torch.Tensor):
        return _collected_tensor(value, tensors, whole=whole, first_rank=first_rank)
    collect = partial(_collected, tensors=tensors, whole=whole, first_rank=first_rank)
    if isinstance(value, dict):
        tree = {}
        for key, item in value.items():
            kind = type(item)
            if kind is torch.Tensor and whole:
                tree[key] = _Slot(len(tensors))
                tensors.append(item)
            else:
                tree[key] = item if kind in _PLAIN else collect(item)
        return tree
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            # Such as the numbers of a generator's state.
            return list(value) if isinstance(value, list) else tuple(value)
        items = [item if type(item) in _PLAIN else collect(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Divided):
        whole, first_rank = value.is_whole, value.first_rank
        tree = _collected(value.state, tensors, whole=whole, first_rank=first_rank)
        return replace(value, state=tree)
    # An array may be changed in place while it is being written.
    return value.copy() if type(value).__module__ == "numpy" else value


def _collected_tensor(
    tensor: torch.Tensor, tensors: _Tensors, *, whole: bool, first_rank: int
) -> Any:
    if is_sharded(tensor):
        piece = own_piece(tensor, first_rank)
        if piece.local is not None:
            tensors.append(piece.local)
            tensors.has_pieces = True
            piece.local = _Slot(len(tensors) - 1)
        return piece
    if not whole:
        return None
    tensors.append(tensor.read() if isinstance(tensor, LazyTensor) else tensor)
    return _Slot(len(tensors) - 1)


def _filled(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what `_collected` was given, with other tensors in its slots."""
    if type(tree) is _Slot:
        return tensors[tree]
    if isinstance(tree, dict):
        return {key: _filled(item, tensors) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [item if type(item) in _PLAIN else _filled(item, tensors) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, OwnPiece):
        return OwnPiece(_filled(tree.local, tensors), tree.spec)
    if isinstance(tree, Divided):
        return replace(tree, state=_filled(tree.state, tensors))
    return tree


def _owners(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return for each tensor the number of the first that shows the same memory alike.

    It is a range, each tensor's own number, if no two show the same.
    """
    addresses = [*map(torch.Tensor.data_ptr, tensors)]
    if len(set(addresses)) == len(addresses):
        return range(len(addresses))
    first_at: dict[int, int] = {}
    owners = [first_at.setdefault(address, index) for index, address in enumerate(addresses)]
    for index, owner in enumerate(owners):
        one, other = tensors[index], tensors[owner]
        if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
            owners[index] = index
    return owners


def _recorded(device: torch.device) -> torch.cuda.Event:
    # A blocking event lets the thread that waits sleep instead of spin.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _mapped(num_bytes: int) -> mmap.mmap:
    """Return memory that a fork leaves alone, where the system can.

    What a process shares with a fork is copied page by page when it is written to next: a save in
    an epoch whose loader workers are forks would stop training several times as long.
    """
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(_MADV_WIPEONFORK)
    return memory


def _lock_pages(block: torch.Tensor) -> None:
    # What torch allocates page-locked would be rounded up to a power of two.
    runtime, address = torch.cuda.cudart(), block.data_ptr()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, block.numel(), _PORTABLE))
    if error:
        logger.warning(
            "The memory for copies of the state cannot be page-locked (CUDA error %d), so"
            " checkpoints stop training for longer.",
            error,
        )
        return
    weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
