"""The order of samples in files: each once an epoch, whatever the workers, from any place on."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import data
from paceline.data._order_and_random_generators import worker_shards
from paceline.data._order_and_read_plan import OrderShards, PartitionedOrder
from paceline.data._sample_sources import Source
from paceline.data._sharded_loader import ShardedData


def shards_of(sizes: list[int], num_partitions: int, size: int, **options: Any) -> OrderShards:
    drop_last = options.pop("drop_last", False)
    options = {"window": 7, "seed": 1, "epoch": 0} | options
    order = PartitionedOrder(np.array(sizes), num_partitions, **options)
    return OrderShards(order, num_partitions, size, drop_last=drop_last)


@pytest.mark.parametrize("num_partitions", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [0, 1, 5, 1000])
def test_every_sample_has_one_place(num_partitions: int, window: int) -> None:
    sizes = [10, 1, 33, 4, 52]
    shards = shards_of(sizes, num_partitions, 4, window=window)
    lists = [list(shard) for shard in shards]
    assert sorted(sum(lists, [])) == list(range(100))
    assert [len(shard) for shard in shards] == [len(each) for each in lists]
    assert shards.num_samples == 100
    assert all(lists)
    again = shards_of(sizes, num_partitions, 4, window=window)
    # From any place on, in any order of asking.
    assert [list(again[index]) for index in reversed(range(len(again)))] == lists[::-1]
    whole = shards_of(sizes, num_partitions, 4, window=window, drop_last=True)
    assert [list(each) for each in whole] == [each for each in lists if len(each) == 4]
    first = shards.first(num_partitions)
    assert (len(first), first.num_samples) == (
        num_partitions,
        sum(len(shards[n]) for n in range(num_partitions)),
    )


def test_order_depends_on_seed_and_epoch_and_mixes() -> None:
    def flat(**options: Any) -> list[int]:
        return sum(map(list, shards_of([50] * 4, 2, 10, **options)), [])

    assert flat() == flat()
    orders = [flat(), flat(seed=2), flat(epoch=1), flat(window=0)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])
    # Without windows, each partition has its samples in order.
    assert flat(window=0)[:20] == [*range(10), *range(100, 110)]


def test_pieces_are_expected_before_they_are_needed() -> None:
    told: list[tuple[list[int], list[int]]] = []
    shards = shards_of(
        [10] * 6, 2, 5, window=10, expect=lambda *each: told.append(tuple(a.tolist() for a in each))
    )
    for index in range(len(shards)):
        list(shards[index])
    # Both partitions have three windows: each is told with the one after it.
    assert [len(now) for now, _ in told] == [1, 2, 2, 2, 2, 2]
    assert [len(later) for _, later in told] == [1, 1, 1, 1, 0, 0]
    assert {number for now, _ in told for number in now} == set(range(0, 60, 10))


def batches(loader: Any, rank: int, world_size: int, start: int = 0) -> Iterator[list[list[int]]]:
    """Return for each global batch the samples of each shard of a worker."""
    own = worker_shards(3, rank, world_size)
    sharded = ShardedData(loader, num_shards=3, own_shards=own, seed=5)
    order, shards = sharded.order(1), sharded.iterate(1, start)
    assert order is not None
    for batch in range(start, order.num_batches):
        sizes = order.sizes(batch, own)
        yield [next(shards)["id"].tolist() for _ in sizes]


def test_workers_share_global_batches_and_resume(parquet: Callable[..., Path]) -> None:
    files = data.read(parquet(25, 40, 0, 31, 7))
    loader = files.shuffle(window=20).to_torch(batch_size=4)
    alone = [sum(each, []) for each in batches(loader, 0, 1)]
    assert sorted(sum(alone, [])) == list(range(103))
    for world_size in (2, 3):
        ranks = [list(batches(loader, rank, world_size)) for rank in range(world_size)]
        for number, whole in enumerate(alone):
            assert sum([sum(each[number], []) for each in ranks], []) == whole
    for start in (1, 7, len(alone) - 1):
        assert [sum(each, []) for each in batches(loader, 0, 1, start)] == alone[start:]
    # The same data through torch's own loader have the same order in a run.
    plain = torch.utils.data.DataLoader(files.shuffle(window=20), batch_size=4, shuffle=True)
    assert [sum(each, []) for each in batches(plain, 0, 1)] == alone


class NotingSource(Source):
    """Samples that are their own numbers, in pieces of 10,000; it notes what it is asked for."""

    def __init__(self, num_pieces: int) -> None:
        self.sizes = np.full(num_pieces, 10_000)
        self.fetched: list[list[int]] = []
        self.pieces: set[int] = set()

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def fetch(self, numbers: Sequence[int]) -> list[int]:
        self.fetched.append(list(numbers))
        return list(numbers)

    def chunk_sizes(self) -> Any:
        return self.sizes

    def window(self) -> int:
        return 1000

    def expect(self, now: Any, later: Any) -> None:
        self.pieces.update((np.concatenate([now, later]) // 10_000).tolist())


def test_a_resume_among_ten_million_samples_asks_for_nothing_that_lies_before() -> None:
    source = NotingSource(1000)
    loader = data.Dataset(source).shuffle().to_torch(batch_size=64)
    sharded = ShardedData(loader, num_shards=3, own_shards=range(1, 2), seed=1, joins_shards=True)
    order = sharded.order(0)
    assert order is not None
    assert order.num_batches == 52_084
    batch = next(sharded.iterate(0, 50_000))
    assert source.fetched == [batch.tolist()]
    # Those of the present window, and of the next one.
    assert len(source.pieces) <= 4
    assert batch.tolist() == list(order.shard(50_000, 1))


def test_loader_outside_of_a_run_has_an_order_for_each_epoch(parquet: Callable[..., Path]) -> None:
    files = data.read(parquet(30, 30))
    torch.manual_seed(3)
    loader = files.shuffle(window=15).to_torch(batch_size=8)
    epochs = [torch.cat([batch["id"] for batch in loader]).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(each) == list(range(60)) for each in epochs)
    loader.sampler.set_epoch(0)
    assert next(iter(loader))["id"].tolist() == epochs[0][:8]
    parts = [list(files.get_shard(rank, 7)) for rank in range(7)]
    assert [row["id"] for part in parts for row in part] == list(range(60))
    own = torch.cat([batch["id"] for batch in files.get_shard(1, 7).to_torch(batch_size=4)])
    assert own.tolist() == [row["id"] for row in parts[1]]
