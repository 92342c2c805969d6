"""Training and validation data: the user's loader, cut into shards and started anywhere."""

import atexit
import copy
import logging
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline._base.arguments_and_errors import mix_seed
from paceline.data._default_batches import collate_samples
from paceline.data._order_and_random_generators import (
    CutIndices,
    EpochOrder,
    SeededShardDataset,
    ShardBatchSampler,
    isolated_randomness,
    note_samples,
    shuffled_indices,
    without_rest,
)
from paceline.data._sharded_streams import PartitionedStream, StreamBatch, WholeStream
from paceline.data._stream_pieces import stream_pieces
from paceline.storage._checkpoint_errors import CheckpointMismatchError

logger = logging.getLogger(__name__)


_WORKER_LOOP = "_worker_loop"


class LoaderSignals:
    """`worker_init_fn` of a loader process: the first stop signal is ignored.

    Such signals often go to all processes of a job, and the last batches must still be served. A
    second signal counts, and so does the signal by which a program or a loader ends the processes.

    Args:
        then: The user's `worker_init_fn`.
        start_method: How the loader starts its processes; None for the default.
    """

    def __init__(self, then: Callable[[int], None] | None, start_method: str | None) -> None:
        self._then = then
        self._is_exiting = _exit_event(start_method)
        self._passed: set[int] = set()

    def __call__(self, worker: int) -> None:
        # Signals to the whole process group are for the main process, which ends its workers
        # itself.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._let_pass)
        if self._then is not None:
            self._then(worker)

    def _let_pass(self, number: int, frame: FrameType | None) -> None:
        if self._is_exiting.is_set() or _has_loader_ended(frame):
            # Exit without cleanup: the interrupted code may hold locks that cleanup needs.
            os._exit(0)
        if number in self._passed:
            # Second signal of a kind: the default action ends the process.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._passed.add(number)


def _has_loader_ended(frame: FrameType | None) -> bool:
    """Return whether the loader has asked this process to end, by torch's own event.

    The event itself is not read: the interrupted code may hold its lock.
    """
    while frame is not None and frame.f_code.co_name != _WORKER_LOOP:
        frame = frame.f_back
    done: Any = None if frame is None else frame.f_locals.get("done_event")
    # Semaphore values cannot be read on every system, such as macOS.
    with suppress(AttributeError, NotImplementedError):
        return bool(done._flag._semlock._get_value())
    return False


@cache
def _exit_event(start_method: str | None) -> Any:
    """Return an event for other processes, set when this process begins to exit."""
    # Start method of the loader: events of another one cannot be sent to its processes.
    event = multiprocessing.get_context(start_method).Event()
    atexit.register(event.set)
    return event


# Name of the flag by which torch knows that a profiler is active.
_FLAG = "_is_profiler_enabled"


