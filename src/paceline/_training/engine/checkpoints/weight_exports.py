"""Export of a checkpoint's weights: safetensors files, DCP directories, ONNX."""

import inspect
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline._base.files import temporary_name
from paceline._training.engine.checkpoints.dcp_files import write_dcp
from paceline._training.engine.checkpoints.tensor_reader import StoredTensor, write_tensor_file
from paceline._training.engine.checkpoints.weights_from_checkpoints import (
    INDEX_NAME,
    stored_optimizer,
    stored_weights,
)
from paceline.storage._checkpoint_errors import CheckpointCorruptError
from paceline.storage._storage_from_url import directory_of_checkpoint

_BLOCK_BYTES = 2**24
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class ExportedWeights(NamedTuple):
    """Result of `export_weights`: files, values left out, tied names and base.

    Attributes:
        files: The files, in the order of the weights.
        left_out: The names of values that are no tensors.
        tied: For each weight that shares memory with one before it, the name of that one.
        base: For a model that was stored without its frozen base, the `name` of the base and its
            `parameters`; else None.
    """

    files: tuple[Path, ...]
    left_out: tuple[str, ...]
    tied: Mapping[str, str]
    base: Mapping[str, Any] | None


def export_weights(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: int = 0,
    max_shard_size: int | str | None = None,
    repeat_tied: bool = False,
    key: str = "model",
) -> ExportedWeights:
    """Write the weights of a model of a checkpoint to safetensors files, tied weights once.

    It needs memory for a small part of a tensor, however large the model is. The names of tied
    weights that are left out are in the metadata of the file, as `safetensors.torch.load_model`
    reads them.

    Args:
        checkpoint: The checkpoint's directory or URL, or other weights, see `load_weights`.
        output: The new file; with `max_shard_size` a directory, which may hold other files.
        model: The number of the model in the order in which they were wrapped.
        max_shard_size: Write several files of this size at most, and an index, as Transformers
            reads them: bytes, or a text such as "5GB" or "500MiB". A larger tensor has a file of
            its own.
        repeat_tied: Whether to write tied weights under each of their names.
        key: As for `load_weights`.

    Raises:
        CheckpointMismatchError: The directory holds no weights, or no such model.
        CheckpointCorruptError: A file or a piece is missing or cannot be read.
        CheckpointNotFoundError: There is none at the URL, or it was deleted meanwhile.
        FileExistsError: There are such files already.
        ValueError: `max_shard_size` is no size, or safetensors does not have the type of a tensor.
    """
    target = Path(output)
    max_bytes = None if max_shard_size is None else _bytes_of(max_shard_size)
    with directory_of_checkpoint(checkpoint) as source:
        state, base = stored_weights(source, model=model, key=key)
        weights = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
        tied = {} if repeat_tied else _tied_weights(weights)
        kept = {name: value for name, value in weights.items() if name not in tied}
        files = {target: [*kept]} if max_bytes is None else _in_shards(kept, target, max_bytes)
        with _written_together() as new_file:
            for path, names in files.items():
                _write_exported(new_file(path), {name: kept[name] for name in names}, tied)
            if len(files) > 1:
                new_file(target / INDEX_NAME).write_text(_index(files, kept))
    return ExportedWeights(tuple(files), _no_tensors(state), tied, base)


def export_dcp(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: int = 0,
    optimizer: int | None = None,
    key: str = "model",
) -> ExportedWeights:
    """Write the weights of a model to a new directory of torch.distributed.checkpoint (DCP).

    `dcp.load({"model": model.state_dict()}, checkpoint_id=output)` reads it, with any number of
    ranks. One tensor is in memory at a time. Tied weights are written under each of their names.

    Args:
        checkpoint: The checkpoint's directory or URL, or other weights, see `load_weights`.
        output: The new directory.
        model: The number of the model in the order in which they were wrapped.
        optimizer: The number of an optimizer of the model, in a trainer's checkpoint. Its state is
            written as "optimizer", as `get_optimizer_state_dict` of torch names it; none by
            default.
        key: As for `load_weights`.

    Raises:
        CheckpointMismatchError: The directory holds no weights, no such model or optimizer, or the
            optimizer has parameters that are not the model's.
        CheckpointCorruptError: A file or a piece is missing or cannot be read.
        CheckpointNotFoundError: There is none at the URL, or it was deleted meanwhile.
        FileExistsError: The directory is there already.
    """
    target = Path(output)
    with directory_of_checkpoint(checkpoint) as source:
        state, base = stored_weights(source, model=model, key=key)
        weights = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
        states: dict[str, Any] = {"model": weights}
        if optimizer is not None:
            states["optimizer"] = stored_optimizer(source, optimizer, model=model)
        try:
            with _written_together() as new_file:
                write_dcp(new_file(target), states)
        except Exception as error:
            # The library wraps errors of all kinds.
            cause = error.__cause__
            if isinstance(cause, CheckpointCorruptError):
                raise cause from None
            raise
    return ExportedWeights((target,), _no_tensors(state), {}, base)


