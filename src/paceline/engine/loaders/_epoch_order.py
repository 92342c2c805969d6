"""The order of samples: a function of (seed, epoch) alone, whatever the number of workers."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from paceline._seeds import mix_seed


def shuffled_indices(num_samples: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the permutation of an epoch."""
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    permutation = torch.randperm(num_samples, generator=generator)
    if num_samples >= 1 << 31:
        return array("q", permutation.numpy().tobytes())
    # A list would take ten times the memory of these, for as long as the epoch lasts.
    return array("i", permutation.to(torch.int32).numpy().tobytes())


def shards_of_worker(num_shards: int, rank: int, world_size: int) -> range:
    """Return the shards that a worker runs, in order; every shard has one worker.

    The first workers get one more where it does not divide; workers beyond the number of shards
    get none.
    """
    whole, rest = divmod(num_shards, world_size)
    start = rank * whole + min(rank, rest)
    return range(start, start + whole + (rank < rest))


class CutIndices(Sequence[Sequence[int]]):
    """Sample indices in order, as shards of a size; only the last one may be smaller.

    Args:
        indices: The samples.
        shard_size: The samples of a shard.
        drop_last: Whether a smaller last shard is left out.
    """

    def __init__(self, indices: Sequence[int], shard_size: int, *, drop_last: bool) -> None:
        self.shard_size = shard_size
        self._indices = indices
        self._num_shards = len(indices) // shard_size
        if not drop_last and len(indices) % shard_size:
            self._num_shards += 1

    def __len__(self) -> int:
        return self._num_shards

    @property
    def num_samples(self) -> int:
        """The number of samples that are in a shard."""
        return min(len(self._indices), self._num_shards * self.shard_size)

    def first(self, num_shards: int) -> "CutIndices":
        """Return the first shards."""
        size = self.shard_size
        return CutIndices(self._indices[: num_shards * size], size, drop_last=False)

    def from_shard(self, start: int) -> Iterator[Sequence[int]]:
        """Return the shards from one on, at less cost than by their numbers."""
        size, end = self.shard_size, self._num_shards * self.shard_size
        starts, ends = range(start * size, end, size), range((start + 1) * size, end + size, size)
        return map(self._indices.__getitem__, map(slice, starts, ends))

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence[int]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num_shards))]
        if not 0 <= index < self._num_shards:
            raise IndexError(index)
        start = index * self.shard_size
        return self._indices[start : start + self.shard_size]


def without_rest(shards: Sequence[Sequence[int]], num_shards: int) -> Sequence[Sequence[int]]:
    """Return the shards of whole global batches only, without those of a smaller last one."""
    num_whole = len(shards) // num_shards * num_shards
    if num_whole == len(shards):
        return shards
    first = getattr(shards, "first", None)
    return shards[:num_whole] if first is None else first(num_whole)


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The samples of one epoch, cut into shards; global batch b has shards b*L to b*L + L - 1.

    Attributes:
        shards: Sample indices of each shard, in order.
        num_shards: L, the number of shards of a global batch.
    """

    shards: Sequence[Sequence[int]]
    num_shards: int

    @property
    def num_batches(self) -> int:
        """The number of global batches, the last one possibly smaller."""
        return -(-len(self.shards) // self.num_shards)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        counted: int | None = getattr(self.shards, "num_samples", None)
        return sum(map(len, self.shards)) if counted is None else counted

    @property
    def shard_size(self) -> int | None:
        """The samples of every shard but the last; None if they differ."""
        return self.shards.shard_size if isinstance(self.shards, CutIndices) else None

    def shard(self, batch: int, shard: int) -> Sequence[int]:
        """Return the sample indices of one shard; empty beyond the end of the data."""
        index = batch * self.num_shards + shard
        return self.shards[index] if index < len(self.shards) else ()

    def sizes(self, batch: int, shards: range) -> list[int]:
        """Return the number of samples of some shards of a global batch; empty ones left out."""
        first = batch * self.num_shards
        return [len(shard) for shard in self.shards[first + shards.start : first + shards.stop]]

    def num_records(self, batch: int) -> int:
        """Return the number of samples of a global batch."""
        first = batch * self.num_shards
        return sum(len(shard) for shard in self.shards[first : first + self.num_shards])
