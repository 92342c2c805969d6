"""Nested state as tensors and a tree, as JSON and safetensors, with versions."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline._base.journal_records import decode_value, encode_float
from paceline._training.engine.checkpoints.tensor_reader import (
    LazyTensor,
    ShardedTensor,
    ShardFiles,
    StoredTensor,
    TensorFile,
    WholeTensors,
    tensor_file_pieces,
    whole,
    with_items,
    write_whole_tensors,
)
from paceline._training.engine.tensor_copies_and_digests import is_sharded
from paceline.storage import _checkpoint_errors
from paceline.storage._checkpoint_errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    check_state_version,
)
from paceline.storage._uploads import FileSender

_TENSOR, _ARRAY, _TUPLE, _DICT = "$tensor", "$array", "$tuple", "$items"
_SHARDED = "$sharded"
# Types without a name in safetensors: large and small complex numbers, quantized numbers, bits.
_ODD_DTYPES = frozenset(("torch.complex128", "torch.complex32"))
_ODD_BEGINNINGS = ("torch.qint", "torch.quint", "torch.bits")
_LEAST_SENT_BYTES = 8 * 1024 * 1024
# Python reads no longer integers from JSON, and its stack limits how deep a reader may go.
MAX_DIGITS = 4300
MAX_DEPTH = 200
_CONTAINERS = (dict, list, tuple)
_TOO_LARGE_INT = 10**MAX_DIGITS

_ARRAY_DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
)


class StateFormatError(TypeError):
    """Error for a state with a value unknown to the safe format."""


def save_state(state: Any, directory: Path, name: str, send: FileSender | None = None) -> None:
    """Write ``<name>.json`` and, if there are tensors, ``<name>.safetensors``.

    Args:
        state: The state.
        directory: Where the files are to be.
        name: The name of the part.
        send: Stores the tensors from memory, so that they are not in the directory; see
            `CheckpointStorage.file_sender`.

    Raises:
        StateFormatError: A value is no tensor, array, number, string, boolean, None, list, tuple
            or dictionary of these, or is nested too deep; the message names its path.
    """
    _check_depth(state)
    tensors: dict[str, torch.Tensor] = {}
    tree = _state_to_json(state, "", tensors, {})
    (directory / f"{name}.json").write_text(json.dumps(tree, allow_nan=False))
    if not tensors:
        return
    file_name = f"{name}.safetensors"
    pieces = None if send is None else tensor_file_pieces(tensors)
    # Small files go to the store several at once, from the directory.
    if send is None or pieces is None or pieces[0] < _LEAST_SENT_BYTES:
        write_whole_tensors(tensors, directory / file_name)
    else:
        send(file_name, *pieces)


def is_storable(state: Any) -> bool:
    """Tell whether `save_state` would take a state."""
    try:
        _check_depth(state)
        _state_to_json(state, "", {}, {})
    except StateFormatError:
        return False
    return True


def load_state(directory: Path, name: str, *, lazily: bool = False) -> Any:
    """Return a state saved by `save_state`, with tensors on the CPU.

    Those whose pieces the ranks have stored are read later, see `StoredTensor`.

    Args:
        directory: The directory.
        name: The name of the part.
        lazily: Whether all tensors are read later.
    """
    text = (directory / f"{name}.json").read_text()
    path = directory / f"{name}.safetensors"
    tensors: Mapping[str, Any] = {}
    if path.exists():
        tensors = WholeTensors(TensorFile(path)).tensors() if lazily else load_file(path)
    shards = ShardFiles(directory) if f'"{_SHARDED}"' in text else None
    return _state_from_json(json.loads(text), tensors, shards)


def is_too_large(value: object) -> bool:
    """Tell whether a value is an integer of more digits than JSON is read with."""
    return isinstance(value, int) and abs(value) >= _TOO_LARGE_INT


def kind_of(value: object) -> str:
    """Return a text with article describing the type of a value unfit for storing."""
    if is_too_large(value):
        return f"an integer of more than {MAX_DIGITS} digits"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _check_depth(state: Any) -> None:
    """Refuse a state nested too deep or containing itself.

    Raises:
        StateFormatError: It cannot.
    """
    level = [state] if isinstance(state, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        # Containers keyed by `id`: a container holding itself twice would double at each level.
        below = {
            id(item): item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, _CONTAINERS)
        }
        level = [*below.values()]
    if level:
        raise StateFormatError(
            f"A state must be nested {MAX_DEPTH} deep at most, but"
            f" {_deepest_path(state)[:40]!r}... is deeper, or holds itself. Hint: return a flat"
            " list of its parts."
        )


def _deepest_path(state: Any) -> str:
    """Return the path of a container `MAX_DEPTH` levels deep in a state."""
    level = {id(state): ("", state)}
    for _ in range(MAX_DEPTH):
        level = {
            id(item): (_at(path, key), item)
            for path, value in level.values()
            for key, item in (value.items() if isinstance(value, dict) else enumerate(value))
            if isinstance(item, _CONTAINERS)
        }
    return next(path for path, _ in level.values())


def _state_to_json(
    value: Any, path: str, tensors: dict[str, torch.Tensor], known: dict[tuple[Any, ...], str]
) -> Any:
    if isinstance(value, torch.Tensor):
        return {_TENSOR: _pack_tensor(value, path or "value", tensors, known)}
    if isinstance(value, ShardedTensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {_SHARDED: value.name, "shape": list(value.shape), "dtype": kind}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not is_too_large(value):
        return value
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, tuple):
        return {
            _TUPLE: [_state_to_json(v, _at(path, i), tensors, known) for i, v in enumerate(value)]
        }
    if isinstance(value, list):
        return [_state_to_json(v, _at(path, i), tensors, known) for i, v in enumerate(value)]
    if isinstance(value, dict):
        return _pack_dict(value, path, tensors, known)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _state_to_json(value.item(), path, tensors, known)
    if type(value).__module__ == "numpy" and str(getattr(value, "dtype", "")) in _ARRAY_DTYPES:
        return {_ARRAY: _pack_tensor(torch.from_numpy(value), path or "value", tensors, known)}
    raise StateFormatError(
        f"A state must consist of tensors, numbers, strings, booleans, None, lists, tuples and"
        f" dictionaries, but {path or 'the top'!r} is {kind_of(value)}. Hint: return"
        " plain values from `state_dict()`."
    )


def _pack_dict(
    value: dict[Any, Any],
    path: str,
    tensors: dict[str, torch.Tensor],
    known: dict[tuple[Any, ...], str],
) -> dict[str, Any]:
    if all(isinstance(key, str) and key[:1] != "$" for key in value):
        return {
            key: _state_to_json(item, _at(path, key), tensors, known) for key, item in value.items()
        }
    items = []
    for key, item in value.items():
        if is_too_large(key):
            raise StateFormatError(
                f"Keys of a state must be strings or integers, but {path or 'the top'!r} has"
                f" {kind_of(key)}. Hint: use a string."
            )
        if not isinstance(key, (str, int, bool)) and key is not None:
            raise StateFormatError(
                f"Keys of a state must be strings or integers, but {path or 'the top'!r} has"
                f" {key!r}. Hint: use a string such as {str(key)!r}."
            )
        items.append([key, _state_to_json(item, _at(path, key), tensors, known)])
    return {_DICT: items}


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor unfit for storing.

    Raises:
        StateFormatError: It cannot.
    """
    is_dense, kind = tensor.layout is torch.strided, str(tensor.dtype)
    is_odd = kind in _ODD_DTYPES or kind.startswith(_ODD_BEGINNINGS)
    if is_dense and not tensor.is_meta and not is_odd:
        return
    found = f"of the type {kind}" if is_dense else f"of the layout {tensor.layout}"
    found = "on the meta device" if tensor.is_meta else found
    raise StateFormatError(
        "A tensor of a state must be dense, have memory, and be of a type of safetensors, but"
        f" {path!r} is {found}. Hint: convert it in `state_dict()`, or keep it out of the state, a"
        " buffer by `persistent=False`."
    )


