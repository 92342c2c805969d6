"""Samplers for loops of one's own."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from paceline.pytorch import samplers


def batches(num_samples: int, size: int) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(num_samples)), size, drop_last=False)


def test_repeating_goes_on_for_ever_and_keeps_the_length_of_a_pass() -> None:
    samples = samplers.RepeatSampler(range(3))
    assert len(samples) == 3
    assert list(islice(samples, 7)) == [0, 1, 2, 0, 1, 2, 0]
    repeated = samplers.RepeatBatchSampler(batches(5, 2))
    assert len(repeated) == 3
    assert list(islice(repeated, 4)) == [[0, 1], [2, 3], [4], [0, 1]]


@pytest.mark.parametrize(
    ("num_samples", "num_workers", "lengths"),
    [(19, 4, [5, 5, 5, 4]), (8, 4, [2, 2, 2, 2]), (3, 4, [1, 1, 1, 0]), (5, 1, [5])],
)
def test_ranks_share_all_samples_by_strides(
    num_samples: int, num_workers: int, lengths: list[int]
) -> None:
    shares = [
        samplers.DistributedSampler(range(num_samples), num_workers, rank)
        for rank in range(num_workers)
    ]
    assert [len(share) for share in shares] == lengths
    for rank, share in enumerate(shares):
        assert list(share) == list(range(rank, num_samples, num_workers))


def test_ranks_share_batches_by_strides() -> None:
    share = samplers.DistributedBatchSampler(batches(9, 2), 2, 1)
    assert (list(share), len(share)) == ([[2, 3], [6, 7]], 2)


def test_skipping_leaves_out_the_first_samples_once() -> None:
    skipping = samplers.SkipSampler(range(5), 3)
    assert len(skipping) == 5
    assert [list(skipping) for _ in range(2)] == [[3, 4], [0, 1, 2, 3, 4]]


def test_skipping_more_than_a_pass_reaches_into_the_next_one() -> None:
    skipping = samplers.SkipBatchSampler(batches(6, 2), 4)
    assert [list(skipping) for _ in range(3)] == [
        [],
        [[2, 3], [4, 5]],
        [[0, 1], [2, 3], [4, 5]],
    ]


def test_shuffling_is_the_same_for_a_seed_and_differs_by_pass() -> None:
    shuffled = samplers.ReproducibleShuffleSampler(range(5), 777)
    assert len(shuffled) == 5
    assert [list(shuffled) for _ in range(2)] == [[0, 4, 1, 2, 3], [2, 0, 1, 3, 4]]
    by_batch = samplers.ReproducibleShuffleBatchSampler(batches(10, 2), 777)
    assert [list(by_batch) for _ in range(2)] == [
        [[0, 1], [8, 9], [2, 3], [4, 5], [6, 7]],
        [[4, 5], [0, 1], [2, 3], [6, 7], [8, 9]],
    ]


def test_an_epoch_has_its_own_order_however_it_is_reached() -> None:
    straight = samplers.ReproducibleShuffleSampler(range(20), 5)
    orders = [list(straight) for _ in range(4)]
    resumed = samplers.ReproducibleShuffleSampler(range(20), 5)
    resumed.set_epoch(2)
    assert [list(resumed) for _ in range(2)] == orders[2:]
    resumed.set_epoch(1)
    assert list(resumed) == orders[1]


def test_an_epoch_reaches_the_shuffling_below_other_samplers() -> None:
    def stack() -> Any:
        shuffled = samplers.ReproducibleShuffleBatchSampler(batches(12, 2), 3)
        return samplers.DistributedBatchSampler(shuffled, 2, 1)

    straight, resumed = stack(), stack()
    orders = [list(straight) for _ in range(3)]
    resumed.set_epoch(2)
    assert list(resumed) == orders[2]


def test_only_what_is_built_on_a_sampler_that_knows_epochs_has_set_epoch() -> None:
    assert not hasattr(samplers.SkipSampler(range(3), 1), "set_epoch")
    shuffled = BatchSampler(samplers.ReproducibleShuffleSampler(range(6), 1), 2, drop_last=False)
    assert hasattr(samplers.RepeatBatchSampler(shuffled), "set_epoch")


def test_what_is_left_to_skip_follows_from_the_epoch() -> None:
    """Four of five are left out, then none; eight are all of one pass and three of the next."""
    shuffled = samplers.ReproducibleShuffleSampler(range(5), 3)
    lengths = {}
    for skip in (4, 8):
        skipping = samplers.SkipSampler(shuffled, skip)
        for epoch in (2, 0, 1):
            skipping.set_epoch(epoch)
            lengths[skip, epoch] = len(list(skipping))
    assert lengths == {(4, 0): 1, (4, 1): 5, (4, 2): 5, (8, 0): 0, (8, 1): 2, (8, 2): 5}


def test_shuffling_what_never_ends_is_refused() -> None:
    endless = samplers.RepeatSampler(range(3))
    with pytest.raises(ValueError, match="Hint: shuffle first, then repeat"):
        samplers.ReproducibleShuffleSampler(endless, 1)
    with pytest.raises(ValueError, match="this one repeats for ever"):
        samplers.ReproducibleShuffleBatchSampler(BatchSampler(endless, 2, False), 1)


def test_repeating_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must yield something"):
        next(iter(samplers.RepeatSampler([])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: samplers.DistributedSampler(range(3), 0, 0), "`num_workers`.*but got 0"),
        (lambda: samplers.DistributedSampler(range(3), 2, 2), "`rank` must be from 0 to 1"),
        (lambda: samplers.SkipSampler(range(3), -1), "`skip`.*but got -1"),
        (lambda: samplers.adapt_batch_sampler(batches(3, 1), rank=1), "`rank` must be from 0 to 0"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_adapting_shards_then_repeats_then_skips() -> None:
    """Three batches on two ranks: every pass of a rank stays a part of one pass over the data."""
    plain = batches(6, 2)
    assert samplers.adapt_batch_sampler(plain) is plain
    adapted = samplers.adapt_batch_sampler(plain, repeat=True, skip=1, num_replicas=2, rank=0)
    assert list(islice(adapted, 4)) == [[4, 5], [0, 1], [4, 5], [0, 1]]


def test_a_loader_takes_them() -> None:
    loader = DataLoader(range(7), batch_sampler=samplers.SkipBatchSampler(batches(7, 2), 2))
    assert [batch.tolist() for batch in loader] == [[4, 5], [6]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6]]
