"""Copies of many tensors at once: by moves of memory where a tensor is what its memory holds."""

import _thread
import ctypes
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress
from typing import TypeAlias

import torch

# So large a state is copied by two threads: one that begins costs less than this takes.
_SHARED_BYTES = 2**24
# What one of them takes at most at once, as the other may have to wait for it.
_MOVE_BYTES = 2**22

_is_cpu = operator.attrgetter("is_cpu")
_layout = operator.attrgetter("layout")
_STRIDED = frozenset((torch.strided,))

Move: TypeAlias = tuple[int, int, int]
"""To an address, from an address, so many bytes."""


def copy_tensors(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    moves: Sequence[Move],
    *,
    with_help: bool,
) -> None:
    """Copy tensors; a large state in memory with the help of a second thread.

    Training stands still, so there is a core for it unless other ranks copy too. With two threads,
    torch would have both meet at the end of each tensor, which takes as long as the copy of a small
    one, and on a busy machine much longer.

    Args:
        targets: The copies, contiguous.
        sources: Tensors of the same shapes and types.
        moves: For each tensor the move that copies it if it is what its memory holds.
        with_help: Whether a second thread may help.
    """
    if torch.get_num_threads() <= 2:
        if not _are_plain(sources):
            others = [not _are_plain((source,)) for source in sources]
            _copy_by_torch([*compress(targets, others)], [*compress(sources, others)])
            moves = [move for move, is_other in zip(moves, others, strict=True) if not is_other]
        _move_all(moves, with_help=with_help)
    elif sources:
        _copy_by_torch(targets, sources)


def _copy_by_torch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_([*targets], [*sources], non_blocking=True)


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether all tensors are what their memory holds, from the first byte to the last.

    Training stands still for it, so there is no loop in Python.
    """
    return (
        all(map(_is_cpu, tensors))
        and _STRIDED.issuperset(map(_layout, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
    )


def _move_all(moves: Sequence[Move], *, with_help: bool) -> None:
    sizes = [size for _, _, size in moves]
    if not with_help or sum(sizes) <= _SHARED_BYTES:
        for move in moves:
            ctypes.memmove(*move)
        return
    if max(sizes) > _MOVE_BYTES:
        queue = deque(chain.from_iterable(map(_divided, moves)))
    else:
        queue = deque(moves)
    is_helping = threading.Lock()

    def help_moving() -> None:
        with is_helping:
            _move(queue.pop)

    # Nobody waits until it has begun: on a busy machine this thread may be done by then.
    _thread.start_new_thread(help_moving, ())
    try:
        _move(queue.popleft)
    finally:
        # After Ctrl-C, tensors may be gone before the other thread comes to them.
        queue.clear()
        with is_helping:
            pass


def _move(take: Callable[[], Move]) -> None:
    """Copy memory as long as there is some to take; other threads run beside it."""
    with suppress(IndexError):
        while True:
            ctypes.memmove(*take())


def _divided(move: Move) -> Iterator[Move]:
    to, start, size = move
    for done in range(0, size, _MOVE_BYTES):
        yield to + done, start + done, min(_MOVE_BYTES, size - done)
