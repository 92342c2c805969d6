"""A worker's shards as one batch: the same samples for any number of workers."""

import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data._order_and_random_generators import worker_shards
from paceline.data._sharded_loader import ShardedData, worker_batches


class Numbers(Dataset[Any]):
    """The numbers below `size`, each with a random one as of an augmentation."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> Any:
        return index, random.random()

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter({"x": torch.tensor([i]), "name": str(i)} for i in range(self.size))


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Put the handler back that torch installs for its loader processes."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


def parts(loader: Any, world_size: int, num_shards: int, start: int = 0) -> list[Any]:
    """Return what each worker gets, as a list per worker."""
    return [
        list(
            worker_batches(
                ShardedData(
                    loader,
                    num_shards=num_shards,
                    own_shards=worker_shards(num_shards, rank, world_size),
                    seed=5,
                    joins_shards=True,
                ),
                0,
                start,
            )
        )
        for rank in range(world_size)
    ]


def test_global_batches_hold_the_same_samples_for_any_number_of_workers() -> None:
    loader = DataLoader(Numbers(21), batch_size=2, shuffle=True)
    found = []
    for world_size in (1, 2, 4):
        workers = parts(loader, world_size, num_shards=4)
        assert [[b.num_all for b in batches] for batches in workers] == [[8, 8, 5]] * world_size
        found.append(
            [
                [i for batch in step for i in batch.data[0].tolist()[: batch.num_own]]
                for step in zip(*workers, strict=True)
            ]
        )
    assert found[0] == found[1] == found[2]
    assert sorted(i for batch in found[0] for i in batch) == list(range(21))


def test_worker_without_samples_gets_a_stand_in() -> None:
    workers = parts(DataLoader(Numbers(9), batch_size=2), 3, num_shards=3)
    last = [batches[-1] for batches in workers]
    assert [batch.num_own for batch in last] == [2, 1, 0]
    assert [batch.data[0].tolist() for batch in last] == [[6, 7], [8], [6, 7]]
    assert {batch.num_all for batch in last} == {3}


def test_augmentation_of_loader_workers_is_that_of_the_shard() -> None:
    loader = DataLoader(Numbers(16), batch_size=2, num_workers=1, shuffle=True)
    alone = {int(i): a for b in parts(loader, 1, 4)[0] for i, a in zip(*b.data, strict=True)}
    split = {
        int(i): a
        for batches in parts(loader, 2, 4, start=1)
        for b in batches
        for i, a in zip(*b.data, strict=True)
    }
    assert len(split) == 8
    assert split.items() <= alone.items()


def test_streams_are_joined_too() -> None:
    loader = DataLoader(Stream(7), batch_size=1)
    workers = parts(loader, 2, num_shards=4)
    assert [b.data["x"].flatten().tolist() for b in workers[0]] == [[0, 1], [4, 5]]
    assert [b.data["name"] for b in workers[1]] == [["2", "3"], ["6"]]
    assert [b.num_own for b in workers[1]] == [2, 1]
    assert [b.num_all for b in workers[1]] == [4, 3]
    (first,) = parts(DataLoader(Stream(5), batch_size=1), 2, num_shards=4, start=1)[1]
    assert (first.num_own, first.data["name"]) == (0, ["4"])


def test_what_cannot_be_joined_is_refused() -> None:
    loader = DataLoader(Stream(4), batch_size=1, collate_fn=lambda samples: object())
    with pytest.raises(TypeError, match="no length|to be joined"):
        parts(loader, 1, num_shards=2)
