"""Samplers for users who build a loader by hand; the trainer itself needs none of them.

`Trainer.fit` shards, shuffles and skips by itself, exactly and for any number of workers. These
samplers are for loops of one's own. Stack them in this order: shuffle, shard, batch, repeat, skip.
Sharding before repeating keeps every pass of a rank a part of one pass over the data.
"""

from paceline.engine.samplers import (
    DistributedBatchSampler,
    DistributedSampler,
    RepeatBatchSampler,
    RepeatSampler,
    ReproducibleShuffleBatchSampler,
    ReproducibleShuffleSampler,
    SkipBatchSampler,
    SkipSampler,
    adapt_batch_sampler,
)

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
    "adapt_batch_sampler",
]
