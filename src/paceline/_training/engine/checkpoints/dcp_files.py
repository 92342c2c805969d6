"""Checkpoints of torch.distributed.checkpoint (DCP), read and written.

A DCP directory has a file ``.metadata``, which is a pickle, and files with tensors as `torch.save`
writes them. Nothing in them is run: the pickle is read with stand-ins for the few classes that
belong there, and any other is refused; tensors are read with `weights_only`.
"""

import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline._training.engine.checkpoints.tensor_reader import (
    ShardedTensor,
    StoredPiece,
    StoredTensor,
    with_items,
)
from paceline.storage._checkpoint_errors import CheckpointCorruptError

METADATA_NAME = ".metadata"
# Classes allowed in the pickle, by module.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _StandIn:
    """Stand-in for an object of the pickle, holding its constructor arguments or state."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self._arguments = state

    def argument(self, index: int) -> Any:
        return self._arguments[index]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of ``.metadata``; loads no class and calls no function of the pickle."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which is not allowed there"
            )
        return self._stand_ins.setdefault((module, name), type(name, (_StandIn,), {}))


def _enum_member(enum: Any, name: str) -> _StandIn:
    """Replace `getattr` in pickles: Python 3.11.0 to 3.11.3 pickles enum members by `getattr`."""
    if not (isinstance(enum, type) and issubclass(enum, _StandIn)):
        raise pickle.UnpicklingError("it calls builtins.getattr, which is not allowed there")
    return enum(name)


class DcpFiles:
    """The files of a DCP directory.

    Args:
        directory: The directory.

    Raises:
        CheckpointCorruptError: ``.metadata`` cannot be read, or holds what does not belong there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The pieces of the tensor that was read last: it is read in parts.
        self._loaded: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._pieces: dict[str, list[StoredPiece]] = {}
        self._places: dict[str, tuple[str, Sequence[int], Any]] = {}
        self._other_places: dict[str, Any] = {}
        try:
            with (directory / METADATA_NAME).open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            self._described = dict(metadata.state_dict_metadata)
            self._tensors = {
                name: ShardedTensor(name, tuple(entry.size), entry.properties.argument(0))
                for name, entry in self._described.items()
                if hasattr(entry, "size")
            }
            for index, place in metadata.storage_data.items():
                if index.fqn in self._tensors:
                    self._add_piece(index.fqn, tuple(index.offset), place)
                else:
                    self._other_places[index.fqn] = place
        except Exception as error:  # a pickle can fail in any way
            raise CheckpointCorruptError(
                f"{METADATA_NAME} in {str(directory)!r} must describe a checkpoint of"
                f" torch.distributed.checkpoint, but cannot be read ({type(error).__name__}:"
                f" {error}). Hint: the checkpoint is damaged, or of an unknown version of torch."
            ) from error

    def _add_piece(self, name: str, offset: tuple[int, ...], place: Any) -> None:
        chunks = self._described[name].chunks
        sizes = next(tuple(each.sizes) for each in chunks if tuple(each.offsets) == offset)
        key = f"{name} at {list(offset)}"
        self._places[key] = (name, sizes, place)
        self._pieces.setdefault(name, []).append(StoredPiece(self, key, offset))

    @property
    def names(self) -> Sequence[str]:
        """The names of all stored values, tensors or not."""
        return [*self._described]

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors."""
        return {name: StoredTensor(tensor, self) for name, tensor in self._tensors.items()}

    def pieces(self, name: str) -> Sequence[StoredPiece]:
        """Return the pieces of a tensor."""
        return self._pieces.get(name, ())

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a piece."""
        return self._places[name][1]

    def read(self, name: str, where: Sequence[slice]) -> torch.Tensor:
        """Return a part of a piece, on the CPU.

        Raises:
            CheckpointCorruptError: Its file is missing or damaged.
        """
        tensor = self._places[name][0]
        if self._loaded[0] != tensor:
            self._loaded = (tensor, {})
        pieces = self._loaded[1]
        if name not in pieces:
            pieces[name] = self._load(name)
        return pieces[name][tuple(where)]

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each stored value with its file and name: a piece of a tensor, or bytes.

        Raises:
            CheckpointCorruptError: A file is missing or damaged.
        """
        for key, (_, _, place) in self._places.items():
            yield str(place.relative_path), key, self._load(key)
        for name, place in self._other_places.items():
            try:
                yield str(place.relative_path), name, self._read_bytes(place)
            except (OSError, ValueError) as error:
                raise CheckpointCorruptError(
                    f"{name!r} in {str(self._directory)!r} must be readable, but: {error}. Hint:"
                    " copy the checkpoint again, or use another one."
                ) from error

    def _read_bytes(self, place: Any) -> bytes:
        path = str(place.relative_path)
        # Plain names only: a crafted ``.metadata`` must not lead outside of the directory.
        if not re.fullmatch(r"[\w.-]+", path):
            raise ValueError("the name of the file must be plain")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"it is stored by {place.transform_descriptors}, not plainly")
        with (self._directory / path).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    def _load(self, name: str) -> torch.Tensor:
        tensor, sizes, place = self._places[name]
        path = str(place.relative_path)
        try:
            data = io.BytesIO(self._read_bytes(place))
            value = torch.load(data, map_location="cpu", weights_only=True)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(sizes):
                raise ValueError(f"it must be a tensor of shape {list(sizes)}")
        except Exception as error:  # a damaged file can fail in any way
            raise CheckpointCorruptError(
                f"File {path!r} in {str(self._directory)!r} must hold a piece of {tensor!r}, but it"
                f" cannot be read ({type(error).__name__}: {error}). Hint: copy the checkpoint"
                " again, or use another one."
            ) from error
        return value.to(self._tensors[tensor].dtype)


def write_dcp(directory: Path, state: Mapping[str, Any]) -> None:
    """Write a state as a new DCP directory, with a single tensor in memory at a time.

    Args:
        directory: The directory.
        state: A nested dictionary, with a `StoredTensor` in the place of each tensor.
    """
    # Late import: the module takes a second to import.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    stored: dict[int, StoredTensor] = {}

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            tensor = stored.get(id(found))
            return found if tensor is None else tensor.whole()

    placeholders = _placeholders(state, stored)
    # The library keeps all tensors of a file in memory until the file is written.
    writer = FileSystemWriter(directory, single_file_per_rank=False, thread_count=1)
    with warnings.catch_warnings():
        # Warning expected here: a single process writes the checkpoint.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(placeholders, storage_writer=writer, planner=Planner(), no_dist=True)


def _placeholders(state: Any, stored: dict[int, StoredTensor]) -> Any:
    """Return a state of meta tensors, and record the stored tensor behind each placeholder."""
    if isinstance(state, StoredTensor):
        placeholder = torch.empty(state.shape, dtype=state.dtype, device="meta")
        stored[id(placeholder)] = state
        return placeholder
    return with_items(state, partial(_placeholders, stored=stored))
