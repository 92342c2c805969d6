"""A lane of a stream as its loader reads it: in strands, one for each process of the loader."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline._seeds import mix_seed
from paceline.data import StreamPieces
from paceline.engine.devices._random_generators import (
    IsolatedIterator,
    isolated_randomness,
    seed_everything,
)


class StrandBatch(NamedTuple):
    """A batch of a strand.

    Attributes:
        data: The samples, collated.
        size: Their number.
        strand: The strand.
        number: Which piece of the strand comes next.
        offset: How many samples of it are taken.
    """

    data: Any
    size: int
    strand: int
    number: int
    offset: int


class LanePlace(NamedTuple):
    """Where a lane stands.

    Attributes:
        turn: The strand that has the next batch.
        numbers: Which of its pieces each strand reads.
        offsets: How many samples of this piece are taken.
    """

    turn: int
    numbers: list[int]
    offsets: list[int]

    def after(self, batch: StrandBatch) -> "LanePlace":
        """Return the place after a batch."""
        numbers, offsets = [*self.numbers], [*self.offsets]
        numbers[batch.strand], offsets[batch.strand] = batch.number, batch.offset
        return LanePlace((batch.strand + 1) % len(numbers), numbers, offsets)


class Strands(IterableDataset[StrandBatch]):
    """The batches of a lane from a place on; in a loader's process, those of one strand.

    The strands take turns; one that has ended is left out.

    Args:
        pieces: The stream.
        orders: The pieces of each strand.
        place: The place.
        batch_size: The samples of a batch; None if each sample is a batch by itself.
        drop_last: Whether a smaller last batch of a strand is left out.
        collate: Makes a batch of samples.
        seed: The seed of what is drawn.
        epoch: The epoch.
    """

    def __init__(
        self,
        pieces: StreamPieces,
        orders: Sequence[Sequence[int]],
        place: LanePlace,
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

    def clone_of(self, loader: "DataLoader[Any]") -> Iterator[StrandBatch]:
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

    def __iter__(self) -> Iterator[StrandBatch]:
        info, count = get_worker_info(), len(self._orders)
        if info is not None:
            _leave_worker()
            # The first process of a loader has the first turn.
            return self._batches((info.id + self.place.turn) % count)
        if count == 1:
            return self._batches(0)
        strands = [self._batches((self.place.turn + n) % count) for n in range(count)]
        return _taking_turns(strands)

    def _batches(self, strand: int) -> Iterator[StrandBatch]:
        chunks = IsolatedIterator(self._chunks(strand), self._seed)
        for samples, number, offset in chunks:
            piece = self._orders[strand][min(number, len(self._orders[strand]) - 1)]
            # What it draws must not depend on the samples that are read again at a resume.
            with isolated_randomness(mix_seed(self._seed, piece, number, offset)):
                data = self._collate(samples if self._batch_size else samples[0])
            yield StrandBatch(data, len(samples), strand, number, offset)

    def _chunks(self, strand: int) -> Iterator[tuple[list[Any], int, int]]:
        """Yield the samples of each batch, and the place after them."""
        order, size = self._orders[strand], self._batch_size or 1
        first, skipped = self.place.numbers[strand], self.place.offsets[strand]
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


def _taking_turns(iterators: list[Iterator[StrandBatch]]) -> Iterator[StrandBatch]:
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
