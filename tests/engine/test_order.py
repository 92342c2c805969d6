"""The order of samples and its shards."""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline._base.arguments_and_errors import mix_seed
from paceline.data._order_and_random_generators import (
    CutIndices,
    EpochOrder,
    shuffled_indices,
    without_rest,
    worker_shards,
)
from paceline.data._sharded_loader import ShardedData


@given(num_shards=st.integers(1, 20), world_size=st.integers(1, 25))
def test_every_shard_has_one_worker_and_workers_run_them_in_order(
    num_shards: int, world_size: int
) -> None:
    parts = [worker_shards(num_shards, rank, world_size) for rank in range(world_size)]
    assert list(chain(*parts)) == list(range(num_shards))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_order_is_a_permutation_that_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(5)
    first = shuffled_indices(100, seed=1, epoch=2)
    torch.manual_seed(6)
    assert shuffled_indices(100, seed=1, epoch=2) == first
    assert sorted(first) == list(range(100))
    assert shuffled_indices(100, seed=1, epoch=3) != first
    assert shuffled_indices(100, seed=2, epoch=2) != first


@given(num_samples=st.integers(0, 40), size=st.integers(1, 7), drop_last=st.booleans())
def test_cut_indices_are_those_of_a_batch_sampler(
    num_samples: int, size: int, drop_last: bool
) -> None:
    sampler = SequentialSampler(range(num_samples))
    expected = list(BatchSampler(sampler, size, drop_last))
    shards = CutIndices(range(num_samples), size, drop_last=drop_last)
    assert [list(shard) for shard in shards] == expected
    assert [list(shard) for shard in shards[1:3]] == expected[1:3]
    assert len(shards) == len(expected)
    assert [list(shard) for shard in shards.from_shard(2)] == expected[2:]


def test_neighbouring_seeds_mix_to_unrelated_ones() -> None:
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert mix_seed(1, 2) != mix_seed(2, 1)


@given(num_samples=st.integers(1, 60), size=st.integers(1, 7), num_shards=st.integers(1, 5))
def test_batches_of_any_number_of_workers_hold_the_same_samples(
    num_samples: int, size: int, num_shards: int
) -> None:
    loader = DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=size, shuffle=True)

    def batches(world_size: int) -> list[list[int]]:
        whole = ShardedData(
            loader, num_shards=num_shards, own_shards=range(num_shards), seed=3
        ).order(1)
        assert whole is not None
        return [
            sorted(
                index
                for rank in range(world_size)
                for shard in worker_shards(num_shards, rank, world_size)
                for index in whole.shard(batch, shard)
            )
            for batch in range(whole.num_batches)
        ]

    expected = batches(1)
    assert sorted(chain(*expected)) == list(range(num_samples))
    for world_size in range(2, num_shards + 1):
        assert batches(world_size) == expected


@pytest.mark.parametrize("start", [0, 1, 3])
def test_iteration_from_a_batch_on_gives_the_tail_of_the_epoch(start: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(23)), batch_size=2, shuffle=True)
    data = ShardedData(loader, num_shards=3, own_shards=range(1, 3), seed=9)
    whole = [item[0].tolist() for item in data.iterate(0)]
    order = data.order(0)
    assert isinstance(order, EpochOrder)
    skipped = sum(bool(len(order.shard(b, s))) for b in range(start) for s in (1, 2))
    assert [item[0].tolist() for item in data.iterate(0, start)] == whole[skipped:]


def test_batch_sampler_of_the_user_keeps_its_batches() -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)

    class Own(BatchSampler):
        """Not torch's own, so its batches are taken as they are."""

    own = Own(sampler.sampler, 3, False)
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=own)
    data = ShardedData(loader, num_shards=2, own_shards=range(2), seed=0)
    assert [item[0].tolist() for item in data.iterate(0)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_drop_last_drops_the_samples_that_fill_no_shard() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4, drop_last=True)
    order = ShardedData(loader, num_shards=2, own_shards=range(2), seed=0).order(0)
    assert order is not None
    assert (order.num_batches, order.num_records(0)) == (1, 8)


def test_empty_data_set_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(0)))
    with pytest.raises(ValueError, match="must have samples"):
        ShardedData(loader, num_shards=1, own_shards=range(1), seed=0)


@pytest.mark.parametrize(
    ("num_samples", "num_shards", "num_kept"), [(14, 4, 8), (8, 2, 8), (7, 2, 7)]
)
def test_shards_that_make_no_whole_batch_are_left_out(
    num_samples: int, num_shards: int, num_kept: int
) -> None:
    shards = CutIndices(range(num_samples), 2, drop_last=False)
    kept = without_rest(shards, num_shards)
    assert isinstance(kept, CutIndices)
    assert [index for shard in kept for index in shard] == list(range(num_kept))
    assert list(without_rest(list(shards), num_shards)) == list(kept)


def test_a_sampler_of_ones_own_is_not_read_before_its_epoch_begins() -> None:
    class Told(Sampler[int]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            drawn.append(len(drawn))
            return iter(range(4))

    drawn: list[int] = []
    dataset = TensorDataset(torch.arange(4))
    loaders = {
        "own": DataLoader(dataset, 2, sampler=Told()),
        "shuffled": DataLoader(dataset, 2, shuffle=True),
        "weighted": DataLoader(dataset, 2, sampler=WeightedRandomSampler([1.0] * 4, 4)),
    }
    data = {
        name: ShardedData(loader, num_shards=1, own_shards=range(1), seed=0)
        for name, loader in loaders.items()
    }
    assert data["own"].known_order(0) is None
    assert not drawn
    order = data["own"].order(0)
    assert data["own"].known_order(0) is order
    assert data["own"].known_order(1) is None
    assert drawn == [0]
    # Its weights may be changed between two epochs.
    assert data["weighted"].known_order(0) is None
    assert data["shuffled"].known_order(1) is not None
