"""A trainer's state as one file, or as a checkpoint of a storage."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from paceline._atomic_files import replacing_atomically
from paceline.engine.formats._json_and_safetensors import StateFormatError, is_storable
from paceline.engine.formats._sealed_zip import check_zip, seal_zip
from paceline.engine.passes._pass_state import checked_pass_state
from paceline.storage import CheckpointCorruptError, CheckpointStorage, checkpoint_at

_STATE_FILE = "state.pt"


def write_pass_state(state: dict[str, Any], path: Path) -> None:
    """Write a state, whole or not at all.

    Raises:
        OSError: The file cannot be written.
        StateFormatError: The state has more than tensors and plain values.
    """
    if not is_storable(state):
        raise StateFormatError(
            "A state must consist of tensors, numbers, strings, lists, tuples and dictionaries"
            " to be saved, but this one has other values. Hint: return plain values from"
            " `state_dict()` of modules, optimizers and schedulers of your own."
        )
    # What a link leads to is replaced, not the link.
    path = path.resolve()
    with _naming(path, "written to"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.EINVAL, "it is a device, a pipe or a socket", str(path))
        _write_whole(state, path)


def _write_whole(state: dict[str, Any], path: Path) -> None:
    with replacing_atomically(path) as part, part.open("w+b") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                # torch's own error hides what the file has said.
                raise error.__context__ from None
            raise
        seal_zip(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _naming(path: Path, action: str) -> Iterator[None]:
    """Have errors of the system name the file that the user knows, and say what to do.

    Raises:
        OSError: The body has raised one, of the same type.
    """
    try:
        yield
    except OSError as error:
        hint = (
            "name a file in a directory that is there, may be written to, and has space"
            if action == "written to"
            else "give the path of a file that `save` has written, and that may be read"
        )
        named = type(error)(
            f"{str(path)!r} must be a file that can be {action}, but it cannot"
            f" ({error.strerror or error}). Hint: {hint}."
        )
        # Who asks for it decides by it what to do.
        named.errno = error.errno
        raise named from error


def save_pass_state(
    take: Callable[[], dict[str, Any]], place: str | os.PathLike[str] | CheckpointStorage
) -> str:
    """Write a state to a file, or store it as a new checkpoint; return the path or URL.

    Args:
        take: Returns the state.
        place: A file, the URL of the checkpoint, or a storage for one of any name.

    Raises:
        CheckpointWriteError: It cannot be stored.
        FileExistsError: There is a checkpoint of this name.
        OSError: The file cannot be written.
        StateFormatError: The state has more than tensors and plain values.
        ValueError: The URL is none of a checkpoint.
    """
    if isinstance(place, CheckpointStorage):
        return store_pass_state(take(), place, str(uuid4()))
    if is_url(place):
        return store_pass_state(take(), *checkpoint_at(place))
    write_pass_state(take(), Path(place))
    return str(place)


def store_pass_state(state: dict[str, Any], storage: CheckpointStorage, uuid: str) -> str:
    """Store a state as a checkpoint, and return its URL.

    Raises:
        CheckpointWriteError: It cannot be stored.
        FileExistsError: There is a checkpoint of this name.
        StateFormatError: The state has more than tensors and plain values.
    """
    with storage.store_path(uuid) as directory:
        write_pass_state(state, directory / _STATE_FILE)
    storage.commit(uuid, {"format": "paceline.creators"})
    return f"{storage.url}/{uuid}"


def load_pass_state(place: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the state of a file, or of the checkpoint at a URL.

    Raises:
        CheckpointCorruptError: It cannot be read.
        CheckpointNotFoundError: There is no such checkpoint.
        OSError: The file is not there.
        ValueError: It is no state of a trainer.
    """
    if not is_url(place):
        return read_pass_state(Path(place))
    storage, uuid = checkpoint_at(place)
    with storage.restore_path(uuid) as directory:
        return read_pass_state(directory / _STATE_FILE)


def is_url(place: str | os.PathLike[str] | None) -> bool:
    """Tell whether a place is one of a storage, not a file of this machine."""
    return isinstance(place, str) and "://" in place


def read_pass_state(path: Path) -> dict[str, Any]:
    """Return what `write_pass_state` has written.

    Raises:
        CheckpointCorruptError: The file is damaged, or something else.
        OSError: It is not there, or may not be read.
        ValueError: It is no state of a trainer.
    """
    with _naming(path, "read"), path.open("rb") as file:
        try:
            check_zip(file)
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can fail in any way
            reason = str(error) if type(error) is ValueError else type(error).__name__
            raise CheckpointCorruptError(
                f"{str(path)!r} must be a whole file that `save` has written, but is damaged or"
                f" something else ({reason}). Hint: copy it again, or use another one."
            ) from error
    return checked_pass_state(state)
