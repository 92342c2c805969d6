"""Weights and optimizer state from checkpoints of several kinds."""

import inspect
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError

from paceline._training.engine.checkpoints.capture_and_restore import (
    divided_optimizer_states,
    load_models,
    state_shape,
)
from paceline._training.engine.checkpoints.dcp_files import METADATA_NAME, DcpFiles
from paceline._training.engine.checkpoints.state_format import (
    check_number,
    read_training,
    read_versioned_files,
    read_versioned_part,
    read_weights,
)
from paceline._training.engine.checkpoints.tensor_reader import (
    StoredTensor,
    TensorFile,
    WholeTensors,
)
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.tensor_copies_and_digests import is_sharded, parameters_of
from paceline.storage._checkpoint_errors import CheckpointCorruptError, CheckpointMismatchError
from paceline.storage._storage_from_url import directory_of_checkpoint

_NUM_SHOWN = 5
# Ways to compute a step, which do not change the state it keeps.
_WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")

# The states of a parameter, by the optimizer's names.
Slots: TypeAlias = Mapping[str, Any]


def check_optimizer_slots(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    found: Mapping[str, Slots],
    place: str,
) -> None:
    """Check stored states against the slots an optimizer keeps, before loading any of them.

    Args:
        optimizer: The optimizer.
        names: The names of each of its parameters; tied ones have several.
        found: The stored states by the names of parameters.
        place: Where they are, for the error.

    Raises:
        CheckpointMismatchError: They are not; the message says which.
    """
    kind = type(optimizer).__name__
    wanted = wanted_slots(optimizer)
    missing = [
        some[0]
        for some, parameter, slots in zip(names, parameters_of(optimizer), wanted, strict=True)
        if (parameter.requires_grad and slots != {} and found.keys().isdisjoint(some))
        or not all(_has_tensors(found.get(name, {})) for name in some)
    ]
    if missing:
        hint = (
            "load it into the model that it was stored with"
            if found
            else "`key` is the name under which the result of `get_optimizer_state_dict` was saved"
        )
        raise CheckpointMismatchError(
            f"{place} must hold tensors for each parameter of {kind}, but not for"
            f" {missing[:_NUM_SHOWN]}. Hint: {hint}."
        )
    if foreign := sorted(found.keys() - {name for some in names for name in some}):
        raise CheckpointMismatchError(
            f"{place} must hold the state of the parameters of {kind} alone, but it holds that of"
            f" {foreign[:_NUM_SHOWN]} too. Hint: load it into the model that it was stored with."
        )
    for some, slots in zip(names, wanted, strict=True):
        for name in some:
            if name in found and slots is not None:
                _check_slots(kind, name, slots, found[name], place)


def _has_tensors(slots: Slots) -> bool:
    return all(state_shape(value) is not None for value in slots.values())


def _check_slots(kind: str, parameter: str, wanted: Slots, found: Slots, place: str) -> None:
    text = f"{place} must hold the state of {kind}"
    hint = "Hint: build model and optimizer as the code did that stored it, or begin without it."
    if wanted.keys() != found.keys():
        raise CheckpointMismatchError(
            f"{text}, which keeps {sorted(wanted) or 'nothing'} of each parameter, but for"
            f" {parameter!r} it holds {sorted(found)}: those of another optimizer or of other"
            f" options. {hint}"
        )
    for name, value in wanted.items():
        here, there = state_shape(value), state_shape(found[name])
        if here is not None and there is not None and here != there:
            raise CheckpointMismatchError(
                f"{text}, but {name!r} of {parameter!r} is {list(there)} there and {list(here)}"
                f" here. {hint}"
            )


