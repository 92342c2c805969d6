"""Tensors in memory: the pieces of a rank, copies by several threads, digests."""

import _thread
import ctypes
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain, compress
from typing import Any, TypeAlias

import torch
import xxhash

Piece = tuple[Sequence[int], Sequence[int]]
"""The shape of a part of a tensor, and where in the whole it begins."""


def is_sharded(value: object) -> bool:
    """Tell whether a tensor is divided among the ranks."""
    # Importing its class takes a second, for nothing where there are none.
    return type(value).__name__ == "DTensor"


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's piece of a divided tensor, in the same memory; others as they are."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local.detach()


@lru_cache(maxsize=4096)
def local_piece(shape: torch.Size, mesh: Any, placements: Any) -> Piece:
    """Return the shape and the beginning of this rank's piece."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed = compute_local_shape_and_global_offset(shape, mesh, placements)
    return placed[0], placed[1]


def piece_here(tensor: Any) -> Piece:
    """Return the shape and the beginning of this rank's piece of a sharded tensor."""
    return local_piece(tensor.shape, tensor.device_mesh, tensor.placements)


def part_of(tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    """Return a part of a whole tensor, in the same memory."""
    ends = (begin + size for begin, size in zip(offset, shape, strict=True))
    return tensor[tuple(map(slice, offset, ends))]


def like_piece(local: torch.Tensor, present: Any) -> Any:
    """Return this rank's piece, as a DTensor with the layout of `present` if sharded."""
    if not is_sharded(present):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        present.device_mesh,
        present.placements,
        run_check=False,
        shape=present.shape,
        stride=present.stride(),
    )


def copy_piece(whole: Any, sharded: Any) -> None:
    """Copy this rank's piece of a whole tensor into a sharded tensor."""
    sharded.to_local().copy_(part_of(whole, *piece_here(sharded)))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return a model's named parameters like torch's method, but without hashing each parameter.

    Each hash is a call of Python, which takes half of the time where modules have many parameters.
    Training stands still while the state of a model is captured.
    """
    if type(model).named_parameters is not torch.nn.Module.named_parameters:
        return [*model.named_parameters()]
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in found:
                found[id(parameter)] = (prefix + name, parameter)
    return [*found.values()]


def all_parameters(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.nn.Parameter]:
    """Return the parameters of all models, then others of optimizers; without repeats."""
    found = {id(p): p for model in models for _, p in named_parameters(model)}
    for optimizer in optimizers:
        found.update((id(p), p) for p in parameters_of(optimizer) if id(p) not in found)
    return list(found.values())


# Least state size for a second copying thread: starting a thread costs less time than saved.
_SHARED_BYTES = 2**24
# Largest single move: the other thread may have to wait for the end of this one.
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
    """Tell whether all tensors are contiguous in CPU memory, with values as stored.

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
    """Copy memory while moves are left; ctypes releases the GIL, so other threads run."""
    with suppress(IndexError):
        while True:
            ctypes.memmove(*take())


def _divided(move: Move) -> Iterator[Move]:
    to, start, size = move
    for done in range(0, size, _MOVE_BYTES):
        yield to + done, start + done, min(_MOVE_BYTES, size - done)


# Sampling of large tensors: above four blocks, only every 32nd block is digested, unless
# all are asked for.
_BLOCK_BYTES, _STRIDE = 1 << 14, 32
_LARGE_BLOCK_BYTES = 1 << 20
# Limit of words converted to 64-bit copies at a time, to bound device memory.
_MAX_WORDS = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16}
_GOLDEN, _MIXER = -0x61C8864680B583EB, -0x40A7B892E31B1A47


class TensorDigests:
    """Digests of tensors, added by name.

    The same bits have the same digest on devices of one type.

    Args:
        turn: Which blocks of tensors above 64 KiB are looked at; None for all of them.
    """

    def __init__(self, turn: int | None = None) -> None:
        self._turn = turn
        self._digests: dict[str, str] = {}
        self._sums: dict[torch.device, BlockSums] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor under a unique name; without own memory, only type and layout count."""
        self._digests[name] = f"{tensor.dtype} {tensor.layout}"
        if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
            return
        self._digests[name] += f" {list(tensor.shape)}"
        flat = tensor.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
        places = self._places(len(words), words.element_size())
        if tensor.is_cpu:
            # The processor reads memory faster than torch multiplies.
            content, hasher = words.numpy(), xxhash.xxh3_64()
            for place in places:
                hasher.update(content[place].data)
            self._digests[name] += f" {hasher.hexdigest()}"
        elif not tensor.is_meta:
            sums = self._sums.setdefault(tensor.device, BlockSums(tensor.device))
            sums.add(name, [words[place] for place in places])

    def _places(self, num_words: int, word_bytes: int) -> list[slice]:
        """Return the slices of a tensor's words to digest."""
        begin, stride, size = 0, 1, _LARGE_BLOCK_BYTES // word_bytes
        if self._turn is not None and num_words * word_bytes > 4 * _BLOCK_BYTES:
            stride, size = _STRIDE, _BLOCK_BYTES // word_bytes
            begin = self._turn % min(_STRIDE, -(-num_words // size)) * size
        return [slice(at, at + size) for at in range(begin, num_words, stride * size)]

    def finish(self) -> dict[str, str]:
        """Return all digests by name; the host waits for each device once."""
        for sums in self._sums.values():
            for name, numbers in sums.finish().items():
                self._digests[name] += "".join(f" {number:x}" for number in numbers)
        return self._digests


class BlockSums:
    """Position-weighted sums of the words of blocks, computed on a device.

    The factors are odd, so the change of one word changes the sum for certain.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        places = torch.arange(_LARGE_BLOCK_BYTES, device=device) * _GOLDEN
        # Odd factors are invertible modulo 2**64: no change of a single word can cancel out.
        self._factors = (places ^ (places >> 29)) * _MIXER | 1
        self._blocks: list[torch.Tensor] = []
        self._num_words = 0
        self._num_blocks: dict[str, int] = {}
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, blocks: Sequence[torch.Tensor]) -> None:
        """Add the blocks of a tensor, as words of at most 32 bits."""
        self._num_blocks[name] = len(blocks)
        for block in blocks:
            self._blocks.append(block)
            self._num_words += len(block)
            if self._num_words > _MAX_WORDS:
                self._sum_up()

    def finish(self) -> dict[str, list[int]]:
        """Return the sums of each tensor's blocks."""
        self._sum_up()
        sums = iter(torch.cat(self._sums).tolist() if self._sums else ())
        return {
            name: [next(sums) for _ in range(number)] for name, number in self._num_blocks.items()
        }

    def _sum_up(self) -> None:
        # A few operations for all blocks: a device takes longer to begin one than to do it.
        blocks, self._blocks, self._num_words = self._blocks, [], 0
        if not blocks:
            return
        words = torch.cat(blocks).to(torch.int64)
        words *= torch.cat([self._factors[: len(block)] for block in blocks])
        ends = [end - 1 for end in accumulate(map(len, blocks))]
        totals = words.cumsum(0)[torch.tensor(ends, device=words.device)]
        self._sums.append(torch.diff(totals, prepend=totals.new_zeros(1)))
