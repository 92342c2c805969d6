"""Device, process group and backend of a rank, small sums over ranks, tensors in memory."""

import _thread
import copy
import ctypes
import logging
import operator
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain, compress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import xxhash

from paceline._base.arguments_and_errors import one_of
from paceline._base.process_and_network import LOOPBACK, PortReservation
from paceline._training.workers.processes.worker_process import join_process_group
from paceline._training.workers.worker_pools import prepare_joined, skip_interpreter_shutdown
from paceline.core._distributed_context import DistributedContext
from paceline.core._launcher_place import launched_place

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0


def join_ranks(
    distributed: DistributedContext | None, device: torch.device | None = None
) -> DistributedContext | None:
    """Return this process's place, after making the process group if there is none.

    The place is the one given, else that of a process group which is there already, else what the
    launcher says; None for a process that works alone.

    Args:
        distributed: The place, if it is known.
        device: The device, if it is not to be a GPU wherever there is one.

    Raises:
        ValueError: A variable of the environment is missing or no number.
        DistributedTimeoutError: Ranks are missing.
    """
    place = launched_place()
    is_known = place is not None and (place.local_rank is not None or not dist.is_initialized())
    if distributed is None and is_known:
        distributed = DistributedContext.from_torch_distributed()
    if dist.is_initialized():
        distributed = distributed or _place_in_group()
    elif distributed is not None and distributed.size > 1:
        _make_group(distributed, device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        skip_interpreter_shutdown()
    return distributed


def own_device(
    local_rank: int, *, gpus_per_rank: float | None = None, chosen: torch.device | None = None
) -> torch.device:
    """Return the device of a rank: the first of its GPUs, or the CPU.

    Args:
        local_rank: The rank's number on its node.
        gpus_per_rank: How many GPUs each rank has, 0 for none; None for one each, if there are any.
        chosen: The user's own choice, such as "cuda" for a GPU of its own.
    """
    if chosen is not None and (chosen.type != "cuda" or chosen.index is not None):
        return chosen
    num_gpus = torch.cuda.device_count() if gpus_per_rank != 0 else 0
    if not num_gpus:
        return chosen or torch.device("cpu")
    return torch.device("cuda", int(local_rank * (gpus_per_rank or 1)) % num_gpus)


def use_own_device(local_rank: int, **options: Any) -> torch.device:
    """Return the device of a rank, see `own_device`, and make a GPU the current CUDA device."""
    device = own_device(local_rank, **options)
    if device.type == "cuda":
        # Current device: a plain "cuda" would mean GPU 0 in every process.
        torch.cuda.set_device(device)
    return device


def suitable_backend(device: torch.device, *, shares_gpu: bool) -> str:
    """Return the process group backend for a device; NCCL refuses ranks sharing a GPU."""
    return "nccl" if device.type == "cuda" and not shares_gpu else "gloo"


def _make_group(distributed: DistributedContext, device: torch.device | None) -> None:
    backend = _agreed_backend(distributed, device)
    logger.info("The process group of %d ranks uses %s.", distributed.size, backend)
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        join_process_group(backend, timeout_s=_TIMEOUT_S)
        return
    place = launched_place()
    if place is not None and (place.rank, place.size) == (distributed.rank, distributed.size):
        prepare_joined(distributed)
        address, port = place.meeting_point()
        _meet_other_ranks(backend, distributed, address, port)
        return
    with PortReservation() as reservation:
        address = LOOPBACK if distributed.cross_size == 1 else socket.gethostname()
        address, port = distributed.broadcast((address, reservation.port))
        _meet_other_ranks(backend, distributed, address, port)


def _meet_other_ranks(
    backend: str, distributed: DistributedContext, address: str, port: int
) -> None:
    join_process_group(
        backend,
        timeout_s=_TIMEOUT_S,
        method=f"tcp://{address}:{port}",
        rank=distributed.rank,
        world_size=distributed.size,
    )


def _agreed_backend(distributed: DistributedContext, chosen: torch.device | None) -> str:
    """Return the backend for all ranks: NCCL if each has a GPU of its own, else gloo."""
    gpu = None
    if torch.cuda.is_available() and (chosen is None or chosen.type == "cuda"):
        device = distributed.local_rank % torch.cuda.device_count()
        if chosen is not None and chosen.index is not None:
            device = chosen.index
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus = distributed.allgather(gpu)
    if None not in gpus and len(set(gpus)) == len(gpus):
        return "nccl"
    if any(gpus) and distributed.rank == 0:
        logger.warning(
            "NCCL needs a GPU for each of the %d ranks, but there are %d: gloo is used, which is"
            " slower.",
            len(gpus),
            len(set(gpus) - {None}),
        )
    return "gloo"


def _place_in_group() -> DistributedContext:
    """Return this process's place in a process group made by the user."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return DistributedContext.single()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = list(dict.fromkeys(hosts))
    with PortReservation() as reservation:
        address = LOOPBACK if len(nodes) == 1 else nodes[0]
        meeting_point = [(address, reservation.port)]
        # Rank 0's choice for all: the port is reserved on its machine.
        dist.broadcast_object_list(meeting_point)
        return DistributedContext(
            rank=rank,
            size=size,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            cross_rank=nodes.index(hosts[rank]),
            cross_size=len(nodes),
            chief_ip=meeting_point[0][0],
            chief_port=meeting_point[0][1],
        )


class Precision(str, Enum):
    """Number format of the forward pass; parameters and optimizers keep their own.

    FP32 changes nothing. BF16 and FP16 run it under torch's autocast, FP16 with gradient scaling.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def of(cls, value: "str | Precision") -> "Precision":
        """Return the precision of a name.

        Raises:
            ValueError: There is none of this name.
        """
        return cls(one_of(*(member.value for member in cls))("precision", value))

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss."""
        if self is Precision.FP32:
            return nullcontext()
        dtype = torch.bfloat16 if self is Precision.BF16 else torch.float16
        return torch.autocast(device.type, dtype)

    def outside_autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context for the backward pass and the step, nested in `autocast`'s."""
        return nullcontext() if self is Precision.FP32 else _OutsideAutocast(device.type)

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a gradient scaler for FP16; None for other precisions."""
        return torch.amp.GradScaler(device.type) if self is Precision.FP16 else None


class _OutsideAutocast(AbstractContextManager[None]):
    """As `torch.autocast(device_type, enabled=False)`, at a third of its cost to each step.

    That looks up and sets four properties of autocast besides, which stay as they are here.
    """

    __slots__ = ("_device_type", "_was_enabled")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._was_enabled = False

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self._device_type, self._was_enabled)


def compute_in(model: torch.nn.Module, precision: Precision, device: torch.device) -> None:
    """Make a model's forward pass run in a precision, with its outputs in single precision."""
    forward: Any = _InPrecision(model.forward, precision, device)
    model.forward = forward


class _InPrecision:
    """Wrapper of a forward pass: runs in another number format, returns single precision."""

    def __init__(self, forward: Any, precision: Precision, device: torch.device) -> None:
        self._forward = forward
        self._precision = precision
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.autocast(self._device):
            return _in_single_precision(self._forward(*args, **kwargs))

    def __reduce__(self) -> Any:
        # A model that is returned, copied or saved as a whole is the user's own again.
        return unwrapped_forward, (self._forward,)


def unwrapped_forward(forward: Any) -> Any:
    """Return the forward method itself, when a pickled model is loaded."""
    return forward


def _in_single_precision(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_half = value.dtype in (torch.float16, torch.bfloat16)
        return value.float() if is_half else value
    if isinstance(value, Mapping):
        # Models return mappings with attributes, which a plain dictionary would not have.
        converted = copy.copy(value)
        for key, item in value.items():
            converted[key] = _in_single_precision(item)  # type: ignore[index]  # outputs are
        return converted
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_in_single_precision, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_in_single_precision, value))
    return value


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
