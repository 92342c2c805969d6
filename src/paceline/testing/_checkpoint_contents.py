"""Content of a checkpoint's file as nested dictionaries, lists and tensors."""

import json
from pathlib import Path
from typing import Any

_ZIP_START = b"PK\x03\x04"
# How the engine writes dictionaries whose keys may be integers, and tuples.
_ITEMS, _TUPLE = "$items", "$tuple"


def read_contents(path: Path) -> Any:
    """Return what a JSON, safetensors or torch file holds, None for any other kind of file."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".json":
        return _read_json(path)
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    return _read_torch(path) if is_zip else None


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in sorted(file.keys())}
            return {**tensors, "__metadata__": file.metadata()}
    except SafetensorError:
        return None


def _read_json(path: Path) -> Any:
    try:
        return _plain_contents(json.loads(path.read_bytes()))
    except ValueError:
        return None


def _read_torch(path: Path) -> Any:
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        # Other zip files, and torch files with classes in them: their bytes are compared.
        return None


def _plain_contents(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ITEMS}:
            return {key: _plain_contents(item) for key, item in value[_ITEMS]}
        if value.keys() == {_TUPLE}:
            return [_plain_contents(item) for item in value[_TUPLE]]
        return {key: _plain_contents(item) for key, item in value.items()}
    return [_plain_contents(item) for item in value] if isinstance(value, list) else value