class ShardedData:
    """A data loader's samples in shards, the same for any number of workers.

    The user's loader is cloned with every option kept; only which samples it fetches in which
    order is decided here. `shuffle=True` becomes the permutation of (seed, epoch); other samplers
    keep their order, drawn once an epoch with generators seeded by (seed, epoch).

    Args:
        loader: A torch `DataLoader`; its batch size is one shard's.
        num_shards: L, the shards of a global batch.
        own_shards: The shards that this worker runs.
        seed: The seed of the order and of random augmentation.
        joins_shards: Whether `iterate` yields this worker's shards of a global batch as one batch,
            for loops that know nothing of shards. A worker that has none at the end of the data
            gets the first shard in their place, so that all workers have equally many batches.
        has_own_seed: Whether `seed` may be the seed of the loader's own generator.
        drops_rest: Whether the last global batch of an epoch is left out if it lacks shards, as it
            is with `drop_last`.

    Raises:
        TypeError: `loader` is no torch `DataLoader`.
        ValueError: It has no samples.
    """

    def __init__(
        self,
        loader: Any,
        *,
        num_shards: int,
        own_shards: range,
        seed: int,
        joins_shards: bool = False,
        drops_rest: bool = False,
        has_own_seed: bool = False,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                "A data loader must be a torch.utils.data.DataLoader, but got"
                f" {type(loader).__name__}."
            )
        self._loader = loader
        self.num_shards = num_shards
        self.own_shards = own_shards
        self._seed = seed
        self._drops_rest = drops_rest
        self._cached: dict[int, EpochOrder] = {}
        self._num_drawn = 0
        self._plan = ShardBatchSampler()
        self._plan.is_joined = joins_shards
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        if not self.is_iterable and not num_samples_of(loader.dataset):
            raise ValueError("A data loader must have samples, but its data set is empty.")
        self._clone = loader if self.is_iterable else self._clone_loader()
        if self._clone.num_workers and not isinstance(self._clone.worker_init_fn, LoaderSignals):
            context = self._clone.multiprocessing_context
            method = None if context is None else context.get_start_method()
            self._clone.worker_init_fn = LoaderSignals(self._clone.worker_init_fn, method)
        self._whole = WholeStream(loader, num_shards=num_shards, own=own_shards, seed=seed)
        self._partitions = self._make_partitions()
        # Whether a checkpoint of an earlier version was loaded, and the epoch that it lies in.
        self._is_earlier = False
        self._whole_epoch: int | None = None
        has_generator = isinstance(loader.generator, torch.Generator)
        if has_generator and not self.is_iterable and not has_own_seed:
            logger.info(
                "A loader's own generator has no effect: the seed of the run decides the order."
            )

    def order(self, epoch: int) -> EpochOrder | None:
        """Return an epoch's order, or None for an iterable data set with its own order."""
        if self.is_iterable:
            return None
        if epoch not in self._cached:
            # A sampler with a state of its own must be drawn once an epoch, from the first on.
            first = min(self._num_drawn, epoch) if self._has_own_state() else epoch
            for drawn in range(first, epoch + 1):
                shards = self._cut_epoch(drawn)
                if self._drops_rest or self._loader.drop_last:
                    shards = without_rest(shards, self.num_shards)
                self._cached[drawn] = EpochOrder(shards, self.num_shards)
                # A window of accumulation may reach into a neighbouring epoch.
                if len(self._cached) > 3:
                    self._cached.pop(next(iter(self._cached)))
            self._num_drawn = epoch + 1
        order = self._cached[epoch]
        if not order.num_batches:
            raise ValueError(
                "A data loader must give at least one batch an epoch, but gives none. Hint: its"
                f" data set is smaller than one batch of {self.num_shards} shard(s) and `drop_last`"
                " is set, or its batch sampler is empty."
            )
        return order

    def known_order(self, epoch: int) -> EpochOrder | None:
        """Return an epoch's order, or None if not decided before the epoch begins.

        A user's sampler may depend on earlier events.
        """
        if self.is_iterable or not (epoch in self._cached or self._is_order_ours()):
            return None
        return self.order(epoch)

    def _is_order_ours(self) -> bool:
        is_batched = type(self._loader.batch_sampler) is BatchSampler
        return is_batched and _is_shuffled(self._loader.sampler) is not None

    def _has_own_state(self) -> bool:
        """Return whether the order may depend on the number of earlier draws."""
        batch_sampler = self._loader.batch_sampler
        sampler = self._loader.sampler if type(batch_sampler) is BatchSampler else batch_sampler
        is_from_torch = type(sampler).__module__.startswith("torch.")
        return not is_from_torch and not hasattr(sampler, "set_epoch")

    def iterate(self, epoch: int, start_batch: int = 0) -> Iterator[Any]:
        """Return this worker's shards of an epoch, from a global batch on, in order.

        Making it may draw from the process's generators, as torch does: restore their state
        afterwards.
        """
        order = self.order(epoch)
        assert order is not None
        plan = self._plan
        plan.order, plan.own_shards, plan.start_batch = order, self.own_shards, start_batch
        plan.seed_parts = (self._seed, epoch)
        # Copy of the plan for error notes: a later call of `iterate` changes the plan itself.
        return self._with_notes(iter(self._clone), copy.copy(plan))

    def _with_notes(self, batches: Iterator[Any], plan: ShardBatchSampler) -> Iterator[Any]:
        """Yield batches; errors of reading name the samples."""
        without_marks, num_begun = _without_marks(batches), 0
        try:
            while True:
                num_begun += 1
                # No name holds a batch here, so that its memory is free for the next one.
                yield next(batches if getattr(profiler, _FLAG, True) else without_marks)
        except StopIteration:
            return
        except Exception as error:
            failed = next(islice(plan, num_begun - 1, None), [])
            note_samples(error, self._loader.dataset, failed)
            raise

    def iterate_stream(
        self, epoch: int = 0, start_batch: int = 0, *, agrees: bool = True
    ) -> Iterator[list[Any]]:
        """Return this worker's shards of each global batch of an iterable data set.

        Args:
            epoch: The epoch.
            start_batch: The first global batch.
            agrees: Whether all workers iterate together. If not, a checkpoint cannot hold the
                place.
        """
        partitions = self._partitions_of(epoch, start_batch)
        if partitions is not None:
            return (batch.own for batch in partitions.iterate(epoch, start_batch, agrees=agrees))
        return self._whole.own_shards(self._iterate_whole(epoch, start_batch))

    def iterate_sized_stream(self, epoch: int = 0, start_batch: int = 0) -> Iterator[StreamBatch]:
        """Return the same with the sizes of all shards; all workers iterate together."""
        partitions = self._partitions_of(epoch, start_batch)
        if partitions is not None:
            return partitions.iterate(epoch, start_batch)
        return self._whole.with_sizes(self._iterate_whole(epoch, start_batch))

    @property
    def is_read_whole(self) -> bool:
        """Whether each worker reads all samples and keeps its own."""
        return self.is_iterable and self._partitions is None

    def stream_state(self) -> Any:
        """Return the position of an iterable data set, or None if unavailable."""
        if not self.is_iterable:
            return None
        if self._partitions is not None and self._whole_epoch is None:
            return self._partitions.state()
        return self._whole.state()

    def load_stream_state(self, state: Any) -> None:
        """Restore an iterable data set's position from `stream_state`.

        Raises:
            CheckpointMismatchError: The checkpoint is of another stream.
        """
        if not self.is_iterable:
            return
        if state is not None and "marks" in state:
            if self._partitions is None:
                raise CheckpointMismatchError(
                    f"The stream must have a piece for each of {self.num_shards} shards, as when"
                    " the checkpoint was saved, but can only be read whole now. Hint: resume with"
                    " the same files, or with a checkpoint of the end of an epoch."
                )
            self._partitions.load_state(state)
            return
        # States without marks are of an earlier version: all streams were read whole then.
        self._is_earlier = self._partitions is not None
        self._whole.load_state(state)

    def _iterate_whole(self, epoch: int, start_batch: int) -> Iterator[list[Any]]:
        return self._whole.iterate(epoch, start_batch)

    def _partitions_of(self, epoch: int, start_batch: int) -> PartitionedStream | None:
        """Return the stream in partitions; None if the epoch is read whole."""
        if self._is_earlier:
            self._whole_epoch = epoch if start_batch else None
            self._is_earlier = False
        if epoch != self._whole_epoch:
            self._whole_epoch = None
            return self._partitions
        return None

    def _make_partitions(self) -> PartitionedStream | None:
        loader: Any = self._loader
        # A loader that keeps its own place decides itself which samples it reads.
        if not self.is_iterable or hasattr(loader, "state_dict"):
            return None
        pieces = stream_pieces(loader.dataset)
        if pieces is None or pieces.num_pieces < self.num_shards:
            return None
        return PartitionedStream(
            pieces, loader, num_partitions=self.num_shards, own=self.own_shards, seed=self._seed
        )

    def _cut_epoch(self, epoch: int) -> Sequence[Sequence[int]]:
        loader = self._loader
        batch_sampler, sampler = loader.batch_sampler, loader.sampler
        if loader.batch_size is None and batch_sampler is None:
            raise ValueError(
                "A data loader must batch its samples, but `batch_size` is None. Hint: give"
                " `batch_size`, or batch in the data set and use `batch_size=1` with a"
                " `collate_fn` that unpacks."
            )
        if type(batch_sampler) is not BatchSampler:
            assert batch_sampler is not None
            with self._drawing(batch_sampler, epoch):
                return [list(indices) for indices in batch_sampler]
        size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
        is_shuffled = _is_shuffled(sampler)
        planned = self._planned_epoch(epoch, size, drop_last, is_shuffled)
        if planned is not None:
            return planned
        if is_shuffled is None:
            with self._drawing(sampler, epoch):
                indices: Sequence[int] = array("q", map(int, sampler))
        elif is_shuffled:
            indices = shuffled_indices(len(loader.dataset), self._seed, epoch)  # type: ignore[arg-type]
        else:
            indices = range(len(loader.dataset))  # type: ignore[arg-type]
        return CutIndices(indices, size, drop_last=drop_last)

    def _planned_epoch(
        self, epoch: int, size: int, drop_last: bool, is_shuffled: bool | None
    ) -> Sequence[Sequence[int]] | None:
        """Return the shards of an epoch in the data set's own order, or None if no own order.

        Such a data set lies in files: an order over all samples would read all files at once.
        """
        plan = getattr(self._loader.dataset, "epoch_order", None)
        if plan is None or is_shuffled is None:
            return None
        shards: Sequence[Sequence[int]] | None = plan(
            seed=self._seed,
            epoch=epoch,
            num_shards=self.num_shards,
            shard_size=size,
            drop_last=drop_last,
            is_shuffled=is_shuffled,
        )
        return shards

    @property
    def identity(self) -> dict[str, Any] | None:
        """Facts to recognise the data by in a checkpoint, or None."""
        tell = getattr(self._loader.dataset, "identity", None)
        identity = tell() if callable(tell) else None
        return None if identity is None else dict(identity)

    def _drawing(self, sampler: Any, epoch: int) -> Any:
        if getattr(sampler, "is_endless", False):
            raise ValueError(
                "A loader's sampler must end, as an epoch does, but this one repeats for ever."
                " Hint: leave the repeating out; training continues with the next epoch by itself."
            )
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(mix_seed(self._seed, epoch))
        return isolated_randomness(mix_seed(self._seed, epoch))

    def _clone_loader(self) -> "DataLoader[Any]":
        # Keyed shards only for loader processes: the main process's generators are in checkpoints,
        # and seeding them for each shard would tie the model's dropout to the data.
        self._plan.is_keyed = self._loader.num_workers > 0
        dataset = self._loader.dataset
        # A copy of the object rather than a loader made anew keeps every option there is, and a
        # class of the user's own. Shards must come in order to match the samples that the loop
        # counts.
        clone = copy.copy(self._loader)
        vars(clone).update(
            dataset=SeededShardDataset(dataset) if self._plan.is_keyed else dataset,
            batch_sampler=self._plan,
            in_order=True,
            _iterator=None,
        )
        if clone.collate_fn is default_collate:
            # Errors of torch's `default_collate` do not say how the samples differ.
            clone.collate_fn = collate_samples
        return clone


