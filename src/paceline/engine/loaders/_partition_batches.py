"""One partition of a stream: its pieces, dealt among the processes of a loader."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline._seeds import mix_seed
from paceline.data import StreamPieces
from paceline.engine.devices._random_generators import (
    IteratorWithGenerators,
    isolated_randomness,
    seed_everything,
)


class PartitionBatch(NamedTuple):
    """A batch that one process of the loader has read.

    Attributes:
        data: The samples, collated.
        size: Their number.
        process: The process, from 0.
        number: Which of the pieces of this process comes next.
        offset: How many samples of it are taken.
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
        seed: The seed of what is drawn.
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
            # What it draws must not depend on the samples that are read again at a resume.
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
    """Return a value, in place of collating it."""
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
