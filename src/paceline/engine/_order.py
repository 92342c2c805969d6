"""The order of samples: a function of (seed, epoch) alone, whatever the number of workers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Return a 63-bit seed from several integers (the finaliser of SplitMix64, chained).

    Neighbouring inputs give unrelated seeds, unlike a sum.
    """
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def shuffled_indices(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the permutation of an epoch."""
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    permutation: list[int] = torch.randperm(num_samples, generator=generator).tolist()
    return permutation


def shards_of_worker(num_shards: int, rank: int, world_size: int) -> range:
    """Return the shards that a worker runs, in order; every shard has one worker.

    The first workers get one more where it does not divide; workers beyond the number of shards
    get none.
    """
    whole, rest = divmod(num_shards, world_size)
    start = rank * whole + min(rank, rest)
    return range(start, start + whole + (rank < rest))


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


def cut(indices: Sequence[int], batch_size: int, *, drop_last: bool) -> list[Sequence[int]]:
    """Cut a sequence of samples into batches of one shard each."""
    end = len(indices) - len(indices) % batch_size if drop_last else len(indices)
    return [indices[start : start + batch_size] for start in range(0, end, batch_size)]
