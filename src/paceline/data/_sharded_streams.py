"""Streams in pieces: each shard of a global batch reads pieces of its own."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline._base.arguments_and_errors import mix_seed
from paceline.data._order_and_random_generators import (
    IteratorWithGenerators,
    isolated_randomness,
    seed_everything,
    shuffled_indices,
)
from paceline.data._stream_pieces import StreamPieces
from paceline.data._torch_loaders import data_length
from paceline.storage._checkpoint_errors import CheckpointMismatchError


class PartitionBatch(NamedTuple):
    """Batch read by a process of the loader, with the position after the batch.

    Attributes:
        data: The samples, collated.
        size: Their number.
        process: The process, from 0.
        number: Which of the pieces of this process comes next.
        offset: The number of samples taken from it.
    """

    data: Any
    size: int
    process: int
    number: int
    offset: int


class PartitionPosition(NamedTuple):
    """The position in a partition.

    Attributes:
        turn: The process that has the next batch.
        numbers: Which of its pieces each process reads.
        offsets: How many samples of this piece are taken.
    """

    turn: int
    numbers: list[int]
    offsets: list[int]

    def after(self, batch: PartitionBatch) -> "PartitionPosition":
        """Return the place after a batch."""
        numbers, offsets = [*self.numbers], [*self.offsets]
        numbers[batch.process], offsets[batch.process] = batch.number, batch.offset
        return PartitionPosition((batch.process + 1) % len(numbers), numbers, offsets)


class PartitionBatches(IterableDataset[PartitionBatch]):
    """The batches of a partition from a place on; in a process of a loader, its own part of them.

    The processes take turns; one that has ended is left out.

    Args:
        pieces: The stream.
        orders: The pieces of each process.
        place: The place.
        batch_size: The samples of a batch; None if each sample is a batch by itself.
        drop_last: Whether a smaller last batch of a process is left out.
        collate: Makes a batch of samples.
        seed: The seed of the random draws.
        epoch: The epoch.
    """

    def __init__(
        self,
        pieces: StreamPieces,
        orders: Sequence[Sequence[int]],
        place: PartitionPosition,
        *,
        batch_size: int | None,
        drop_last: bool,
        collate: Callable[[Any], Any],
        seed: int,
        epoch: int,
    ) -> None:
        self.place = place
        self._pieces = pieces
        self._orders = orders
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._collate = collate
        self._seed = seed
        self._epoch = epoch

    def clone_of(self, loader: "DataLoader[Any]") -> Iterator[PartitionBatch]:
        """Return an iterator by a clone of a loader, with all its other options."""
        clone = copy.copy(loader)
        vars(clone).update(
            dataset=self,
            # Batches are made here, so that their places are known.
            batch_size=None,
            batch_sampler=None,
            collate_fn=as_it_is,
            in_order=True,
            num_workers=len(self._orders) if loader.num_workers else 0,
            persistent_workers=False,
            _iterator=None,
        )
        return iter(clone)

    def __iter__(self) -> Iterator[PartitionBatch]:
        info, count = get_worker_info(), len(self._orders)
        if info is not None:
            _leave_worker()
            # The first process of a loader has the first turn.
            return self._batches((info.id + self.place.turn) % count)
        if count == 1:
            return self._batches(0)
        processes = [self._batches((self.place.turn + n) % count) for n in range(count)]
        return _taking_turns(processes)

    def _batches(self, process: int) -> Iterator[PartitionBatch]:
        chunks = IteratorWithGenerators(self._chunks(process), self._seed)
        for samples, number, offset in chunks:
            piece = self._orders[process][min(number, len(self._orders[process]) - 1)]
            # Separate seed: draws must not depend on samples that are read again at a resume.
            with isolated_randomness(mix_seed(self._seed, piece, number, offset)):
                data = self._collate(samples if self._batch_size else samples[0])
            yield PartitionBatch(data, len(samples), process, number, offset)

    def _chunks(self, process: int) -> Iterator[tuple[list[Any], int, int]]:
        """Yield the samples of each batch, and the place after them."""
        order, size = self._orders[process], self._batch_size or 1
        first, skipped = self.place.numbers[process], self.place.offsets[process]
        chunk: list[Any] = []
        for number in range(first, len(order)):
            seed_everything(mix_seed(self._seed, order[number]))
            samples = iter(self._pieces.read(order[number], self._epoch))
            # Samples before the resume position are read again and dropped.
            for _ in islice(samples, skipped):
                pass
            for taken, sample in enumerate(samples, skipped + 1):
                chunk.append(sample)
                if len(chunk) == size:
                    yield chunk, number, taken
                    chunk = []
            skipped = 0
        if chunk and not self._drop_last:
            yield chunk, len(order), 0


def as_it_is(value: Any) -> Any:
    """Return the value unchanged; replaces a collate function."""
    return value


def _taking_turns(iterators: list[Iterator[PartitionBatch]]) -> Iterator[PartitionBatch]:
    """Yield from iterators in turn, until all have ended."""
    left = set(range(len(iterators)))
    for number in cycle(range(len(iterators))):
        if not left:
            return
        if number in left:
            try:
                yield next(iterators[number])
            except StopIteration:
                left.discard(number)


def _leave_worker() -> None:
    """Have the samples read as in a process of no loader.

    The pieces are dealt among the processes already. Streams of Hugging Face and WebDataset would
    deal them once more.
    """
    from torch.utils.data._utils import worker

    worker._worker_info = None


class StreamBatch(NamedTuple):
    """A worker's part of a global batch of a stream.

    Attributes:
        own: The worker's shards.
        sizes: The number of samples of each shard of the global batch.
        stand_in: Returns a shard for a worker that has none.
    """

    own: list[Any]
    sizes: list[int]
    stand_in: Callable[[], Any]


class WholeStream:
    """Stream read from beginning to end in the same way by all workers.

    Args:
        loader: The user's loader.
        num_shards: The shards of a global batch.
        own: The shards of this worker.
        seed: The seed of the random draws.
    """

    def __init__(
        self, loader: "DataLoader[Any]", *, num_shards: int, own: range, seed: int
    ) -> None:
        self._loader = loader
        self._num_shards = num_shards
        self._own = own
        self._seed = seed
        self._placed: dict[str, Any] | None = None
        self._random: IteratorWithGenerators | None = None

    def iterate(self, epoch: int, start_batch: int) -> Iterator[list[Any]]:
        """Return all shards of each global batch.

        The stream draws from generators of its own, seeded by (seed, epoch). Batches before
        `start_batch` are read at once and dropped, unless `load_state` has put the stream
        there.

        Args:
            epoch: The epoch.
            start_batch: The first global batch.
        """
        set_epoch = getattr(self._loader.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        seed = mix_seed(self._seed, epoch)
        with isolated_randomness(seed):
            stream: Iterator[Any] = iter(self._loader)
        self._random = None
        if not self._loader.num_workers:
            stream = self._random = IteratorWithGenerators(stream, seed)
        if self._placed is None:
            for _ in islice(stream, start_batch * self._num_shards):
                pass
        elif self._random is not None and start_batch:
            self._random.state = self._placed["random"]
        self._placed = None
        # Whole global batches are read, so that the stream stands at the same place on all ranks.
        return iter(lambda: list(islice(stream, self._num_shards)), [])

    def with_sizes(self, batches: Iterator[list[Any]]) -> Iterator[StreamBatch]:
        """Yield this worker's part of global batches."""
        own = self._own
        for shards in batches:
            mine = shards[own.start : own.stop]
            yield StreamBatch(mine, list(map(data_length, shards)), partial(as_it_is, shards[0]))

    def own_shards(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Return this worker's shards of global batches."""
        return (shards[self._own.start : self._own.stop] for shards in batches)

    def state(self) -> Any:
        """Return the stream's position, or None if unavailable."""
        source = self._source()
        if source is None:
            return None
        random = None if self._random is None else self._random.state
        return {"source": source.state_dict(), "random": random}

    def load_state(self, state: Any) -> None:
        """Restore the stream's position from `state`."""
        source = self._source()
        if source is not None and state is not None:
            source.load_state_dict(state["source"])
            self._placed = state

    def _source(self) -> Any:
        """Return the owner of the stream's position: a stateful loader or data set, else None."""
        loader: Any = self._loader
        if hasattr(loader, "state_dict"):
            return loader
        # The copies in a loader's worker processes are out of reach.
        has_state = hasattr(loader.dataset, "state_dict") and not loader.num_workers
        # Hugging Face's streams do not always continue from the place that they report: not with a
        # buffer or a `map`, and in versions 5.0 and 5.1 not a second time.
        has_state = has_state and not type(loader.dataset).__module__.startswith("datasets.")
        return loader.dataset if has_state else None


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return a small CPU tensor summed over all ranks, in rank order."""
    # Gather and local sum: every rank adds in the same order, unlike an all-reduce.
    return gather_from_ranks(values).sum(0)


def gather_from_ranks(values: Tensor) -> Tensor:
    """Return a small CPU tensor of each rank, stacked in rank order."""
    # NCCL takes tensors on a GPU only.
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered = [torch.zeros_like(values, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.to(device))
    return torch.stack([part.cpu() for part in gathered])


_MOST_AHEAD = 8
_MARKS_KEPT = 2


class StreamMark(NamedTuple):
    """The positions of all partitions before a global batch.

    Attributes:
        epoch: The epoch.
        batch: The global batch.
        places: The position of each partition.
    """

    epoch: int
    batch: int
    places: list[PartitionPosition]


@dataclass(eq=False, repr=False)
class PartitionedStream:
    """A stream in partitions, the same for any number of workers.

    Args:
        pieces: The stream, with at least as many pieces as there are partitions.
        loader: The user's loader of the stream.
        num_partitions: The shards of a global batch.
        own: The partitions of this worker.
        seed: The seed of the order and of the random draws while pieces are read.
    """

    pieces: StreamPieces
    loader: "DataLoader[Any]"
    _: KW_ONLY
    num_partitions: int
    own: range
    seed: int

    def __post_init__(self) -> None:
        self._num_processes = max(1, self.loader.num_workers)
        self._marks: list[StreamMark] = []
        self._stand_in: Any = None

    def iterate(
        self, epoch: int, start_batch: int, *, agrees: bool = True
    ) -> Iterator[StreamBatch]:
        """Yield this worker's shards of each global batch, from a start batch.

        Args:
            epoch: The epoch.
            start_batch: The first global batch.
            agrees: Whether all workers iterate together; if not, the sizes of the other workers'
                shards are 0, and the iteration ends with this worker's partitions.

        Raises:
            CheckpointMismatchError: The checkpoint is of another stream.
        """
        mark = self._mark_before(epoch, start_batch)
        batch, places = mark.batch, mark.places
        order = self._order(epoch)
        # Making a loader's iterator draws from the process's generators.
        with isolated_randomness(mix_seed(self.seed, epoch)):
            partitions = {
                partition: _PartitionReader(
                    self.loader, self._batches_of(order, partition, places[partition], epoch)
                )
                for partition in self.own
            }
        while True:
            end = _next_boundary(batch)
            sizes = self._read_ahead(partitions, epoch, batch, end, agrees=agrees)
            for column in sizes.T.tolist():
                if not any(column):
                    return
                data = [partitions[partition].pop() for partition in self.own if column[partition]]
                if batch >= start_batch:
                    yield StreamBatch(data, column, self._first_batch)
                batch += 1

    def state(self) -> dict[str, Any] | None:
        """Return the stream's position for checkpoints, or None before the first read."""
        if not self._marks:
            return None
        marks = [[epoch, batch, [list(p) for p in places]] for epoch, batch, places in self._marks]
        # The keys stand in stored checkpoints.
        return {
            "lanes": self.num_partitions,
            "pieces": self.pieces.num_pieces,
            "strands": self._num_processes,
            "marks": marks,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a position from `state`; applied when the batch of the checkpoint is requested.

        Raises:
            CheckpointMismatchError: The checkpoint is of another stream.
        """
        counts = [("partitions", state["lanes"], self.num_partitions)]
        counts += [("pieces", state["pieces"], self.pieces.num_pieces)]
        for what, stored, present in counts:
            if stored != present:
                raise CheckpointMismatchError(
                    f"The stream must be the one that the checkpoint was saved with, but"
                    f" {self.pieces.name} had {stored} {what} then and has {present} now."
                    " Hint: resume with the same files and batches, or with a checkpoint of the end"
                    " of an epoch."
                )
        self._num_processes = state["strands"]
        self._marks = [
            StreamMark(epoch, batch, [PartitionPosition(*place) for place in places])
            for epoch, batch, places in state["marks"]
        ]

    def _mark_before(self, epoch: int, batch: int) -> StreamMark:
        """Return the last known place at or before a batch."""
        known = [mark for mark in self._marks if mark.epoch == epoch and mark.batch <= batch]
        if batch and known:
            return known[-1]
        # New epochs use the loader's own number of processes, not the number in a checkpoint.
        self._num_processes = max(1, self.loader.num_workers)
        nothing = PartitionPosition(0, [0] * self._num_processes, [0] * self._num_processes)
        return StreamMark(epoch, 0, [nothing] * self.num_partitions)

    def _order(self, epoch: int) -> Sequence[int]:
        num_pieces = self.pieces.num_pieces
        if self.pieces.is_shuffled:
            return list(shuffled_indices(num_pieces, self.seed, epoch))
        return range(num_pieces)

    def _batches_of(
        self, order: Sequence[int], partition: int, place: PartitionPosition, epoch: int
    ) -> PartitionBatches:
        loader = self.loader
        return PartitionBatches(
            self.pieces,
            [
                order[
                    partition + self.num_partitions * n :: self.num_partitions * self._num_processes
                ]
                for n in range(self._num_processes)
            ],
            place,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate=loader.collate_fn,
            seed=mix_seed(self.seed, epoch),
            epoch=epoch,
        )

    def _read_ahead(
        self,
        partitions: dict[int, "_PartitionReader"],
        epoch: int,
        batch: int,
        end: int,
        *,
        agrees: bool,
    ) -> torch.Tensor:
        """Return the number of samples of some batches: [partitions, batches], int64."""
        num_processes, count = self._num_processes, end - batch
        rows = torch.zeros(self.num_partitions, 1 + 2 * num_processes + count, dtype=torch.int64)
        for number, partition in partitions.items():
            place = partition.place
            sizes = partition.read_ahead(count)
            row = [place.turn, *place.numbers, *place.offsets, *sizes]
            rows[number, : len(row)] = torch.tensor(row)
        if agrees and len(self.own) < self.num_partitions:
            # Ranks that train on the same samples have the same partitions.
            rows = gather_from_ranks(rows).amax(0)
        places = [
            PartitionPosition(row[0], row[1 : 1 + num_processes], row[1 + num_processes :])
            for row in rows[:, : 1 + 2 * num_processes].tolist()
        ]
        self._marks = [*self._marks, StreamMark(epoch, batch, places)][-_MARKS_KEPT:]
        return rows[:, 1 + 2 * num_processes :]

    def _first_batch(self) -> Any:
        """Return the stream's first batch, as a stand-in for a worker with no shard."""
        if self._stand_in is None:
            everything = [list(range(self.pieces.num_pieces))]
            nothing = PartitionPosition(0, [0], [0])
            loader = self.loader
            batches = PartitionBatches(
                self.pieces,
                everything,
                nothing,
                batch_size=loader.batch_size,
                drop_last=False,
                collate=loader.collate_fn,
                seed=self.seed,
                epoch=0,
            )
            with isolated_randomness(self.seed):
                self._stand_in = next(iter(batches))
        return self._stand_in.data


class _PartitionReader:
    """Reader of a partition's batches by a clone of the user's loader.

    Args:
        loader: The user's loader.
        batches: The batches of the partition.

    Attributes:
        place: The position before the next batch that `pop` returns.
    """

    def __init__(self, loader: "DataLoader[Any]", batches: PartitionBatches) -> None:
        self.place = batches.place
        self._batches = batches.clone_of(loader)
        self._pending: deque[tuple[Any, int, PartitionPosition]] = deque()
        self._last = self.place

    def read_ahead(self, count: int) -> list[int]:
        """Read up to `count` batches, fewer at the end; return their numbers of samples."""
        while len(self._pending) < count:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._last = self._last.after(batch)
            self._pending.append((batch.data, _length(batch.data, batch.size), self._last))
        return [size for _, size, _ in self._pending]

    def pop(self) -> Any:
        """Return the next batch already read."""
        data, _, self.place = self._pending.popleft()
        return data


def _length(data: Any, num_samples: int) -> int:
    try:
        return data_length(data)
    except (TypeError, ValueError):
        return num_samples


def _next_boundary(batch: int) -> int:
    """Return the end of the next group of batches to read ahead; early groups are small."""
    if batch >= _MOST_AHEAD:
        return batch - batch % _MOST_AHEAD + _MOST_AHEAD
    return 1 << batch.bit_length()
