"""Pieces and whole tensors of a sharded state, and copies of a state in host memory."""

import copy
import ctypes
import logging
import math
import mmap
import operator
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress, count, pairwise, repeat
from typing import Any, NamedTuple, TypeAlias

import torch

from paceline._training.engine.checkpoints.capture_and_restore import divided_optimizer_states
from paceline._training.engine.checkpoints.state_format import (
    OwnPiece,
    StateInPieces,
    TensorCollector,
    check_tensor,
    fill_tensor_slots,
    own_piece,
    slot_path,
)
from paceline._training.engine.checkpoints.tensor_reader import (
    LazyTensor,
    ShardedTensor,
    fit_stored_tensor,
    with_items,
)
from paceline._training.engine.tensor_copies_and_digests import (
    copy_tensors,
    is_sharded,
    local_piece,
    parameters_of,
)


def parts_with_shard(parts: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the parts of a checkpoint, with this rank's pieces of sharded tensors as a part.

    Args:
        parts: States by name, some of them `StateInPieces`.
        rank: This rank.
    """
    pieces: dict[str, Any] = {}
    stored = {}
    for name, part in parts.items():
        given = part if isinstance(part, StateInPieces) else StateInPieces(part, name)
        state = take_sharded_tensor_pieces(given.state, given.name, pieces, given.first_rank)
        if given.is_whole:
            stored[name] = state
    return stored | ({f"shard_{rank}": pieces} if pieces else {})


def take_sharded_tensor_pieces(
    state: Any, name: str, pieces: dict[str, Any], first_rank: int = 0
) -> Any:
    """Return a state without its sharded tensors, and add this rank's pieces to others.

    Args:
        state: A nested state.
        name: The prefix of its tensors' names.
        pieces: The pieces by name, and under "offsets" where each begins.
        first_rank: One of the ranks that store the tensors. Other ranks that hold them, such as
            another tensor-parallel group, hold copies.
    """
    if is_sharded(state):
        state = own_piece(state, first_rank)
    if isinstance(state, OwnPiece):
        spec = state.spec
        if state.local is not None:
            _, offset = local_piece(spec.shape, spec.mesh, spec.placements)
            pieces[name] = state.local.detach()
            pieces.setdefault("offsets", {})[name] = list(offset)
        return ShardedTensor(name, tuple(spec.shape), spec.tensor_meta.dtype)
    if isinstance(state, LazyTensor):
        return state.read()
    if isinstance(state, dict):
        return {
            key: take_sharded_tensor_pieces(item, f"{name}.{key}", pieces, first_rank)
            for key, item in state.items()
        }
    if isinstance(state, (list, tuple)):
        items = [
            take_sharded_tensor_pieces(item, f"{name}.{i}", pieces, first_rank)
            for i, item in enumerate(state)
        ]
        return items if isinstance(state, list) else tuple(items)
    return state


def joined_pieces(state: Any, by_rank: Sequence[Mapping[str, Any]]) -> Any:
    """Return a state with its whole tensors, on the CPU.

    Args:
        state: What `take_sharded_tensor_pieces` returned.
        by_rank: The pieces of each rank.
    """
    if isinstance(state, ShardedTensor):
        result = torch.empty(state.shape, dtype=state.dtype)
        for pieces in by_rank:
            if state.name in pieces:
                piece, start = pieces[state.name], pieces["offsets"][state.name]
                ends = (a + size for a, size in zip(start, piece.shape, strict=True))
                result[tuple(map(slice, start, ends))] = piece
        return result
    return with_items(state, partial(joined_pieces, by_rank=by_rank))


def accept_whole_tensors(model: torch.nn.Module) -> None:
    """Have `load_state_dict` of a sharded model and of its parts take whole tensors too."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_fit_parameters)  # type: ignore[no-untyped-call]


def accept_whole_states(optimizer: torch.optim.Optimizer) -> None:
    """Have `load_state_dict` of an optimizer of sharded parameters take whole tensors too."""
    optimizer.register_load_state_dict_pre_hook(_fit_states)


def check_sharded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer unable to step the pieces of sharded models.

    Raises:
        ValueError: It was made before its model was sharded, or joins parameters.
    """
    name = type(optimizer).__name__
    if not any(map(is_sharded, parameters_of(optimizer))):
        raise ValueError(
            'With `data_parallel="fsdp"` an optimizer must be made of the parameters of a model'
            f" that was prepared before, but those of {name} are not sharded. Hint: prepare the"
            " model first, then Optimizer(model.parameters())."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            'With `data_parallel="fsdp"` an optimizer must step each parameter by itself, but'
            f' {name} joins all of them. Hint: another optimizer, or `data_parallel="flat"`.'
        )


def outline_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model before sharding, with meta parameters instead of values."""
    memo: dict[int, Any] = {
        id(each): torch.nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for each in model.parameters()
    }
    # Memo of stand-ins: deepcopy uses them and copies no parameter values.
    return copy.deepcopy(model, memo)


def whole_model(outline: torch.nn.Module, sharded: torch.nn.Module) -> torch.nn.Module:
    """Return a whole copy of a sharded model on the CPU; all ranks call together.

    Args:
        outline: What `outline_of` returned before it was sharded.
        sharded: The model.
    """
    memo: dict[int, Any] = {}
    parameters, buffers = dict(sharded.named_parameters()), dict(sharded.named_buffers())
    for name, parameter in outline.named_parameters():
        value = gathered(parameters[name])
        memo[id(parameter)] = torch.nn.Parameter(value, parameters[name].requires_grad)
    for name, buffer in outline.named_buffers():
        memo[id(buffer)] = gathered(buffers[name])
    return copy.deepcopy(outline, memo).train(sharded.training)


def gathered(state: Any) -> Any:
    """Return a nested state with whole CPU tensors; all ranks call with the same structure."""
    if is_sharded(state):
        return state.full_tensor().detach().cpu()
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    return with_items(state, gathered)


def replace_parameters(
    optimizer: torch.optim.Optimizer, pieces: Mapping[int, torch.nn.Parameter]
) -> None:
    """Replace an optimizer's parameters by the pieces of a model sharded after its creation.

    Args:
        optimizer: The optimizer.
        pieces: The sharded parameters by the `id` of the parameters whose place they take.

    Raises:
        ValueError: It has a state already, which belongs to whole parameters.
    """
    for group in optimizer.param_groups:
        if not any(id(parameter) in pieces for parameter in group["params"]):
            continue
        if optimizer.state:
            raise ValueError(
                'With `data_parallel="fsdp"` an optimizer must have no state when its model is'
                f" prepared, but {type(optimizer).__name__} has stepped or loaded one. Hint:"
                " prepare the model first, then load the optimizer's state."
            )
        # List changed in place: an optimizer may hold a reference to the list.
        group["params"][:] = [pieces.get(id(each), each) for each in group["params"]]


def _fit_parameters(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        stored = state.get(prefix + name)
        # Values of another shape: left for torch to refuse.
        if stored is not None and getattr(stored, "shape", None) == parameter.shape:
            state[prefix + name] = fit_stored_tensor(stored, parameter)


def _fit_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": divided_optimizer_states(state["state"], optimizer)}


logger = logging.getLogger(__name__)

# Larger ones take about as long one by one.
_SMALL_BYTES = 2**16
# Limits of the extra memory for gathered tensors, on the device and on the host: a number of bytes,
# or a share of a large state.
_GATHERED_BYTES, _GATHERED_SHARE = 2**23, 1 / 256
# Fewer tensors of a type are not worth a kernel.
_FEWEST = 8
# Each copy begins at a cache line; copies to other addresses are slower.
ALIGNMENT_BYTES = 64

Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
"""Properties of a tensor that a copy depends on."""


class _Group(NamedTuple):
    """Gathered tensors of the same device and type.

    Attributes:
        indices: Which they are.
        bounds: Where each begins among the values of all, and where the last ends.
        values: Where they arrive on the host.
    """

    indices: list[int]
    bounds: list[int]
    values: torch.Tensor


class GatheredCopies:
    """Copy small tensors of a device to the host together.

    Each copy from a device to the host takes some microseconds, however small it is. So one kernel
    joins the tensors on the device, one copy takes them to the host, and `scatter` moves them to
    their places.

    Args:
        allocate: Returns so many bytes of page-locked memory.
        device_type: Which devices' tensors are gathered.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], device_type: str = "cuda") -> None:
        self._allocate = allocate
        self._device_type = device_type
        self._block = torch.empty(0, dtype=torch.uint8)
        self._groups: list[_Group] = []

    def plan(self, kinds: Sequence[Kind], is_own: Sequence[bool]) -> list[bool]:
        """Choose the tensors to gather by their kinds; return a flag for each tensor.

        Args:
            kinds: All tensors.
            is_own: Whether each is copied at all.
        """
        chosen: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        sizes = [shape.numel() for shape, _, _ in kinds]
        all_bytes = [shape.numel() * dtype.itemsize for shape, dtype, _ in kinds]
        room = max(_GATHERED_BYTES, sum(all_bytes) * _GATHERED_SHARE)
        for index, (_, dtype, device) in enumerate(kinds):
            num_bytes = all_bytes[index]
            is_small = 0 < num_bytes <= min(room, _SMALL_BYTES)
            if is_small and device.type == self._device_type and is_own[index]:
                chosen[device, dtype].append(index)
                room -= num_bytes
        groups = {kind: group for kind, group in chosen.items() if len(group) >= _FEWEST}
        self._lay_out(groups, sizes)
        is_gathered = [False] * len(kinds)
        for index in (index for group in groups.values() for index in group):
            is_gathered[index] = True
        return is_gathered

    def _lay_out(
        self, groups: dict[tuple[torch.device, torch.dtype], list[int]], sizes: list[int]
    ) -> None:
        stop = 0
        places = []
        for (_, dtype), indices in groups.items():
            bounds = [0]
            for index in indices:
                bounds.append(bounds[-1] + sizes[index])
            start = stop + -stop % ALIGNMENT_BYTES
            stop = start + bounds[-1] * dtype.itemsize
            places.append((indices, bounds, start, stop, dtype))
        if stop > self._block.numel():
            self._block = self._allocate(stop)
        self._groups = [
            _Group(indices, bounds, self._block[start:stop].view(dtype))
            for indices, bounds, start, stop, dtype in places
        ]

    def copy(self, sources: Sequence[torch.Tensor]) -> None:
        """Start the copies of the chosen tensors.

        Args:
            sources: All tensors, of the kinds that were planned with.
        """
        for indices, bounds, values in self._groups:
            chosen = [sources[index].resolve_neg().resolve_conj().reshape(-1) for index in indices]
            gathered = torch.empty(bounds[-1], dtype=values.dtype, device=chosen[0].device)
            pieces = torch.split(gathered, [end - begin for begin, end in pairwise(bounds)])
            torch._foreach_copy_([*pieces], chosen)
            values.copy_(gathered, non_blocking=True)

    def scatter(self, places: Sequence[int]) -> None:
        """Move the copies to their places, once they have arrived on the host.

        Args:
            places: The addresses of all tensors' places.
        """
        for indices, bounds, values in self._groups:
            size, address = values.element_size(), values.data_ptr()
            for index, (begin, end) in zip(indices, pairwise(bounds), strict=True):
                ctypes.memmove(places[index], address + begin * size, (end - begin) * size)


# Room for a state that grows a little, such as by the metrics since the last report.
_SPARE_BYTES = 2**20
# Share of the tensors copied first: the device copies them while the host finds the rest.
_FIRST_PART = 4
# A child process sees zeros. Python has no name for it.
_MADV_WIPEONFORK = 18
# Flag of cudaHostRegister: page-locked for all devices.
_PORTABLE = 1

_kind = operator.attrgetter("shape", "dtype", "device")


class HostCopies:
    """Copies of nested states in a single block of host memory, reused for the next copy.

    The block is as large as the tensors of the state. It is page-locked if some of them are on a
    CUDA device. Those are copied without waiting: their streams do it before whatever training
    asks of them next, and `result` returns when the copies have arrived. The first of them that are
    like those of the last copy are copied while the others are still looked for.

    Args:
        is_crowded: Whether this machine lacks two cores for each rank. If all of them copy pieces
            of sharded tensors at once, each does it by one thread.
        device_type: Which devices' tensors are copied without waiting.
    """

    def __init__(self, *, is_crowded: bool = False, device_type: str = "cuda") -> None:
        self._is_crowded = is_crowded
        self._device_type = device_type
        self._block = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._owners: Sequence[int] = range(0)
        self._kinds: list[Kind] = []
        self._ends: list[int] = []
        self._copies: list[torch.Tensor] = []
        # The address and the bytes of each copy.
        self._places: list[int] = []
        self._sizes: list[int] = []
        # Flags of tensors copied individually; None for all tensors.
        self._are_single: list[bool] | None = None
        # Flags of the first tensors with a copy already started.
        self._are_begun: list[bool] = []
        # Page-locked memory is CUDA's. With a method of its own in there, this object and its block
        # would stay until Python looks for cycles.
        self._can_lock = device_type == "cuda"
        self._gathered = GatheredCopies(partial(_new_block, is_locked=self._can_lock), device_type)
        self._pieces: Mapping[int, tuple[OwnPiece, int]] = {}
        self._tree: Any = None
        self._events: list[torch.cuda.Event] = []

    @property
    def num_bytes(self) -> int:
        """The size of the copied tensors."""
        return self._ends[-1] if self._ends else 0

    @torch.no_grad()
    def copy(self, value: Any) -> None:
        """Copy all tensors in `value` into the block, overwriting an earlier copy.

        Tensors that share their memory, such as tied weights, share their copy.

        Raises:
            StateFormatError: A tensor is of a kind that cannot be stored; the message names it.
        """
        self._are_begun = []
        num_first = len(self._kinds) // _FIRST_PART if self._is_pinned else 0
        collector = TensorCollector(self._pieces, num_first or sys.maxsize, self._begin)
        self._tree, self._pieces = collector.collect(value), collector.pieces
        tensors = collector.tensors
        try:
            self._copy_tensors(tensors, has_pieces=bool(collector.pieces))
        except RuntimeError:
            for number, tensor in enumerate(tensors):
                check_tensor(tensor, slot_path(self._tree, number) or "a piece")
            raise

    def _copy_tensors(self, tensors: list[torch.Tensor], *, has_pieces: bool) -> None:
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        owners = _owners(tensors, addresses)
        kinds = [*map(_kind, tensors)]
        if owners != self._owners or kinds != self._kinds:
            is_pinned = any(tensor.device.type == self._device_type for tensor in tensors)
            self._lay_out(owners, kinds, is_pinned=is_pinned)
        single = self._are_single
        if single is not None and self._are_begun:
            begun = chain(self._are_begun, repeat(False))
            single = [*map(operator.gt, single, begun)]
        is_helped = not (self._is_crowded and has_pieces)
        self._copy_single(tensors, addresses, single, with_help=is_helped)
        # Last, so that the device copies large tensors while the host prepares the small ones.
        self._gathered.copy(tensors)
        self._events = _recorded_on({t.device for t in tensors} if self._is_pinned else set())

    def _begin(self, tensors: list[torch.Tensor]) -> None:
        """Copy the first tensors of a state, if they are like those of the last copy."""
        num_first = len(tensors)
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        are_alike = [*map(_kind, tensors)] == self._kinds[:num_first]
        if are_alike and _owners(tensors, addresses) == self._owners[:num_first]:
            assert self._are_single is not None
            self._are_begun = self._are_single[:num_first]
            self._copy_single(tensors, addresses, self._are_begun, with_help=False)

    def _copy_single(
        self,
        tensors: list[torch.Tensor],
        addresses: list[int],
        are_chosen: list[bool] | None,
        *,
        with_help: bool,
    ) -> None:
        """Copy the first tensors of a state individually, or only the chosen tensors."""
        targets, sources = self._copies[: len(tensors)], tensors
        moves = [*zip(self._places, addresses, self._sizes, strict=False)]
        if are_chosen is not None:
            targets, sources = [*compress(targets, are_chosen)], [*compress(sources, are_chosen)]
            moves = [*compress(moves, are_chosen)]
        copy_tensors(targets, sources, moves, with_help=with_help)

    def wait(self) -> None:
        """Wait until the copies have arrived; from any thread."""
        for event in self._events:
            event.synchronize()

    def result(self) -> Any:
        """Wait until the copies have arrived, and return the copied value; from any thread."""
        self.wait()
        self._gathered.scatter(self._places)
        return fill_tensor_slots(self._tree, self._copies)

    def _lay_out(self, owners: Sequence[int], kinds: list[Kind], *, is_pinned: bool) -> None:
        """Assign each tensor a place in the block; tensors sharing memory share a place.

        The first ones keep their places as far as they are like before: the last few of a state
        change from time to time, and places for all would take as long as copying a small state.
        """
        num_kept = min(_num_alike(owners, self._owners), _num_alike(kinds, self._kinds))
        ends = self._ends[:num_kept]
        for index in range(num_kept, len(kinds)):
            end = ends[-1] if ends else 0
            if owners[index] == index:
                shape, dtype, _ = kinds[index]
                end += math.prod(shape) * dtype.itemsize
                end += -end % ALIGNMENT_BYTES
            ends.append(end)
        if ends and (ends[-1] > self._block.numel() or is_pinned > self._is_pinned):
            num_kept = 0
            self._allocate(ends[-1] + _SPARE_BYTES, is_pinned=is_pinned)
        del self._copies[num_kept:], self._places[num_kept:], self._sizes[num_kept:]
        for index in range(num_kept, len(kinds)):
            if owners[index] == index:
                shape, dtype, _ = kinds[index]
                start = ends[index - 1] if index else 0
                stop = start + math.prod(shape) * dtype.itemsize
                self._copies.append(self._block[start:stop].view(dtype).view(shape))
            else:
                self._copies.append(self._copies[owners[index]])
            self._places.append(self._copies[-1].data_ptr())
            self._sizes.append(self._copies[-1].nbytes)
        self._owners, self._kinds, self._ends = owners, kinds, ends
        self._are_single = None
        if self._is_pinned or not isinstance(owners, range):
            own = [index == owner for index, owner in enumerate(owners)]
            gathered = self._gathered.plan(kinds, own)
            self._are_single = [*map(operator.gt, own, gathered)]

    def _allocate(self, num_bytes: int, *, is_pinned: bool) -> None:
        if self._are_begun:
            # The device still writes to the old block.
            for event in _recorded_on({device for _, _, device in self._kinds}):
                event.synchronize()
            self._are_begun = []
        # The old block is given back first, so that there are never two.
        self._copies = []
        self._block = torch.empty(0, dtype=torch.uint8)
        self._block = _new_block(num_bytes, is_locked=is_pinned and self._can_lock)
        self._is_pinned = is_pinned


def _num_alike(new: Sequence[Any], before: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    changed = compress(count(), map(operator.ne, new, before))
    return next(changed, min(len(new), len(before)))


def _owners(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Sequence[int]:
    """Return, for each tensor, the index of the first tensor with the same memory and layout.

    It is a range, each tensor's own number, if no two show the same.
    """
    if len(set(addresses)) == len(addresses):
        return range(len(addresses))
    first_at: dict[int, int] = {}
    owners = [first_at.setdefault(address, index) for index, address in enumerate(addresses)]
    for index, owner in enumerate(owners):
        one, other = tensors[index], tensors[owner]
        if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
            owners[index] = index
    return owners


def _recorded_on(devices: set[torch.device]) -> list[torch.cuda.Event]:
    """Return an event per CUDA device, due once all work queued so far is done."""
    events = []
    for device in devices:
        if device.type == "cuda":
            # A blocking event lets the thread that waits sleep instead of spin.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
    return events


def _new_block(num_bytes: int, *, is_locked: bool) -> torch.Tensor:
    block = torch.frombuffer(_mapped(num_bytes), dtype=torch.uint8)
    if is_locked:
        _lock_pages(block)
    return block


def _mapped(num_bytes: int) -> mmap.mmap:
    """Return anonymous memory wiped rather than shared on a fork, where supported.

    Memory shared with a fork is copied page by page when it is written to next: a save in
    an epoch whose loader workers are forks would stop training several times as long.
    """
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(_MADV_WIPEONFORK)
    return memory


def _lock_pages(block: torch.Tensor) -> None:
    # Page-locking by hand: torch would round a page-locked allocation up to a power of two.
    runtime, address = torch.cuda.cudart(), block.data_ptr()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, block.numel(), _PORTABLE))
    if error:
        logger.warning(
            "The memory for copies of the state cannot be page-locked (CUDA error %d), so"
            " checkpoints stop training for longer.",
            error,
        )
        return
    # Never at interpreter exit: CUDA may be shut down by then.
    weakref.finalize(block, runtime.cudaHostUnregister, address).atexit = False