def wanted_slots(optimizer: torch.optim.Optimizer) -> list[Slots | None]:
    """Return the state slots an optimizer keeps per parameter; None if unknown.

    Optimizers of torch show them in a step of a copy without memory, as most of them keep nothing
    before a first step. Where the step needs values, the copy shows the names, but no shapes.
    """
    # Undecorated step: hooks and profiling must not run for the copy.
    step = inspect.unwrap(type(optimizer).step)
    if step.__module__.startswith("torch.optim."):
        # Some need more than gradients, such as a closure.
        with suppress(Exception):
            return [*_slots_after_step(_twin(optimizer, _without_memory), step)]
        with suppress(Exception):
            slots = _slots_after_step(_twin(optimizer, _of_one_value), step)
            return [dict.fromkeys(each) for each in slots]
    return [optimizer.state.get(each) or None for each in parameters_of(optimizer)]


def _slots_after_step(
    twin: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]
) -> list[Slots]:
    with torch.no_grad():
        step(twin)
    return [dict(twin.state.get(each, {})) for each in parameters_of(twin)]


def _twin(
    optimizer: torch.optim.Optimizer, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with stand-in parameters, their gradients, and no state."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[])
    for group in optimizer.param_groups:
        plain = {name: False for name in _WAYS_TO_COMPUTE if name in group}
        parameters = [stand_in(each) for each in group["params"]]
        for each in parameters:
            each.grad = torch.zeros_like(each)
        twin.param_groups.append({**group, **plain, "params": parameters})
    return twin


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _of_one_value(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros([1] * parameter.ndim, dtype=parameter.dtype)


INDEX_NAME = "model.safetensors.index.json"
_FILE_NAME = "model.safetensors"
_PICKLED = object()
"""Stands for a value that is no tensor, in files where such values are pickles of anything."""


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    stored_model: int = 0,
    key: str = "model",
) -> None:
    """Load initial weights into a model, also a wrapped or sharded model.

    Each rank of a sharded model reads its own pieces; from a URL, each rank first downloads the
    whole checkpoint. No code of the files is run.

    Args:
        model: The model, before or after `wrap_model`; all names and shapes must fit.
        path: The directory of a checkpoint, of a trainer or a train function; a directory of
            torch.distributed.checkpoint (DCP); a safetensors file; or a directory with
            ``model.safetensors`` or files with an index, as Transformers writes them; or the URL of
            a checkpoint, such as ``s3://bucket/prefix/UUID``.
        stored_model: The number of the model in a checkpoint, in the order in which they were
            wrapped.
        key: For a directory of DCP: the prefix of the names of the weights, followed by a dot;
            an empty text if they begin with nothing. For a checkpoint of a train function: the
            name that `save_checkpoint` was given.

    Raises:
        CheckpointMismatchError: There are no weights there, or they are of another model; the
            message says which.
        CheckpointCorruptError: A file or a piece is missing or cannot be read.
        CheckpointNotFoundError: The checkpoint was deleted meanwhile.
    """
    plain = plain_model(model)
    with directory_of_checkpoint(path) as directory:
        state, base = stored_weights(directory, model=stored_model, key=key)
        state = {name: value for name, value in state.items() if value is not _PICKLED}
        _add_tied(plain, state)
        load_models([plain], [state], [base])


def stored_weights(
    path: Path, *, model: int, key: str
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return weights for later reading, and the facts of a base left out of the checkpoint.

    Args:
        path: As for `load_weights`.
        model: As `stored_model` there.
        key: As there.

    Raises:
        CheckpointMismatchError: There are no weights there, or not that model.
        CheckpointCorruptError: A file is missing or cannot be read.
    """
    if (path / METADATA_NAME).is_file():
        return _weights_in_dcp(DcpFiles(path), path, key), None
    if path.is_file():
        return _weights_in_files(path.parent, [path.name]), None
    if (path / INDEX_NAME).is_file():
        return _weights_in_files(path, _indexed_weights(path)), None
    if (path / _FILE_NAME).is_file():
        return _weights_in_files(path, [_FILE_NAME]), None
    if (path / "state.json").is_file() and not (path / "training.json").is_file():
        return _weights_in_train_function(path, key), None
    training = read_training(path)
    if key != "model":
        raise CheckpointMismatchError(
            f"`key` must be left out for the checkpoint of a trainer, such as {str(path)!r}, but"
            f" got {key!r}. Hint: the number of the model chooses among several."
        )
    bases = training.get("bases")
    state = read_weights(path, training, model, lazily=True)
    return state, bases[model] if bases else None


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str = "optimizer",
) -> None:
    """Load the state of an optimizer, e.g. its moments, from a DCP directory.

    Its parameters are found by their names in the model. Options, such as the learning rate, stay
    as they are. Each rank of a sharded model reads its own pieces. No code of the files is run.

    Args:
        optimizer: The optimizer, before or after `wrap_optimizer`.
        model: The model whose parameters it steps, also a wrapped or sharded one.
        path: A directory with what `get_optimizer_state_dict` of torch has returned, such as
            `export_dcp` writes.
        key: The prefix of the names of the state, followed by a dot.

    Raises:
        CheckpointMismatchError: There is no state of this optimizer; the message says why.
        CheckpointCorruptError: A file or a piece is missing or cannot be read.
    """
    files = DcpFiles(Path(path))
    place = f"{str(path)!r} under {key!r}"
    if not any(name.startswith(f"{key}.") for name in files.names):
        begin = ", ".join(sorted({name.partition(".")[0] for name in files.names}))
        raise CheckpointMismatchError(
            f"{place} must hold the state of an optimizer, but nothing is there. Hint: `key` is the"
            " name under which the result of `get_optimizer_state_dict` was saved; the names there"
            f" begin with {begin or 'nothing'}."
        )
    found = _slots_in_dcp(files, f"{key}.state.")
    names = _names_of_own(optimizer, plain_model(model))
    check_optimizer_slots(optimizer, names, found, place)
    states = {
        number: next(found[name] for name in some if name in found)
        for number, some in enumerate(names)
        if not found.keys().isdisjoint(some)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(
        {"state": divided_optimizer_states(states, optimizer), "param_groups": groups}
    )


def _names_of_own(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[list[str]]:
    """Return the names in the model of each parameter of an optimizer; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    own = [names.get(id(each), []) for each in parameters_of(optimizer)]
    if not all(own):
        raise CheckpointMismatchError(
            f"All parameters of {type(optimizer).__name__} must be the model's, but"
            f" {own.count([])} of {len(own)} are not the model's. Hint: `model` is the one whose"
            " parameters the optimizer was built with."
        )
    return own


def stored_optimizer(path: Path, index: int, *, model: int) -> dict[str, Any]:
    """Return the state of an optimizer in the format of torch's `get_optimizer_state_dict`.

    Its tensors are read later.

    Args:
        path: The directory of a trainer's checkpoint.
        index: The number of the optimizer.
        model: The number of the model whose parameters it has.

    Raises:
        CheckpointMismatchError: There is no such optimizer, or not all parameters have names there.
        CheckpointCorruptError: A file is missing or cannot be read.
    """
    training = read_training(path)
    check_number("optimizer", index, training["num_optimizers"])
    prefix = f"model_{model}."
    places = training["optimizer_parameters"][index]
    if not all(place is not None and place.startswith(prefix) for place in places):
        raise CheckpointMismatchError(
            f"All parameters of optimizer {index} must be known to be those of model {model}, but"
            f" {_whose_parameters(places)}."
        )
    names = [place.removeprefix(prefix) for place in places]
    part = read_versioned_part(path, f"optimizer_{index}", training, lazily=True)
    return {
        "state": {names[n]: state for n, state in part["state"].items() if isinstance(n, int)},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in part["param_groups"]
        ],
    }


def _whose_parameters(places: Sequence[str | None]) -> str:
    """Return an error text naming the models owning an optimizer's parameters, with a hint."""
    if None in places:
        return (
            "some are not. Hint: parameters of no model have no names; build the optimizer from"
            " those of the model"
        )
    models = sorted({int(str(place).partition(".")[0].removeprefix("model_")) for place in places})
    if len(models) == 1:
        return (
            f"they are those of model {models[0]}. Hint: --model {models[0]}, or `model` in Python"
        )
    numbers = ", ".join(map(str, models))
    return f"they are those of models {numbers}. Hint: export the optimizers of one model alone"


def _slots_in_dcp(files: DcpFiles, prefix: str) -> dict[str, dict[str, Any]]:
    """Return the optimizer states by parameter name, each as slot names to values."""
    found: dict[str, dict[str, Any]] = {}
    tensors = files.tensors()
    for name in files.names:
        if name.startswith(prefix):
            parameter, _, slot = name.removeprefix(prefix).rpartition(".")
            found.setdefault(parameter, {})[slot] = tensors.get(name, _PICKLED)
    return found


def _weights_in_dcp(files: DcpFiles, path: Path, key: str) -> dict[str, Any]:
    prefix = f"{key}." if key else ""
    tensors = files.tensors()
    state = {
        name.removeprefix(prefix): tensors.get(name, _PICKLED)
        for name in files.names
        if name.startswith(prefix)
    }
    if all(value is _PICKLED for value in state.values()):
        found = sorted({name.partition(".")[0] for name in files.names})
        raise CheckpointMismatchError(
            f"`key` must be what the names of the weights in {str(path)!r} begin with, but got"
            f" {key!r}. Hint: the names there begin with {', '.join(found) or 'nothing'}."
        )
    return state


def _weights_in_train_function(path: Path, key: str) -> dict[str, Any]:
    """Return the weights saved by a train function under a key."""
    state = read_versioned_files(path, "state", lazily=True)
    weights = state.get(key) if key else state
    if not isinstance(weights, dict) or not any(
        isinstance(value, StoredTensor) for value in weights.values()
    ):
        raise CheckpointMismatchError(
            f"`key` must be the name under which the train function has saved a model, but got"
            f" {key!r}. Hint: the checkpoint holds {', '.join(map(str, state)) or 'nothing'}."
        )
    return weights


def _indexed_weights(path: Path) -> list[str]:
    try:
        places = json.loads((path / INDEX_NAME).read_bytes())["weight_map"]
        names = sorted(set(places.values()))
        # Names without directories: an index must not lead outside of its directory.
        if any(os.path.basename(name) != name for name in names):
            raise ValueError("the files must be beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"{INDEX_NAME} in {str(path)!r} must be an index of weights, but cannot be read"
            f" ({type(error).__name__}: {error}). Hint: download it again."
        ) from error
    return names


def _weights_in_files(directory: Path, names: list[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name in names:
        try:
            state |= WholeTensors(TensorFile(directory / name)).tensors()
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointCorruptError(
                f"{name} in {str(directory)!r} must be a whole safetensors file, but cannot be read"
                f" ({type(error).__name__}: {error}). Hint: download it again."
            ) from error
    return state


def _add_tied(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Add tied weights under all their names, where only a single name is stored."""
    by_memory: dict[object, StoredTensor] = {}
    present = model.state_dict()
    for name, value in present.items():
        if name in state and isinstance(value, torch.Tensor):
            by_memory.setdefault(_tensor_memory(value), state[name])
    for name, value in present.items():
        if name not in state and isinstance(value, torch.Tensor) and value.numel():
            first = by_memory.get(_tensor_memory(value))
            if first is not None:
                state[name] = first


def _tensor_memory(tensor: Any) -> object:
    """Return a key equal for tensors with the same memory and layout."""
    if tensor.is_meta:
        return id(tensor)
    local = tensor.to_local() if is_sharded(tensor) else tensor
    return (local.data_ptr(), local.device, tensor.shape, tensor.stride(), tensor.dtype)