def num_samples_of(dataset: Any) -> int:
    """Return the number of samples of a map-style data set.

    Raises:
        TypeError: It has no length, and is no `IterableDataset`.
    """
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            "The data set of a loader must have a length and samples by number, or be a"
            f" torch.utils.data.IterableDataset, but got {type(dataset).__name__}. Hint:"
            " `paceline.data.Dataset(it).to_torch(batch_size)` makes a loader of any iterable."
        )
    return len(dataset)


def _without_marks(batches: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the same batches without marks for torch's profiler.

    A mark costs 9 us with each batch that is read in this process. Both iterators take the samples
    from one sampler, so that they can take turns.
    """
    # Private names of torch 2.6 to 2.15: torch does not promise to keep them.
    known: Any = batches
    with suppress(AttributeError):
        is_plain = type(known) is torch.utils.data.dataloader._SingleProcessDataLoaderIter
        if is_plain and not known._pin_memory and hasattr(profiler, _FLAG):
            return map(known._dataset_fetcher.fetch, known._sampler_iter)
    return batches


def _is_shuffled(sampler: Any) -> bool | None:
    """Return True for a sampler in random order, False for in order, None for neither."""
    # A data set that has an order of its own, and a sampler whose shards are dealt among the ranks
    # here.
    if hasattr(sampler, "is_order_of_dataset"):
        return bool(sampler.is_shuffled)
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if type(sampler) is SequentialSampler:
        return False
    return True if type(sampler) is RandomSampler and _is_plain_shuffle(sampler) else None


def _is_plain_shuffle(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


class WorkerBatch(NamedTuple):
    """Part of a worker in a global batch.

    Attributes:
        data: The worker's samples. Without any, samples of the first shard stand in.
        num_own: The number of the worker's own samples; 0 where others stand in.
        num_all: The number of samples of the global batch.
        num_shards: The number of shards of the global batch; of a stream, those before the first
            that has no samples.
    """

    data: Any
    num_own: int
    num_all: int
    num_shards: int


def worker_batches(data: ShardedData, epoch: int, start_batch: int) -> Iterator[WorkerBatch]:
    """Yield a worker's part of each global batch of an epoch, from a start batch.

    Like `ShardedData.iterate`, making it may draw from the process's generators.

    Args:
        data: The data, made with `joins_shards`.
        epoch: The epoch.
        start_batch: The first global batch.
    """
    order = data.order(epoch)
    if order is None:
        return worker_stream_batches(data.iterate_sized_stream(epoch, start_batch), data.own_shards)
    return _map_batches(data.iterate(epoch, start_batch), order, data.own_shards, start_batch)


def _map_batches(
    batches: Iterator[Any], order: EpochOrder, own: range, start_batch: int
) -> Iterator[WorkerBatch]:
    size = order.shard_size
    if size is not None:
        # All shards but the last are alike, so that nothing has to be counted for most batches.
        num_own, num_all = size * len(own), size * order.num_shards
        num_alike = max((len(order.shards) - 1) // order.num_shards - start_batch, 0)
        # A named tuple's own constructor is a function in Python.
        new, num_shards = tuple.__new__, order.num_shards
        for data in islice(batches, num_alike):
            yield new(WorkerBatch, (data, num_own, num_all, num_shards))
        start_batch += num_alike
    for number, data in enumerate(batches, start_batch):
        num_left = len(order.shards) - number * order.num_shards
        num_shards = min(num_left, order.num_shards)
        num_own, num_all = sum(order.sizes(number, own)), order.num_records(number)
        yield WorkerBatch(data, num_own, num_all, num_shards)


def worker_stream_batches(batches: Iterator[StreamBatch], own: range) -> Iterator[WorkerBatch]:
    """Return a worker's part of each global batch of a stream."""
    for batch in batches:
        sizes = batch.sizes
        data = _concatenate(batch.own or [batch.stand_in()])
        # Callers need the number of shards before the first empty shard.
        num_present = sizes.index(0) if 0 in sizes else len(sizes)
        yield WorkerBatch(data, sum(sizes[own.start : own.stop]), sum(sizes), num_present)


def _concatenate(parts: Sequence[Any]) -> Any:
    """Return the batches of several shards as a single batch of the first's structure."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return type(first)({key: _concatenate([part[key] for part in parts]) for key in first})  # type: ignore[call-arg]  # as torch collates
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(_concatenate, zip(*parts, strict=True)))
    if isinstance(first, (list, tuple)):
        if _holds_samples(first):
            return type(first)(item for part in parts for item in part)
        return type(first)(map(_concatenate, zip(*parts, strict=True)))
    raise TypeError(
        "The shards of a batch must consist of tensors, lists, tuples and dictionaries to be"
        f" joined, but got {type(first).__name__}. Hint: use as many workers as shards, or another"
        " `collate_fn`."
    )


def _holds_samples(values: Sequence[Any]) -> bool:
    """Return whether a list has an element per sample, as a list of strings does."""
    return not (values and isinstance(values[0], (torch.Tensor, Mapping, list, tuple)))
