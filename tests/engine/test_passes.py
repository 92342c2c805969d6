"""Where passes begin and end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paceline.creators._passes import DataPosition, Pass
from paceline.data._sharded_loader import ShardedData

CPU = torch.device("cpu")
# Five zeros and five ones, one a batch.
ZEROS_AND_ONES = TensorDataset(torch.tensor([0.0] * 5 + [1.0] * 5))


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def place_in(
    dataset: "Dataset[Any]", *, batch_size: int = 1, num_shards: int = 1, rank: int = 0
) -> DataPosition:
    data = ShardedData(
        DataLoader(dataset, batch_size=batch_size),
        num_shards=num_shards,
        own_shards=range(rank, rank + 1),
        seed=0,
        joins_shards=True,
    )
    return DataPosition(data)


def values_of(place: DataPosition, num_steps: int | None) -> tuple[list[float], int]:
    """Return the values of a pass, and its epoch."""
    batches = Pass(place, num_steps, CPU)
    values = [float(value) for (batch,) in batches for value in batch]
    batches.finish()
    return values, place.num_begun


def test_partial_passes_go_on_where_they_stopped() -> None:
    """The averages 1/2, 0, 1, 2/5 and 5/7 are those of the original's own test."""
    place = place_in(ZEROS_AND_ONES)
    averages, epochs = [], []
    for num_steps in (None, 5, 3, 5, None):
        values, epoch = values_of(place, num_steps)
        averages.append(sum(values) / len(values))
        epochs.append(epoch)
    assert averages == [0.5, 0, 1, 0.4, 5 / 7]
    assert epochs == [1, 2, 2, 3, 3]


def test_a_pass_that_ends_with_an_epoch_leaves_the_next_one_whole() -> None:
    place = place_in(ZEROS_AND_ONES)
    assert values_of(place, 10)[1] == 1
    assert (place.epoch, place.next_batch, place.num_begun) == (1, 0, 1)
    values, epoch = values_of(place, None)
    assert (len(values), epoch) == (10, 2)


def test_a_stream_goes_on_in_its_next_epoch() -> None:
    place = place_in(Counting())
    taken = []
    for num_steps in (5, None, 7, None):
        batches = Pass(place, num_steps, CPU)
        taken.append([int(batch) for batch in batches])
        batches.finish()
    assert taken == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1], [2, 3, 4]]
    with pytest.raises(TypeError, match="has no length"):
        len(Pass(place, None, CPU))


def test_data_without_batches_are_refused_and_no_pass_is_endless() -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ValueError, match="with batches, but has none. Hint: a generator"):
        list(Pass(place_in(Nothing()), 3, CPU))


def test_a_pass_can_be_gone_through_twice_and_counts_once() -> None:
    place = place_in(ZEROS_AND_ONES)
    values_of(place, 3)
    batches = Pass(place, 4, CPU)
    assert len(batches) == 4
    twice = [[float(batch) for (batch,) in batches] for _ in range(2)]
    assert twice == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert (batches.num_batches, batches.num_samples, place.next_batch) == (4, 4, 7)
    rest = Pass(place, None, CPU)
    assert len(rest) == 3
    assert float(next(rest)[0]) == 1.0
    assert len(list(rest._running or ())) == 2


def test_a_place_is_found_again_unless_the_data_are_others() -> None:
    place = place_in(ZEROS_AND_ONES)
    values_of(place, 7)
    again = place_in(ZEROS_AND_ONES)
    assert again.load_state(place.state())
    assert values_of(again, None) == ([1, 1, 1], 1)
    other = place_in(ZEROS_AND_ONES, batch_size=2)
    assert not other.load_state(place.state())
    assert (other.epoch, other.next_batch) == (0, 0)


def test_a_worker_without_samples_takes_part_in_training_and_not_in_validation() -> None:
    """Of 10 samples in two shards of 4, the third shard is the first worker's."""
    sizes = []
    for has_stand_ins in (True, False):
        place = place_in(ZEROS_AND_ONES, batch_size=4, num_shards=2, rank=1)
        batches = Pass(place, None, CPU, has_stand_ins=has_stand_ins)
        sizes.append(([len(batch) for (batch,) in batches], batches.num_samples))
    assert sizes == [([4, 2], 4), ([4], 4)]


# ---- statistics ----------------------------------------------------------------------------------


class ShuffledStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8).tolist())


def test_each_epoch_of_a_stream_has_a_seed_of_its_own() -> None:
    def epoch_of(place: DataPosition) -> list[int]:
        batches = Pass(place, None, CPU)
        return [int(value) for batch in batches for value in batch]

    place = place_in(ShuffledStream())
    first, second = epoch_of(place), epoch_of(place)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