def _pack_tensor(
    tensor: torch.Tensor,
    path: str,
    tensors: dict[str, torch.Tensor],
    known: dict[tuple[Any, ...], str],
) -> str:
    check_tensor(tensor, path)
    tensor = tensor.detach()
    # Tensors that share their memory are stored once.
    identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    if tensor.numel() and identity in known:
        return known[identity]
    # Keys with dots can make two paths look alike. The format has a use of its own for one name.
    while path in tensors or path == "__metadata__":
        path += "'"
    known[identity] = path
    tensors[path] = tensor.cpu().contiguous()
    return path


def _state_from_json(tree: Any, tensors: Mapping[str, Any], shards: ShardFiles | None) -> Any:
    if isinstance(tree, list):
        return [_state_from_json(item, tensors, shards) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _SHARDED in tree and shards is not None:
        dtype = getattr(torch, tree["dtype"])
        return StoredTensor(ShardedTensor(tree[_SHARDED], tuple(tree["shape"]), dtype), shards)
    if _ARRAY in tree:
        return whole(tensors[tree[_ARRAY]]).numpy()
    if _TUPLE in tree:
        return tuple(_state_from_json(item, tensors, shards) for item in tree[_TUPLE])
    if _DICT in tree:
        return {key: _state_from_json(item, tensors, shards) for key, item in tree[_DICT]}
    if any(key[:1] == "$" for key in tree):
        return decode_value(tree)
    return {key: _state_from_json(item, tensors, shards) for key, item in tree.items()}


def _at(path: str, key: object) -> str:
    text = kind_of(key) if is_too_large(key) else key
    return f"{path}.{text}" if path else str(text)


# Functions upgrading a named part from a version to the next version, in place.
_STEPS: dict[int, Callable[[str, dict[str, Any]], None]] = {}


def read_training(path: Path) -> dict[str, Any]:
    """Return the part "training" of a checkpoint, upgraded to the current version.

    Its "version" stays the files' own, as it decides how the other parts are read.

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or of an unknown version.
        CheckpointCorruptError: The file cannot be read.
    """
    if not path.exists():
        raise CheckpointMismatchError(
            f"The checkpoint must be in {str(path)!r}, but there is nothing. Hint: see that the"
            " path is right, or take a newer checkpoint if its run has deleted this one."
        )
    if not (path / "training.json").is_file():
        hint = "checkpoints that `core` stored are restored by the code that stored them."
        if (path / "state.json").is_file():
            hint = "pytorch.load_weights reads the models of a train function's checkpoint."
        raise CheckpointMismatchError(
            f"The checkpoint must hold a trainer's state, but {str(path)!r} has no training.json."
            f" Hint: {hint}"
        )
    training = read_versioned_files(path, "training")
    version = training["version"]
    check_state_version(
        f"The trainer's state in {str(path)!r}", version, training.get("paceline", "")
    )
    return _upgraded("training", training, version)


def read_versioned_part(
    path: Path, name: str, training: dict[str, Any], *, lazily: bool = False
) -> dict[str, Any]:
    """Return another part of a checkpoint, upgraded to the current version.

    Args:
        path: The checkpoint's directory.
        name: The name of the part.
        training: The part "training".
        lazily: Whether all tensors are read later, see `StoredTensor`.

    Raises:
        CheckpointCorruptError: Its files are missing or cannot be read.
    """
    return _upgraded(name, read_versioned_files(path, name, lazily=lazily), training["version"])


def check_number(kind: str, index: int, num_stored: int) -> None:
    """Refuse a model or optimizer index not in the checkpoint.

    Args:
        kind: "model" or "optimizer".
        index: The number.
        num_stored: How many it holds.

    Raises:
        CheckpointMismatchError: It does not.
    """
    if 0 <= index < num_stored:
        return
    allowed = f"from 0 to {num_stored - 1}" if num_stored > 1 else "0"
    raise CheckpointMismatchError(
        f"The checkpoint holds no {kind}."
        if num_stored == 0
        else f"`{kind}` must be {allowed}, as the checkpoint holds {num_stored} of them, but got"
        f" {index}."
    )


def read_weights(
    path: Path, training: dict[str, Any], index: int, *, lazily: bool = False
) -> dict[str, Any]:
    """Return the state of a model, with tensors either in memory or read on first use.

    Raises:
        CheckpointMismatchError: There is no such model.
        CheckpointCorruptError: Its files are missing or cannot be read.
    """
    check_number("model", index, training["num_models"])
    weights: dict[str, Any] = read_versioned_part(path, f"model_{index}", training, lazily=lazily)
    return weights if lazily else {name: whole(value) for name, value in weights.items()}


def read_versioned_files(path: Path, name: str, *, lazily: bool = False) -> dict[str, Any]:
    """Return a part of a checkpoint as written by `save_state`.

    Args:
        path: The directory.
        name: The name of the files.
        lazily: Whether all tensors are read later, see `StoredTensor`.

    Raises:
        CheckpointCorruptError: The files are missing or cannot be read.
    """
    try:
        part: dict[str, Any] = load_state(path, name, lazily=lazily)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError, KeyError) as error:
        raise CheckpointCorruptError(
            f"{name}.json and {name}.safetensors in {str(path)!r} must be whole, but cannot be"
            f" read ({type(error).__name__}: {error}). Hint: download the checkpoint again, or use"
            " another one."
        ) from error
    return part


def _upgraded(name: str, part: dict[str, Any], version: int) -> dict[str, Any]:
    for earlier in range(version, _checkpoint_errors.STATE_VERSION):
        _STEPS[earlier](name, part)
    return part


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


@lru_cache(maxsize=4096)
def _is_copy(mesh: Any, placements: Any, first_rank: int) -> bool:
    """Tell whether another rank stores the same piece."""
    return first_rank not in mesh.mesh or any(
        placement.is_replicate() and mesh.get_local_rank(dim)
        for dim, placement in enumerate(placements)
    )


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
    if isinstance(tree, OwnPiece):
        return OwnPiece(fill_tensor_slots(tree.local, tensors), tree.spec)
    if isinstance(tree, StateInPieces):
        return replace(tree, state=fill_tensor_slots(tree.state, tensors))
    if type(tree) in (list, tuple) and _PLAIN.issuperset(map(type, tree)):
        return tree  # Fast path for plain numbers, as in `TensorCollector`.
    return with_items(tree, partial(fill_tensor_slots, tensors=tensors))
