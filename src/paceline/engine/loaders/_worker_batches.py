"""A worker's shards of each global batch as one batch, for loops that know nothing of shards."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from paceline.engine.loaders._epoch_order import EpochOrder
from paceline.engine.loaders._sharded_data import ShardedData
from paceline.engine.loaders._whole_stream import StreamBatch


class WorkerBatch(NamedTuple):
    """A worker's part of one global batch.

    Attributes:
        data: The worker's samples. Without any, those of the first shard stand in for them.
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
    """Return a worker's part of each global batch of an epoch, from one on.

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
        # Those who look whether a worker has nothing ask how many shards come before.
        num_present = sizes.index(0) if 0 in sizes else len(sizes)
        yield WorkerBatch(data, sum(sizes[own.start : own.stop]), sum(sizes), num_present)


def _concatenate(parts: Sequence[Any]) -> Any:
    """Return the batches of several shards as one; each has the structure of the first."""
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
    """Tell whether a list has one element per sample, such as strings have."""
    return not (values and isinstance(values[0], (torch.Tensor, Mapping, list, tuple)))
