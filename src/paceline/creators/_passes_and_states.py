"""Passes over data: a worker's data, begin and end, and the file of a stored state."""

import errno
import fcntl
import logging
import os
import re
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from uuid import uuid4

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline._base.arguments_and_errors import mix_seed
from paceline._base.files import replacing_atomically
from paceline._training.engine.checkpoints.state_format import StateFormatError, is_storable
from paceline._training.workers.pickled_calls import NotSendableError, dump, load
from paceline.creators._creator_arguments import BATCH_SIZE, ReplicaSpec
from paceline.data._order_and_random_generators import (
    capture_random_state,
    restore_random_state,
    worker_shards,
)
from paceline.data._sharded_loader import ShardedData, WorkerBatch, worker_batches
from paceline.data._torch_loaders import mover_to
from paceline.storage._checkpoint_files import (
    CheckpointCorruptError,
    check_state_version,
    digest_stream,
)
from paceline.storage._checkpoint_storage import CheckpointStorage, checkpoint_at

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


class DataPosition:
    """Data with the position for the start of the next pass.

    Args:
        data: The data, made with `joins_shards`.
        num_copies: How many workers train on the same batches at once.

    Attributes:
        epoch: The present epoch, from 0.
        next_batch: The next batch in it.
    """

    def __init__(self, data: ShardedData, num_copies: int = 1) -> None:
        self.epoch = 0
        self.next_batch = 0
        self._data = data
        self._num_copies = num_copies
        self._batches: Iterator[WorkerBatch] | None = None

    @classmethod
    def in_loader(
        cls, loader: Any, *, num_shards: int | None, rank: int, world_size: int, seed: int
    ) -> "DataPosition":
        """Return the beginning of a loader's data.

        Args:
            loader: The loader.
            num_shards: The shards of a global batch, which the workers share; None if each worker
                has all batches of its loader, in an order of its own.
            rank: The rank.
            world_size: The number of workers.
            seed: The seed of the order.
        """
        if num_shards is None:
            # Each worker goes through all data, in an order of its own.
            seed = mix_seed(seed, rank) if rank else seed
            whole = ShardedData(
                loader, num_shards=1, own_shards=range(1), seed=seed, joins_shards=True
            )
            return cls(whole, num_copies=world_size)
        own = worker_shards(num_shards, rank, world_size)
        return cls(
            ShardedData(loader, num_shards=num_shards, own_shards=own, seed=seed, joins_shards=True)
        )

    @property
    def num_begun(self) -> int:
        """How many epochs were begun."""
        return self.epoch + bool(self.next_batch)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in the present epoch; None if unknown."""
        order = self._data.order(self.epoch)
        return None if order is None else order.num_batches

    @property
    def num_samples(self) -> int | None:
        """Number of samples in the present epoch; None if unknown."""
        order = self._data.order(self.epoch)
        return None if order is None else order.num_samples

    @property
    def num_copies(self) -> int:
        """How many workers train on the same batches at once."""
        return self._num_copies

    def batches(self) -> Iterator[WorkerBatch]:
        """Return an iterator of the epoch's remaining batches; the consumer counts them."""
        if self._batches is None:
            # Random state restored: draws here must not depend on how often an epoch is resumed.
            saved = capture_random_state()
            self._batches = worker_batches(self._data, self.epoch, self.next_batch)
            restore_random_state(saved)
        return self._batches

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.go_to(self.epoch + 1, 0)

    def go_to(self, epoch: int, next_batch: int) -> None:
        """Go to a position."""
        self.epoch, self.next_batch = epoch, next_batch
        self._batches = None

    def sizes(self) -> dict[str, int | None]:
        """Return the batches and samples of the present epoch; None if they are not known yet."""
        data = self._data
        order = data.order(self.epoch) if self.next_batch else data.known_order(self.epoch)
        return {
            "num_batches": None if order is None else order.num_batches,
            "num_samples": None if order is None else order.num_samples,
        }

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return {
            "epoch": self.epoch,
            "next_batch": self.next_batch,
            **self.sizes(),
            "num_shards": self._data.num_shards,
            "stream": self._data.stream_state(),
        }

    def load_state(self, state: dict[str, Any]) -> bool:
        """Go to a stored position; return False if other data restart its epoch."""
        self.go_to(state["epoch"], state["next_batch"])
        fits = state["num_shards"] == self._data.num_shards
        fits = fits and state["num_batches"] in (None, self.sizes()["num_batches"])
        if not fits:
            # A place within the epoch means nothing in other data.
            self.go_to(state["epoch"], 0)
        elif state["next_batch"]:
            self._data.load_stream_state(state["stream"])
        return fits or not state["next_batch"]


