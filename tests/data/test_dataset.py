"""A data set's operations over what lies in memory."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from paceline.data import Dataset


def is_even(number: int) -> bool:
    return number % 2 == 0


def squares() -> Dataset:
    return Dataset(list(range(10))).map(lambda number: number * number)


def test_operations_are_lazy_and_leave_the_data_set_as_it_is() -> None:
    called = []
    numbers = Dataset(range(10))
    changed = numbers.map(lambda number: called.append(number) or -number).filter(is_even)
    assert called == []
    assert list(changed) == [0, -2, -4, -6, -8]
    assert (len(changed), changed[-1], changed[1]) == (5, -8, -2)
    assert list(numbers) == list(range(10))
    assert list(numbers.map_batches(lambda batch: [x + len(batch) for x in batch]))[0] == 10
    with pytest.raises(ValueError, match="as many samples as it gets, but got 10 and returned 1"):
        list(numbers.map_batches(lambda batch: batch[:1]))
    with pytest.raises(IndexError, match="from 0 to 9, but got 10"):
        numbers[10]


def test_arrays_and_torch_data_sets_are_data_sets() -> None:
    tensors = TensorDataset(torch.arange(4), torch.arange(4) * 2.0)
    x, y = next(iter(Dataset(tensors).to_torch(batch_size=3)))
    assert (x.tolist(), y.tolist()) == ([0, 1, 2], [0.0, 2.0, 4.0])
    assert next(iter(Dataset(torch.arange(6)).to_torch(batch_size=2))).tolist() == [0, 1]
    loader = Dataset(tensors).map(lambda sample: sample[1]).to_torch(2, collate=sum)
    assert [float(each) for each in loader] == [2.0, 10.0]
    with pytest.raises(TypeError, match="a sequence, an array or an iterable, but got int"):
        Dataset(1)


def test_filter_counts_once_and_travels_without_its_function() -> None:
    counted = []
    kept = squares().filter(lambda number: counted.append(number) is None and number > 10)
    assert len(kept) == 6
    assert list(kept) == [16, 25, 36, 49, 64, 81]
    assert len(counted) == 10
    numbers = Dataset(range(10)).filter(lambda number: number > 6)
    assert list(pickle.loads(pickle.dumps(numbers))) == [7, 8, 9]


def test_parts_are_disjoint_and_whole() -> None:
    for seed in (None, 3):
        parts = squares().split((0.7, 0.3), seed=seed)
        assert [len(part) for part in parts] == [7, 3]
        assert sorted(x for part in parts for x in part) == [n * n for n in range(10)]
    assert [list(part) for part in Dataset(range(5)).split(2, seed=None)] == [[0, 1, 2], [3, 4]]
    assert [len(part) for part in Dataset(range(5)).split((2, 1))] == [2, 1]
    with pytest.raises(ValueError, match="from 1 to the number of samples, which is 2"):
        Dataset([1, 2]).split(3)
    with pytest.raises(ValueError, match="must sum to at most 1"):
        Dataset([1, 2]).split((0.5, 0.6))
    with pytest.raises(ValueError, match=r"Each part must have a sample.*gives \[2, 0\]"):
        Dataset([1, 2]).split((0.9, 0.1))


def test_each_sample_is_validated_in_one_fold() -> None:
    folds = Dataset(range(7)).to_cv(splits=3)
    assert [len(fold.validation) for fold in folds] == [3, 2, 2]
    assert sorted(x for fold in folds for x in fold.validation) == list(range(7))
    for train, validation in folds:
        assert sorted([*train, *validation]) == list(range(7))
    assert Dataset(range(7)).to_cv(3)[0].train[0] == folds[0].train[0]
    with pytest.raises(ValueError, match="number of samples, which is 2, but got 3"):
        Dataset([1, 2]).to_cv(splits=3)
    with pytest.raises(ValueError, match="`splits` must be at least 2, but got 1"):
        Dataset([1, 2]).to_cv(splits=1)


def test_shards_are_every_so_many_samples() -> None:
    shards = [Dataset(range(7)).get_shard(rank, 3) for rank in range(3)]
    assert [list(shard) for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [len(shard) for shard in shards] == [3, 2, 2]
    assert shards[1][-1] == 4
    assert list(shards[0].map(str)) == ["0", "3", "6"]
    assert next(iter(shards[0].to_torch(batch_size=3))).tolist() == [0, 3, 6]
    with pytest.raises(ValueError, match="`rank` must be from 0 to 2, but got 3"):
        Dataset(range(7)).get_shard(3, 3)


class Counting(IterableDataset[int]):
    """Numbers from 0 on, which can be gone on with."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 8:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_streams_have_the_operations_that_need_no_numbers() -> None:
    stream = Dataset(Counting()).filter(is_even).map(float)
    assert stream.is_stream
    assert [x.tolist() for x in stream.to_torch(batch_size=3)] == [[0.0, 2.0, 4.0], [6.0]]
    assert list(stream.map_batches(lambda batch: [len(batch)] * len(batch))) == [4] * 4
    assert sorted(stream.shuffle(window=2)) == [0.0, 2.0, 4.0, 6.0]
    assert list(Dataset(iter("abc")).get_shard(1, 2)) == ["b"]
    view = stream.to_torch().dataset
    view.load_state_dict({"place": 5})
    assert list(view) == [6.0]
    # Samples that a buffer holds are in no state.
    assert not hasattr(stream.shuffle().to_torch().dataset, "state_dict")
    for operation in (len, lambda data: data.split(2), lambda data: data[0]):
        with pytest.raises(TypeError, match="the Counting is read from its beginning to its end"):
            operation(stream)


@pytest.mark.parametrize("name", ["map", "map_batches", "filter"])
def test_what_is_no_function_is_refused_at_once(name: str) -> None:
    for data in (Dataset(range(3)), Dataset(Counting())):
        with pytest.raises(TypeError, match="must be a function, but got 3"):
            getattr(data, name)(3)


def test_settings_of_reading_are_checked() -> None:
    numbers = Dataset(range(3)).pipeline(4).pipeline(pipeline_args={"window": 7})
    assert (numbers.plan.ahead, numbers.plan.window) == (4, 7)
    with pytest.raises(ValueError, match=r"must be among \['length', 'window'\], but got \['a'\]"):
        numbers.pipeline(pipeline_args={"a": 1})
    with pytest.raises(ValueError, match="`length` must be an integer from 0 on, but got -1"):
        numbers.pipeline(length=-1)


def test_columns_in_a_dictionary_are_refused_with_a_hint() -> None:
    with pytest.raises(TypeError, match=r"keys \['a', 'b'\]\. Hint: .*TensorDataset"):
        Dataset({"a": [1, 2], "b": [3, 4]})
    assert list(Dataset({0: "x", 1: "y"})) == ["x", "y"]


def test_another_epoch_of_a_generator_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    once, again = Dataset(n for n in range(3)), Dataset({1})
    assert list(once) == [0, 1, 2]
    assert list(again) == list(again) == [1]
    assert not caplog.records
    assert list(once) == []
    assert "the generator are there once" in caplog.text
