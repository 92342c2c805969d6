"""The files of a trainer's checkpoint, read and brought up to the present version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from paceline.engine.formats._json_and_safetensors import load_state
from paceline.engine.tensors._stored_tensors import whole
from paceline.storage import CheckpointCorruptError, CheckpointMismatchError

STATE_VERSION = 3
"""The version of what a checkpoint holds.

Readers leave out keys that they do not know and do without keys that are new, so that adding one
needs no new version. A change that an earlier Paceline would misread raises it by one, and comes
with a function in `_MIGRATIONS` and a stored checkpoint of the version before in the tests.
Version 3 has sharded tensors; a checkpoint without any stays of version 2, for earlier readers.
"""
UNSHARDED_VERSION = 2


def _from_version_1(name: str, part: dict[str, Any]) -> None:
    """Add what was not kept; give the open sums their present form."""
    if name == "training":
        part |= {"trial": None, "hparams": None, "unstored_hparams": [], "data_config": {}}
        part["best_metrics"] = None
    elif name.startswith("rank_"):
        means = part["means"]
        part["means"] = {
            "totals": means["sums"],
            "held": {},
            "weights": [],
            "weight": means["weight"],
        }


# What turns a part of a version, given its name, into that of the next version.
_MIGRATIONS: dict[int, Callable[[str, dict[str, Any]], None]] = {
    1: _from_version_1,
    2: lambda name, part: None,
}


def read_training(path: Path) -> dict[str, Any]:
    """Return the part "training" of a checkpoint, as the present version has it.

    Its "version" stays that of the files, as the other parts are to be read by it.

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or a newer one.
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
    if version > STATE_VERSION:
        raise CheckpointMismatchError(
            f"The trainer's state must have version {STATE_VERSION} or an earlier one, but has"
            f" {version}: Paceline {training.get('paceline', 'of a later version')} stored it."
            " Hint: use that version or a later one."
        )
    return _migrated("training", training, version)


def read_versioned_part(
    path: Path, name: str, training: dict[str, Any], *, lazily: bool = False
) -> dict[str, Any]:
    """Return another part of a checkpoint, as the present version has it.

    Args:
        path: The checkpoint's directory.
        name: The name of the part.
        training: The part "training".
        lazily: Whether all tensors are read later, see `StoredTensor`.

    Raises:
        CheckpointCorruptError: Its files are missing or cannot be read.
    """
    return _migrated(name, read_versioned_files(path, name, lazily=lazily), training["version"])


def check_number(kind: str, index: int, num_stored: int) -> None:
    """Check that a checkpoint holds a model or an optimizer of a number.

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
    """Return the state of one model, with all tensors in memory or all to be read later.

    Raises:
        CheckpointMismatchError: There is no such model.
        CheckpointCorruptError: Its files are missing or cannot be read.
    """
    check_number("model", index, training["num_models"])
    weights: dict[str, Any] = read_versioned_part(path, f"model_{index}", training, lazily=lazily)
    return weights if lazily else {name: whole(value) for name, value in weights.items()}


def read_versioned_files(path: Path, name: str, *, lazily: bool = False) -> dict[str, Any]:
    """Return what `save_state` has written.

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


def _migrated(name: str, part: dict[str, Any], version: int) -> dict[str, Any]:
    for earlier in range(version, STATE_VERSION):
        _MIGRATIONS[earlier](name, part)
    return part