class Pass:
    """Iterable of the batches of a pass, on this worker's device, for train functions.

    Iterating once more begins the same pass again.

    Args:
        position: Where it begins.
        num_steps: How many batches; None for the rest of the epoch.
        device: Where batches are moved.
        on_batch: Called with each batch, also with one of which this worker has no part.
        on_epoch_end: Called at the end of an epoch.
        has_stand_ins: Whether a worker without samples of its own gets others' in their place, so
            that all workers have equally many batches.

    Attributes:
        on_batch: The function that is called with each batch; it may be replaced before the pass.
        num_batches: The batches so far.
        num_samples: This worker's samples so far.
        num_own: This worker's samples in the present batch.
        last_own: Which batch of the pass the last one with samples of this worker is, from 1, and
            these samples; zeros before that.
        data_wait_s: How long it has waited for its batches, in seconds.
    """

    def __init__(
        self,
        position: DataPosition,
        num_steps: int | None,
        device: torch.device,
        *,
        on_batch: Callable[[WorkerBatch], None] | None = None,
        on_epoch_end: Callable[[], object] | None = None,
        has_stand_ins: bool = True,
    ) -> None:
        self.num_batches = self.num_samples = self.num_own = 0
        self.last_own = (0, 0)
        self.data_wait_s = 0.0
        self._position = position
        self._start = position.epoch, position.next_batch
        self._num_steps = num_steps
        self._to_device = mover_to(device, set())
        self.on_batch = on_batch
        self._on_epoch_end = on_epoch_end
        self._has_stand_ins = has_stand_ins
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return how many batches the whole pass has.

        Raises:
            TypeError: The data have no length.
        """
        if self._num_steps is not None:
            return self._num_steps
        epoch, start = self._start
        num_batches = self._position.num_batches
        if num_batches is None:
            raise TypeError("A pass over an iterable data set has no length.")
        # Once its epoch has ended, the batches are counted.
        return num_batches - start if epoch == self._position.epoch else self.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Begin the pass."""
        if self._running is not None:
            self._position.go_to(*self._start)
            self.num_batches = self.num_samples = self.num_own = 0
            self.last_own = (0, 0)
        self._running = self._run()
        return self._running

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(iter(self) if self._running is None else self._running)

    def finish(self) -> None:
        """End the epoch if its last batch was given out."""
        position = self._position
        # Consumers may stop right after the last batch, before the iterator ends the epoch.
        if position.next_batch and position.next_batch == position.num_batches:
            self._end_epoch()

    def _run(self) -> Iterator[Any]:
        position, on_batch, to_device = self._position, self.on_batch, self._to_device
        num_steps, has_stand_ins = self._num_steps, self._has_stand_ins
        num_taken, num_taken_before = 0, -1
        while num_taken != num_steps:
            batches = position.batches()
            while True:
                began = perf_counter()
                batch = next(batches, None)
                self.data_wait_s += perf_counter() - began
                if batch is None:
                    break
                position.next_batch += 1
                num_taken += 1
                num_own = batch.num_own
                if on_batch is not None:
                    on_batch(batch)
                if num_own or has_stand_ins:
                    self.num_batches += 1
                    self.num_samples += num_own
                    self.num_own = num_own
                    if num_own:
                        self.last_own = (num_taken, num_own)
                    yield to_device(batch.data)
                if num_taken == num_steps:
                    return
            self._end_epoch()
            if num_steps is None and num_taken:
                return
            # A stream may have ended right where the last pass did, but no two in a row.
            if num_taken == num_taken_before:
                raise ValueError(
                    "`data_creator` must return data with batches, but has none. Hint: a generator"
                    " has none after its first pass; return a data set, or an object whose"
                    " `__iter__` begins anew."
                )
            num_taken_before = num_taken

    def _end_epoch(self) -> None:
        self._position.end_epoch()
        if self._on_epoch_end is not None:
            self._on_epoch_end()


