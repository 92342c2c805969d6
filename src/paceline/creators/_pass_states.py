"""States between passes: stored, read and kept in memory."""

import errno
import os
import re
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

import torch

from paceline._base.files import replacing_atomically
from paceline._training.engine.checkpoints.state_format import StateFormatError, is_storable
from paceline._training.workers.pickled_calls import NotSendableError, dump, load
from paceline.storage._checkpoint_errors import CheckpointCorruptError, check_state_version
from paceline.storage._checkpoint_files import digest_stream
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._storage_from_url import checkpoint_at

if TYPE_CHECKING:
    pass


def checked_pass_state(state: Any) -> dict[str, Any]:
    """Return a trainer's state.

    Raises:
        TypeError: It is no dictionary.
        ValueError: It is none of a training in passes, or one of an unknown version.
    """
    if not isinstance(state, dict):
        raise TypeError(f"A state must be a dictionary, but got {type(state).__name__}.")
    version = state.get("version")
    if not isinstance(version, int) or "ranks" not in state:
        raise ValueError(
            "A state must be what `PyTorchTrainer.state_dict` returned, but has the keys"
            f" {sorted(map(str, state))}."
        )
    check_state_version("A state", version)
    return state


_COMMENT = re.compile(rb"paceline xxh3_128 ([0-9a-f]{32})")
_COMMENT_BYTES = len("paceline xxh3_128 ") + 32
# The record at the end closes with the length of the comment that follows.
_BEGINNING, _END_BEGINS = b"PK\x03\x04", b"PK\x05\x06"
_END_BYTES = 22
_NO_COMMENT = b"\x00\x00"


def seal_zip(file: BinaryIO) -> None:
    """Append a digest as zip comment to a file of `torch.save`, opened for updates."""
    file.seek(-_END_BYTES, os.SEEK_END)
    end = file.read()
    assert end.startswith(_END_BEGINS), end
    assert end.endswith(_NO_COMMENT), end
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    file.write(_COMMENT_BYTES.to_bytes(len(_NO_COMMENT), "little"))
    file.seek(0)
    digest = digest_stream(file).digest
    file.write(b"paceline xxh3_128 " + digest.encode())


def check_zip(file: BinaryIO) -> None:
    """Check the digest of an open file, or the zip's own checksums if there is no digest.

    Another file may take its name meanwhile. Afterwards it is at its beginning.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    is_zip = file.read(len(_BEGINNING)) == _BEGINNING
    file.seek(max(0, size - _COMMENT_BYTES))
    comment = _COMMENT.fullmatch(file.read())
    file.seek(max(0, size - _END_BYTES))
    end = file.read()
    file.seek(0)
    if comment is not None:
        found = digest_stream(file, size - _COMMENT_BYTES).digest
        if found.encode() != comment[1]:
            raise ValueError("its content is not what its digest was made of")
    elif is_zip and not (end.startswith(_END_BEGINS) and end.endswith(_NO_COMMENT)):
        raise ValueError("its end is missing or altered")
    elif is_zip and torch.serialization.get_crc32_options():
        # torch writes checksums of records only if this option is on.
        _check_records(file)
    file.seek(0)


def _check_records(file: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged file can fail in any way
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged!r} does not fit")


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
    # Symbolic links are followed: their target is replaced, not the link.
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
                # torch's own error hides the file's, such as a full disk.
                raise error.__context__ from None
            raise
        seal_zip(file)
        file.flush()
        # A rename may reach the disk before its data, and leave an empty file after a crash.
        os.fsync(file.fileno())


@contextmanager
def _naming(path: Path, action: str) -> Iterator[None]:
    """Replace system errors in the body by errors naming the user's file, with a hint.

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
        # Errno is kept: callers decide by this number.
        named.errno = error.errno
        raise named from error


def save_pass_state(
    take: Callable[[], dict[str, Any]], place: str | os.PathLike[str] | CheckpointStorage
) -> str:
    """Write a state to a file, or store a new checkpoint; return the path or URL.

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
    """Tell whether a place is a storage URL, not a file of this machine."""
    return isinstance(place, str) and "://" in place


def read_pass_state(path: Path) -> dict[str, Any]:
    """Return the state written by `write_pass_state`, after checks.

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


class MemoryFile:
    """File in memory, freed by `close` or the end of this process.

    Attributes:
        path: Where processes of the same user on this machine open it.
        close: Frees the memory; may be called again.
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("paceline_state")
        # Path through /proc: a memory file has no name in any directory.
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.close = weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def is_possible() -> bool:
        """Return whether the system supports files in memory."""
        return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class KeptState:
    """The parts of a state.

    Args:
        parts: Each rank's part, in rank order; None for the chief's if that is in the file.
        file: Where the chief's part may be.

    Attributes:
        parts: As given.
        path: The file, if the chief's part is there.
    """

    def __init__(self, parts: Sequence[Any], file: MemoryFile | None = None) -> None:
        self.parts = list(parts)
        self._file = file if parts[0] is None else None
        self.path = None if self._file is None else self._file.path

    def close(self) -> None:
        """Forget the state."""
        if self._file is not None:
            self._file.close()


def read_parts(path: str | None, parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a state; the first is read from the file if there is a path."""
    if path is None:
        return parts
    with open(path, "rb") as file:
        return [load(file), *parts[1:]]


def write_part(part: dict[str, Any], path: str | None) -> dict[str, Any] | None:
    """Write a part of a state to the file and return None, or return the part if not written.

    Args:
        part: The part.
        path: The file, if there is one.
    """
    if path is None:
        return part
    try:
        with open(path, "wb") as file:
            dump(part, file, what="The state", name="state")
    except (OSError, NotSendableError):
        # Another user's, or no memory is left; values that cannot be pickled are reported where
        # they are sent.
        return part
    return None
