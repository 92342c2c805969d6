"""The tensors of a nested state, and the state without them."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.engine.state._sharded_tensor_pieces import OwnPiece, StateInPieces, own_piece
from paceline.engine.tensors._sharded_tensors import is_sharded
from paceline.engine.tensors._stored_tensors import LazyTensor

_PLAIN = frozenset((int, float, str, bool, type(None)))


class TensorSlot(int):
    """Placeholder for a tensor in a nested value: its number."""


class TensorCollector:
    """Take the tensors out of a nested value.

    Training stands still for it, so what most of a state consists of is looked at without a call,
    and the pieces of sharded tensors that are divided as before are told by that.

    Args:
        pieces_before: The pieces of the last collector.
        num_first: How many tensors `take_first` wants at least; none by default.
        take_first: Called once with the first tensors, while the others are still to be found.

    Attributes:
        tensors: What was found, in order. Of a sharded tensor it has this rank's piece.
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
                # Such as the numbers of a generator's state.
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


def path_of_slot(tree: Any, number: int, path: str = "") -> str | None:
    """Return where the slot of a tensor is in what a `TensorCollector` has returned."""
    if type(tree) is TensorSlot:
        return path if tree == number else None
    if isinstance(tree, StateInPieces):
        return path_of_slot(tree.state, number, path)
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    found = (path_of_slot(item, number, f"{path}.{key}".lstrip(".")) for key, item in items)
    return next((one for one in found if one is not None), None)


def fill_tensor_slots(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what a `TensorCollector` was given, with other tensors in its slots."""
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