@contextmanager
def node_data_lock() -> Iterator[None]:
    """Hold a per-user file lock on this node, to prevent collisions of downloads.

    The operating system releases it when the process dies.
    """
    path = Path(tempfile.gettempdir(), f"paceline-data-{os.getuid()}.lock")
    with path.open("w") as file:
        # The system frees the lock with the file, also if the process is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_DEFAULT_LOADER_CONFIG = {"num_workers": 2}


class Loaders(NamedTuple):
    """The loaders of a replica."""

    train: "DataLoader[Any]"
    validation: "DataLoader[Any] | None"


class _Batches(IterableDataset[Any]):
    """An iterable of batches, as the data set of a loader."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def make_replica_loaders(spec: ReplicaSpec) -> Loaders:
    """Call `data_creator`, and return loaders of the created data.

    Raises:
        ValueError: It returned more than two data sets, or none.
        TypeError: It returned something else.
    """
    with node_data_lock() if spec.is_serial else nullcontext():
        made = spec.data_creator(creators_config(spec))
    parts = list(made) if _is_pair(made) else [made]
    if not 1 <= len(parts) <= 2 or parts[0] is None:
        raise ValueError(
            "`data_creator` must return data to train on, and maybe data to validate on, but"
            f" returned {len(parts)} values."
        )
    if spec.loader_config is not None and all(isinstance(p, DataLoader) for p in parts if p):
        logger.warning("`dataloader_config` has no effect, as `data_creator` returns DataLoaders.")
    train = _loader_of(parts[0], spec, is_shuffled=True)
    has_validation = len(parts) == 2 and parts[1] is not None
    validation = _loader_of(parts[1], spec, is_shuffled=False) if has_validation else None
    return Loaders(train, validation)


def creators_config(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the config for creators, with the batch size of a single worker."""
    if BATCH_SIZE not in spec.config:
        return spec.config
    return {**spec.config, BATCH_SIZE: spec.config[BATCH_SIZE] // spec.num_shards}


def data_position_in(
    loader: "DataLoader[Any]", spec: ReplicaSpec, rank: int, world_size: int
) -> DataPosition:
    """Return a worker's share of a loader's data, at the beginning."""
    num_shards = spec.num_shards if spec.deals_out else None
    return DataPosition.in_loader(
        loader, num_shards=num_shards, rank=rank, world_size=world_size, seed=spec.seed
    )


def _is_pair(made: Any) -> bool:
    """Tell whether several data sets were returned, and not a list of batches."""
    is_data = isinstance(made, list) and all(isinstance(p, (Dataset, DataLoader)) for p in made)
    return is_data or isinstance(made, tuple)


def _loader_of(data: Any, spec: ReplicaSpec, *, is_shuffled: bool) -> "DataLoader[Any]":
    if isinstance(data, DataLoader):
        return data
    is_indexed = isinstance(data, Sized) and hasattr(data, "__getitem__")
    is_map = is_indexed and not isinstance(data, (list, Mapping))
    if isinstance(data, IterableDataset):
        return DataLoader(data, **_options(spec))
    if isinstance(data, Dataset) or is_map:
        options = _options(spec)
        if is_shuffled and not {"shuffle", "sampler", "batch_sampler"} & set(options):
            options["shuffle"] = True
        return DataLoader(data, **options)
    if isinstance(data, Iterable):
        return DataLoader(_Batches(data), batch_size=None)
    raise TypeError(
        "`data_creator` must return data sets, DataLoaders or iterables of batches, but returned a"
        f" {type(data).__name__}."
    )


def _options(spec: ReplicaSpec) -> dict[str, Any]:
    config = _DEFAULT_LOADER_CONFIG if spec.loader_config is None else spec.loader_config
    size = {} if "batch_sampler" in config else {"batch_size": spec.shard_size}
    return {**size, **config}


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
