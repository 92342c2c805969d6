"""Errors of reading samples name the samples, in this process and in a loader's."""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from paceline import data
from paceline.data._order_and_random_generators import (
    SeededShardDataset,
    make_seeded_shard,
    note_samples,
)
from paceline.data._sharded_loader import ShardedData


class Pictures(Dataset[int]):
    """Ten numbers, of which one cannot be read."""

    def __init__(self, fail: Callable[[], Any], bad: int = 6) -> None:
        self.fail = fail
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            self.fail()
        return index


class Batches(Pictures):
    """The same, read by the batch."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.bad and 1 // (index - self.bad) for index in indices]


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """End the loaders that errors keep, and put the handler back that torch installs for them."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    gc.collect()
    signal.signal(signal.SIGCHLD, handler)


def divide() -> float:
    return 1 / 0


def error_of(loader: Any) -> Any:
    """Return what reading an epoch as the second of two workers raises."""
    sharded = ShardedData(loader, num_shards=2, own_shards=range(1, 2), seed=1, joins_shards=True)
    with pytest.raises((ZeroDivisionError, RuntimeError, ValueError)) as caught:
        list(sharded.iterate(0))
    return caught.value


@pytest.mark.parametrize(
    ("dataset", "note"),
    [
        (Pictures(divide), "While reading sample 6 of Pictures."),
        (Subset(Pictures(divide, bad=9), range(3, 10)), "While reading sample 9 of Pictures."),
        (
            ConcatDataset([Pictures(divide, bad=-1), Pictures(divide, bad=8)]),
            "While reading sample 18 of ConcatDataset.",
        ),
        (Batches(divide), "While reading samples 6, 7 of Batches."),
    ],
)
def test_the_sample_that_cannot_be_read_is_named(dataset: Any, note: str) -> None:
    error = error_of(DataLoader(dataset, batch_size=2))
    assert error.__notes__ == [note]


def test_a_sample_that_a_function_of_map_does_not_take_is_named() -> None:
    mapped = data.Dataset(range(10)).map(lambda number: 1 / (number - 7))
    error = error_of(mapped.to_torch(batch_size=2))
    assert error.__notes__ == ["While reading sample 7, in `map`."]


def test_samples_that_make_no_batch_are_listed() -> None:
    def collate(samples: list[int]) -> float:
        return 1 / (len(samples) - 20)

    class Many(Pictures):
        def __len__(self) -> int:
            return 60

    error = error_of(DataLoader(Many(divide, bad=-1), batch_size=20, collate_fn=collate))
    numbers = ", ".join(map(str, range(20, 36)))
    assert error.__notes__ == [f"While reading samples {numbers}, ... of Many."]


def test_what_torch_collates_is_refused_with_a_reason() -> None:
    ragged = [torch.zeros(1 + (number == 7)) for number in range(10)]
    error = error_of(DataLoader(ragged, batch_size=2))  # type: ignore[arg-type]
    assert "must be alike, but a sample has the shapes [1] and [2]. Hint:" in str(error)
    assert error.__notes__ == ["While reading samples 6, 7 of list."]


def test_the_sample_is_named_where_a_loaders_process_reads_a_shard() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        SeededShardDataset(Pictures(divide)).__getitems__(make_seeded_shard([5, 6, 7], 1))
    assert caught.value.__notes__ == ["While reading sample 6 of Pictures."]


@pytest.mark.slow
def test_the_sample_is_named_if_a_loaders_process_reads_it() -> None:
    error = error_of(DataLoader(Pictures(divide), batch_size=2, num_workers=1))
    assert isinstance(error, ZeroDivisionError)
    told = str(error) + str(getattr(error, "__notes__", ""))
    assert "While reading sample" in told
    assert told.count("While reading") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "options", "hint"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "was killed, as happens if the memory"),
        (signal.pause, {"timeout": 0.2}, "gave no batch within the loader's `timeout`"),
    ],
)
def test_a_loaders_process_that_is_lost_comes_with_a_hint(
    fail: Callable[[], Any], options: dict[str, Any], hint: str
) -> None:
    error = error_of(DataLoader(Pictures(fail), batch_size=2, num_workers=1, **options))
    (note,) = error.__notes__
    assert hint in note


def test_a_loaders_process_that_is_lost_while_it_sends_comes_with_a_hint(tmp_path: Path) -> None:
    def receive() -> None:
        ours, theirs = multiprocessing.Pipe()
        theirs.close()
        ours.recv()

    def connect() -> None:
        Client(str(tmp_path / "no listener"))

    for fail in receive, connect:
        with pytest.raises((EOFError, FileNotFoundError)) as caught:
            fail()
        note_samples(caught.value, Pictures(divide), [1, 2])
        (note,) = caught.value.__notes__
        assert "a process of the data loader was killed" in note


@pytest.mark.slow
def test_a_loaders_process_that_hangs_ends_with_the_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # How long the loader waits for its process to leave before it ends it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    pictures = Pictures(lambda: time.sleep(600))
    error = error_of(DataLoader(pictures, batch_size=2, num_workers=1, timeout=0.2))
    assert "DataLoader timed out after" in str(error)
    del error
    gc.collect()
    for process in multiprocessing.active_children():
        process.join(20)
        assert process.exitcode == 0


def test_an_iterable_without_a_length_is_refused_with_a_hint() -> None:
    loader: Any = DataLoader((number for number in range(3)), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got generator. Hint: `paceline.data.Dataset\(it\)"):
        ShardedData(loader, num_shards=1, own_shards=range(1), seed=1)
