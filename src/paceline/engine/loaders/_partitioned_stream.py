"""Streams that can be read in pieces: each shard of a global batch has pieces of its own.

The pieces are permuted by (seed, epoch) if they may come in any order. With N shards there are N
partitions: that of shard s has every N-th piece, from the s-th on. So each worker reads a part of
the stream.

Partitions end at different times, which nobody knows before. Therefore each worker reads some
batches ahead, and all workers exchange the sizes of these batches and the positions of the
partitions before them. A checkpoint holds these positions: a piece, and how many of its samples
were taken. To go on, the present piece of each partition is read again up to there.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from paceline._seeds import mix_seed
from paceline.data import StreamPieces
from paceline.engine.devices._data_to_device import data_length
from paceline.engine.devices._random_generators import isolated_randomness
from paceline.engine.devices._rank_sums import gather_from_ranks
from paceline.engine.loaders._epoch_order import shuffled_indices
from paceline.engine.loaders._partition_batches import PartitionBatches, PartitionPosition
from paceline.engine.loaders._whole_stream import StreamBatch
from paceline.storage import CheckpointMismatchError

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


class PartitionedStream:
    """A stream in partitions, the same for any number of workers.

    Args:
        pieces: The stream, with at least as many pieces as there are partitions.
        loader: The user's loader of it.
        num_partitions: The shards of a global batch.
        own: The partitions of this worker.
        seed: The seed of the order and of what is drawn while pieces are read.
    """

    def __init__(
        self,
        pieces: StreamPieces,
        loader: "DataLoader[Any]",
        *,
        num_partitions: int,
        own: range,
        seed: int,
    ) -> None:
        self._pieces = pieces
        self._loader = loader
        self._num_partitions = num_partitions
        self._own = own
        self._seed = seed
        self._num_processes = max(1, loader.num_workers)
        self._marks: list[StreamMark] = []
        self._stand_in: Any = None

    def iterate(
        self, epoch: int, start_batch: int, *, agrees: bool = True
    ) -> Iterator[StreamBatch]:
        """Yield this worker's shards of each global batch, from one on.

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
        with isolated_randomness(mix_seed(self._seed, epoch)):
            partitions = {
                partition: _PartitionReader(
                    self._loader, self._batches_of(order, partition, places[partition], epoch)
                )
                for partition in self._own
            }
        while True:
            end = _next_boundary(batch)
            sizes = self._read_ahead(partitions, epoch, batch, end, agrees=agrees)
            for column in sizes.T.tolist():
                if not any(column):
                    return
                data = [partitions[partition].pop() for partition in self._own if column[partition]]
                if batch >= start_batch:
                    yield StreamBatch(data, column, self._first_batch)
                batch += 1

    def state(self) -> dict[str, Any] | None:
        """Return where the stream stands, for checkpoints; None before it is read."""
        if not self._marks:
            return None
        marks = [[epoch, batch, [list(p) for p in places]] for epoch, batch, places in self._marks]
        # The keys are those of stored checkpoints.
        return {
            "lanes": self._num_partitions,
            "pieces": self._pieces.num_pieces,
            "strands": self._num_processes,
            "marks": marks,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, once the batch is asked for at which it was called.

        Raises:
            CheckpointMismatchError: The checkpoint is of another stream.
        """
        counts = [("partitions", state["lanes"], self._num_partitions)]
        counts += [("pieces", state["pieces"], self._pieces.num_pieces)]
        for what, stored, present in counts:
            if stored != present:
                raise CheckpointMismatchError(
                    f"The stream must be the one that the checkpoint was saved with, but"
                    f" {self._pieces.name} had {stored} {what} then and has {present} now."
                    " Hint: go on with the same files and batches, or with a checkpoint of the end"
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
        # What earlier epochs were read with counts no more.
        self._num_processes = max(1, self._loader.num_workers)
        nothing = PartitionPosition(0, [0] * self._num_processes, [0] * self._num_processes)
        return StreamMark(epoch, 0, [nothing] * self._num_partitions)

    def _order(self, epoch: int) -> Sequence[int]:
        num_pieces = self._pieces.num_pieces
        if self._pieces.is_shuffled:
            return list(shuffled_indices(num_pieces, self._seed, epoch))
        return range(num_pieces)

    def _batches_of(
        self, order: Sequence[int], partition: int, place: PartitionPosition, epoch: int
    ) -> PartitionBatches:
        loader = self._loader
        return PartitionBatches(
            self._pieces,
            [
                order[
                    partition + self._num_partitions * n :: self._num_partitions
                    * self._num_processes
                ]
                for n in range(self._num_processes)
            ],
            place,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate=loader.collate_fn,
            seed=mix_seed(self._seed, epoch),
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
        rows = torch.zeros(self._num_partitions, 1 + 2 * num_processes + count, dtype=torch.int64)
        for number, partition in partitions.items():
            place = partition.place
            sizes = partition.read_ahead(count)
            row = [place.turn, *place.numbers, *place.offsets, *sizes]
            rows[number, : len(row)] = torch.tensor(row)
        if agrees and len(self._own) < self._num_partitions:
            # Ranks that train on the same samples have the same partitions.
            rows = gather_from_ranks(rows).amax(0)
        places = [
            PartitionPosition(row[0], row[1 : 1 + num_processes], row[1 + num_processes :])
            for row in rows[:, : 1 + 2 * num_processes].tolist()
        ]
        self._marks = [*self._marks, StreamMark(epoch, batch, places)][-_MARKS_KEPT:]
        return rows[:, 1 + 2 * num_processes :]

    def _first_batch(self) -> Any:
        """Return the first batch of the stream, for a worker that has none when others do."""
        if self._stand_in is None:
            everything = [list(range(self._pieces.num_pieces))]
            nothing = PartitionPosition(0, [0], [0])
            loader = self._loader
            batches = PartitionBatches(
                self._pieces,
                everything,
                nothing,
                batch_size=loader.batch_size,
                drop_last=False,
                collate=loader.collate_fn,
                seed=self._seed,
                epoch=0,
            )
            with isolated_randomness(self._seed):
                self._stand_in = next(iter(batches))
        return self._stand_in.data


class _PartitionReader:
    """The batches of one partition, by a clone of the user's loader.

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
        """Read some batches, or those that are left; return the numbers of their samples."""
        while len(self._pending) < count:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._last = self._last.after(batch)
            self._pending.append((batch.data, _length(batch.data, batch.size), self._last))
        return [size for _, size, _ in self._pending]

    def pop(self) -> Any:
        """Return the next batch that was read."""
        data, _, self.place = self._pending.popleft()
        return data


def _length(data: Any, num_samples: int) -> int:
    try:
        return data_length(data)
    except (TypeError, ValueError):
        return num_samples


def _next_boundary(batch: int) -> int:
    """Return where the batches end that are read ahead at once, at first few of them."""
    if batch >= _MOST_AHEAD:
        return batch - batch % _MOST_AHEAD + _MOST_AHEAD
    return 1 << batch.bit_length()
