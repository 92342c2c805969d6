"""Sharded tensors of a state: pieces per rank, collection, conversion to whole tensors."""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from paceline._training.engine.checkpoints.models_and_optimizers import divided_optimizer_states
from paceline._training.engine.checkpoints.stored_tensors import (
    LazyTensor,
    ShardedTensor,
    fit_stored_tensor,
)
from paceline._training.engine.tensors import is_sharded, local_piece, parameters_of


@dataclass(slots=True, eq=False)
class OwnPiece:
    """This rank's piece of a sharded tensor.

    Attributes:
        local: The piece, or None if another rank stores it; in a state whose tensors are numbered,
            its number.
        spec: The shape and type of the whole, and how it is divided.
    """

    local: Any
    spec: Any


@dataclass(frozen=True)
class StateInPieces:
    """Part of a checkpoint with sharded tensors stored in pieces.

    Attributes:
        state: The nested state.
        name: The prefix of its pieces' names, alike on all ranks that have some.
        first_rank: As for `take_sharded_tensor_pieces`.
        is_whole: Whether this rank also stores the tensors that are not sharded.
    """

    state: Any
    name: str
    first_rank: int = 0
    is_whole: bool = True


def own_piece(tensor: Any, first_rank: int) -> OwnPiece:
    """Return this rank's piece of a sharded tensor; training pauses meanwhile."""
    # Private attributes: the public ones create a new tensor through autograd.
    spec, local = tensor._spec, tensor._local_tensor
    if not local.numel() or _is_copy(spec.mesh, spec.placements, first_rank):
        local = None
    return OwnPiece(local, spec)


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


@lru_cache(maxsize=4096)
def _is_copy(mesh: Any, placements: Any, first_rank: int) -> bool:
    """Tell whether another rank stores the same piece."""
    return first_rank not in mesh.mesh or any(
        placement.is_replicate() and mesh.get_local_rank(dim)
        for dim, placement in enumerate(placements)
    )


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
    if isinstance(state, dict):
        return {key: joined_pieces(item, by_rank) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = [joined_pieces(item, by_rank) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return state


_PLAIN = frozenset((int, float, str, bool, type(None)))


class TensorSlot(int):
    """Placeholder for a tensor in a nested value: its number."""


class TensorCollector:
    """Take the tensors out of a nested value.

    Training stands still meanwhile, so the most common values are looked at without a call,
    and the pieces of sharded tensors that are divided as before are recognized.

    Args:
        pieces_before: The pieces of the last collector.
        num_first: How many tensors `take_first` wants at least; none by default.
        take_first: Called once with the first tensors, while the others are still to be found.

    Attributes:
        tensors: The tensors found, in order. Of a sharded tensor this is the rank's piece.
        pieces: By number of the tensor, the piece of a sharded one and the first of the ranks that
            store it.
    """

    def __init__(
        self,
        pieces_before: Mapping[int, tuple[OwnPiece, int]],
        num_first: int = sys.maxsize,
        take_first: Callable[[list[torch.Tensor]], None] = lambda tensors: None,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.pieces: dict[int, tuple[OwnPiece, int]] = {}
        self._before = pieces_before
        self._num_first, self._take_first = num_first, take_first
        self._is_whole, self._first_rank = True, 0

    def collect(self, value: Any) -> Any:
        """Return a copy of a nested value with a slot for each tensor."""
        if isinstance(value, torch.Tensor):
            return self._collect_tensor(value)
        if isinstance(value, dict):
            return self._collect_items(value)
        if isinstance(value, (list, tuple)):
            if _PLAIN.issuperset(map(type, value)):
                # Fast path for plain numbers, for example a generator's state.
                return list(value) if isinstance(value, list) else tuple(value)
            items = [item if type(item) in _PLAIN else self.collect(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, StateInPieces):
            before = self._is_whole, self._first_rank
            self._is_whole, self._first_rank = value.is_whole, value.first_rank
            tree = self.collect(value.state)
            self._is_whole, self._first_rank = before
            return replace(value, state=tree)
        # An array may be changed in place while it is being written.
        return value.copy() if type(value).__module__ == "numpy" else value

    def _collect_items(self, value: dict[Any, Any]) -> dict[Any, Any]:
        tree: dict[Any, Any] = {}
        tensors, before, pieces = self.tensors, self._before, self.pieces
        is_whole, first_rank = self._is_whole, self._first_rank
        for key, item in value.items():
            kind = type(item)
            if kind is torch.Tensor:
                if is_whole:
                    tree[key] = TensorSlot(len(tensors))
                    tensors.append(item)
                else:
                    tree[key] = None
            elif kind in _PLAIN:
                tree[key] = item
            elif kind is dict:
                tree[key] = self._collect_items(item)
            elif kind.__name__ == "DTensor":
                number = len(tensors)
                known = before.get(number)
                if known is None or known[0].spec is not item._spec or known[1] != first_rank:
                    tree[key] = self._collect_tensor(item)
                else:
                    pieces[number] = known
                    tree[key] = known[0]
                    tensors.append(item._local_tensor)
            else:
                tree[key] = self.collect(item)
        if len(tensors) >= self._num_first:
            self._num_first = sys.maxsize
            self._take_first(tensors)
        return tree

    def _collect_tensor(self, tensor: torch.Tensor) -> Any:
        number = TensorSlot(len(self.tensors))
        if is_sharded(tensor):
            piece = own_piece(tensor, self._first_rank)
            if piece.local is not None:
                self.tensors.append(piece.local)
                piece.local = number
                self.pieces[number] = piece, self._first_rank
            return piece
        if not self._is_whole:
            return None
        self.tensors.append(tensor.read() if isinstance(tensor, LazyTensor) else tensor)
        return number


def slot_path(tree: Any, number: int, path: str = "") -> str | None:
    """Return a numbered slot's path in a tree from `TensorCollector`; None if absent."""
    if type(tree) is TensorSlot:
        return path if tree == number else None
    if isinstance(tree, StateInPieces):
        return slot_path(tree.state, number, path)
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    found = (slot_path(item, number, f"{path}.{key}".lstrip(".")) for key, item in items)
    return next((one for one in found if one is not None), None)


def fill_tensor_slots(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value collected by a `TensorCollector`, with given tensors in its slots."""
    if type(tree) is TensorSlot:
        return tensors[tree]
    if isinstance(tree, dict):
        return {key: fill_tensor_slots(item, tensors) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [
            item if type(item) in _PLAIN else fill_tensor_slots(item, tensors) for item in tree
        ]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, OwnPiece):
        return OwnPiece(fill_tensor_slots(tree.local, tensors), tree.spec)
    if isinstance(tree, StateInPieces):
        return replace(tree, state=fill_tensor_slots(tree.state, tensors))
    return tree


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
    if isinstance(state, Mapping):
        return {key: gathered(item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        items = map(gathered, state)
        return list(items) if isinstance(state, list) else tuple(items)
    return state


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
