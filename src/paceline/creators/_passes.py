"""Passes over data: a worker's data, begin and end."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline._base.arguments_and_errors import mix_seed
from paceline.creators._creator_arguments import BATCH_SIZE, ReplicaSpec
from paceline.data._order_and_random_generators import (
    capture_random_state,
    restore_random_state,
    worker_shards,
)
from paceline.data._sharded_loader import ShardedData, WorkerBatch, worker_batches
from paceline.data._torch_loaders import mover_to

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
