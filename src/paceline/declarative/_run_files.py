"""The files of a run: weights, and where its newest checkpoint lies."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline._atomic_files import replacing_atomically
from paceline.storage import CheckpointError, CheckpointStorage, storage_from

STATE_FILE = "checkpoint.state"
CHECKPOINTS = "checkpoints"
_FORMAT = "paceline.declarative"
# How a zip archive and a pickle begin.
_PICKLES = (b"PK\x03\x04", b"\x80")
_ENCODERS = ("backbone_model", "encoder")


class SavedRun(NamedTuple):
    """The newest checkpoint of a run.

    Attributes:
        place: Its directory, or its URL in an object store.
        seed: The seed of the run.
        num_shards: Into how many shards a global batch is cut.
        uuids: The checkpoints that are kept, the newest last.
        storage: Where they are.
    """

    place: str
    seed: int
    num_shards: int
    uuids: list[str]
    storage: CheckpointStorage


def write_state(
    save_dir: Path, *, seed: int, num_shards: int, uuids: list[str], storage: CheckpointStorage
) -> None:
    """Write which checkpoints a run keeps and where, as a whole or not at all."""
    facts = {"format": _FORMAT, "seed": seed, "num_shards": num_shards, "checkpoints": uuids}
    if storage.local_root != (save_dir / CHECKPOINTS).absolute():
        # Those below `save_dir` move with it.
        facts["storage"] = storage.url
    with replacing_atomically(save_dir / STATE_FILE) as file:
        file.write_text(json.dumps(facts, indent=2) + "\n")


def read_state(save_dir: str | os.PathLike[str]) -> SavedRun:
    """Return where a run stands.

    Raises:
        FileNotFoundError: The directory has no state.
        ValueError: The state was not written by Paceline.
    """
    path = Path(save_dir) / STATE_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"`checkpoint_dir` must be the `model_save_dir` of an earlier run, but"
            f" {str(save_dir)!r} has no {STATE_FILE}."
        )
    content = path.read_bytes()
    if content.startswith(_PICKLES):
        raise ValueError(
            f"`checkpoint_dir` must hold a {STATE_FILE} that Paceline wrote, but that of"
            f" {str(save_dir)!r} was written by torch.save, as generic_trainer does. Hint:"
            " `pretrained_model_path` with its checkpoint_model.pth begins with the weights."
        )
    try:
        facts = json.loads(content)
        if facts.get("format") != _FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}")
        uuids = [str(uuid) for uuid in facts["checkpoints"]]
        storage = storage_from(facts.get("storage", path.parent / CHECKPOINTS))
        place = f"{storage.url}/{uuids[-1]}"
        return SavedRun(place, int(facts["seed"]), int(facts["num_shards"]), uuids, storage)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"`checkpoint_dir` must hold a {STATE_FILE} that Paceline wrote, but that of"
            f" {str(save_dir)!r} cannot be read ({type(error).__name__}: {error})."
        ) from error


def check_save_dir(path: str) -> None:
    """Refuse a `model_save_dir` that is no directory and cannot be made one.

    Raises:
        ValueError: It is a file, lies below one, or cannot be written to.
    """
    place = Path(path).absolute()
    found = next(each for each in (place, *place.parents) if os.path.lexists(each))
    if not found.is_dir():
        raise ValueError(
            f"`model_save_dir` must be a directory, but got {path!r}, and {str(found)!r} is none."
        )
    if not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(
            f"`model_save_dir` must be a directory that can be written to, but {str(found)!r} is"
            " none."
        )


def checkpoints_in(save_dir: Path) -> list[str]:
    """Return the checkpoints that the state of a run keeps and that are there, the newest last."""
    try:
        state = read_state(save_dir)
    except (FileNotFoundError, ValueError):
        return []
    return [uuid for uuid in state.uuids if _is_there(state.storage, uuid)]


def _is_there(storage: CheckpointStorage, uuid: str) -> bool:
    try:
        return storage.exists(uuid)
    except CheckpointError:
        # A damaged one takes up space as well.
        return True


def save_weights(state: Mapping[str, Any], path: Path) -> None:
    """Write a module's weights, as a whole or not at all; `torch.load` reads them."""
    with replacing_atomically(path) as file:
        torch.save(state, file)


def load_weights(module: nn.Module, path: str | os.PathLike[str], prefix: str = "") -> None:
    """Load weights that `save_weights` or `torch.save` wrote, whatever device they were on.

    Args:
        module: The module.
        path: The file.
        prefix: Where the module lies in the model of the file, if that is a whole one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no weights, or those of another model.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`pretrained_model_path` must be a file of weights, but {str(path)!r} is not there."
        ) from error
    except (
        UnpicklingError,
        IsADirectoryError,
        RuntimeError,
        EOFError,
        LookupError,
        ValueError,
    ) as error:
        raise ValueError(
            f"`pretrained_model_path` must be a file of weights, but {str(path)!r} cannot be read:"
            f" {error}"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(
            f"`pretrained_model_path` must hold weights by name, but {str(path)!r} holds a"
            f" {type(state).__name__}."
        )
    try:
        module.load_state_dict(_below(state, prefix))
    except RuntimeError as error:
        raise ValueError(
            f"`pretrained_model_path` must hold the weights of this model, but {str(path)!r}:"
            f" {error}"
        ) from error


def encoder_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the name and module of a model's encoder.

    Raises:
        ValueError: It has none.
    """
    for name in _ENCODERS:
        found = getattr(model, name, None)
        if isinstance(found, nn.Module):
            return name, found
    raise ValueError(
        f"`load_pretrained_encoder_only` needs a model with a `backbone_model` or an `encoder`, but"
        f" {type(model).__name__} has neither."
    )


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the part of a whole model's weights; those of a part as they are."""
    start = f"{prefix}."
    part = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    return part if prefix and part else dict(state)
