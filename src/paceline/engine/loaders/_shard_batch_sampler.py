"""Batch sampler of a worker: its shards of each global batch."""

from collections.abc import Iterator
from typing import Any

import torch

from paceline._seeds import mix_seed
from paceline.engine.loaders._epoch_order import CutIndices, EpochOrder
from paceline.engine.loaders._seeded_shard_dataset import make_seeded_shard


class ShardBatchSampler(torch.utils.data.Sampler[Any]):
    """The batch sampler of the clone: the shards of one worker from some batch on.

    Joined shards are one fetch per global batch, also where the worker has none of its own.
    """

    def __init__(self) -> None:
        self.order = EpochOrder((), 1)
        self.own_shards = range(0)
        self.start_batch = 0
        self.seed_parts: tuple[int, ...] = ()
        self.is_keyed = False
        self.is_joined = False

    def __iter__(self) -> Iterator[list[Any]]:
        shards_of_epoch = self.order.shards
        is_plain = self.order.num_shards == 1 and len(self.own_shards) == 1 and not self.is_keyed
        if is_plain and isinstance(shards_of_epoch, CutIndices):
            return map(list, shards_of_epoch.from_shard(self.start_batch))
        return self._own_batches()

    def _own_batches(self) -> Iterator[list[Any]]:
        for batch in range(self.start_batch, self.order.num_batches):
            shards = [
                self._indices(batch, shard)
                for shard in self.own_shards
                if len(self.order.shard(batch, shard))
            ]
            if self.is_joined:
                yield self._join(shards or [self._indices(batch, 0)])
            else:
                yield from shards

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _indices(self, batch: int, shard: int) -> list[int]:
        indices = self.order.shard(batch, shard)
        if not self.is_keyed:
            return list(indices)
        return make_seeded_shard(indices, mix_seed(*self.seed_parts, batch, shard))

    def _join(self, shards: list[list[int]]) -> list[Any]:
        if len(shards) == 1:
            return shards[0]
        # Keyed ones stay apart, as each is seeded by itself.
        return list(shards) if self.is_keyed else [index for shard in shards for index in shard]