def _no_tensors(state: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in state.items() if not isinstance(value, StoredTensor))


def _bytes_of(size: int | str) -> int:
    found = re.fullmatch(r"(\d+)\s*(\w*)", str(size).strip())
    if found is None or found[2].upper() not in _UNITS or int(found[1]) < 1:
        raise ValueError(
            "`max_shard_size` must be a number of bytes or a text with a unit, such as '5GB' or"
            f" '500MiB', but got {size!r}."
        )
    return int(found[1]) * _UNITS[found[2].upper()]


def _tied_weights(weights: Mapping[str, StoredTensor]) -> dict[str, str]:
    first: dict[object, str] = {}
    tied = {}
    for name, value in weights.items():
        known = first.setdefault(value.identity, name)
        if known != name:
            tied[name] = known
    return tied


def _in_shards(
    weights: Mapping[str, StoredTensor], directory: Path, max_bytes: int
) -> dict[Path, list[str]]:
    """Return the files of a directory with the names of their tensors, as Transformers has them."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, value in weights.items():
        if shards[-1] and size + value.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += value.num_bytes
    number = len(shards)
    if number == 1:
        return {directory / "model.safetensors": shards[0]}
    return {
        directory / f"model-{index:05}-of-{number:05}.safetensors": names
        for index, names in enumerate(shards, 1)
    }


def _index(files: Mapping[Path, Sequence[str]], weights: Mapping[str, StoredTensor]) -> str:
    places = {name: path.name for path, names in files.items() for name in names}
    size = sum(value.num_bytes for value in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2) + "\n"


def _write_exported(
    path: Path, weights: Mapping[str, StoredTensor], tied: Mapping[str, str]
) -> None:
    others = {name: first for name, first in tied.items() if first in weights}
    tensors = {
        name: (value.dtype, value.shape, value.blocks(_BLOCK_BYTES))
        for name, value in weights.items()
    }
    write_tensor_file(path, tensors, {**others, "format": "pt"})


@contextmanager
def _written_together() -> Iterator[Callable[[Path], Path]]:
    """Yield a function naming a temporary file for each new file; rename all files at the end.

    Raises:
        FileExistsError: One is there already.
    """
    partials: dict[Path, Path] = {}

    def new_file(path: Path) -> Path:
        if path.exists():
            raise FileExistsError(
                f"An export must not replace files, but {str(path)!r} is there already."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partials[path] = path.with_name(temporary_name(path.name))
        return partials[path]

    try:
        yield new_file
        for path, partial in partials.items():
            partial.rename(path)
    finally:
        for partial in partials.values():
            _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def require_onnx() -> None:
    """Require the packages needed for the ONNX export.

    Raises:
        ModuleNotFoundError: One is not installed.
    """
    for name in ("onnx", "onnxscript"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"`save_onnx` needs {name}, but it is not installed. Hint: pip install"
                " 'paceline[onnx]'"
            )


def export_onnx(
    model: nn.Module, inputs: Sequence[Any], path: Path, names: Sequence[str] | None = None
) -> None:
    """Write a model, in the mode for inference.

    Args:
        model: The model.
        inputs: A batch of inputs, for the shapes and types. The number of samples is left open
            unless the model depends on it.
        path: The file.
        names: The names of the model's outputs, in order; torch's by default. Outputs returned by
            name keeps that.
    """
    # Loading it takes long.
    from torch.export import Dim

    was_training = model.training
    model.eval()
    with torch.no_grad():
        returned = model(*inputs)
    output_names = list(returned) if isinstance(returned, Mapping) else names
    # A name stands for one tensor of the graph: weights keep theirs, inputs give way.
    if model.state_dict().keys() & set(output_names or ()):
        output_names = None
    parameters = [*inspect.signature(model.forward).parameters][: len(inputs)]
    taken = set(parameters) & set(output_names or ())
    input_names = [f"{name}_input" if name in taken else name for name in parameters]
    open_axes = [{0: Dim.AUTO} if isinstance(item, torch.Tensor) else None for item in inputs]
    try:
        with warnings.catch_warnings():
            # torch warns about calls that it makes itself.
            warnings.simplefilter("ignore", FutureWarning)
            torch.onnx.export(
                model,
                tuple(inputs),
                path,
                input_names=input_names if taken else None,
                output_names=output_names,
                dynamo=True,
                dynamic_shapes=tuple(open_axes),
                external_data=False,
                verbose=False,
            )
    finally:
        model.train(was_training)
