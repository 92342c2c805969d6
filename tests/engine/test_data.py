"""The user's loader in shards: every option kept, only the order decided here."""

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from paceline.data._sharded_loader import ShardedData


class Numbers(Dataset[Any]):
    """Sample i is the number i, what `handle` says, and the process that fetched it."""

    handle = "unopened"

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor(index), "handle": self.handle, "pid": os.getpid()}


def open_handle(worker_id: int) -> None:
    """Do in a loader's worker process what must not be done before the fork."""
    info = get_worker_info()
    assert info is not None
    info.dataset.handle = f"opened by {worker_id}"


@pytest.fixture(autouse=True)
def handler_of_ended_processes() -> Iterator[None]:
    """Put back the signal handler that torch leaves behind with its first worker process."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


def sharded(loader: Any, *, num_shards: int = 1, seed: int = 1) -> ShardedData:
    return ShardedData(loader, num_shards=num_shards, own_shards=range(num_shards), seed=seed)


def numbers(data: ShardedData, epoch: int = 0, start_batch: int = 0) -> list[list[int]]:
    return [shard["x"].tolist() for shard in data.iterate(epoch, start_batch)]


def test_batches_are_those_of_the_loader_from_any_one_on() -> None:
    data = sharded(DataLoader(Numbers(), batch_size=3), num_shards=2)
    assert numbers(data) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert numbers(data, start_batch=1) == [[6, 7, 8], [9]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_sampler_for_several_ranks_gives_all_samples_as_shards_are_dealt_here(
    shuffle: bool,
) -> None:
    ranks = []
    for rank in range(2):
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=rank, shuffle=shuffle, seed=3)
        loader = DataLoader(Numbers(), batch_size=2, sampler=sampler)
        own = range(rank, rank + 1)
        data = ShardedData(loader, num_shards=2, own_shards=own, seed=1)
        ranks.append([number for shard in numbers(data, epoch=4) for number in shard])
        assert (sampler.num_replicas, sampler.rank) == (2, rank)
    assert sorted(ranks[0] + ranks[1]) == list(range(10))
    if not shuffle:
        assert ranks == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]


def test_incomplete_batch_is_dropped_if_the_loader_drops_it() -> None:
    data = sharded(DataLoader(Numbers(), batch_size=3, drop_last=True))
    assert numbers(data) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_batch_sampler_of_the_users_decides_what_is_in_a_batch() -> None:
    class ByParity(BatchSampler):
        def __init__(self) -> None:
            pass

        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 2, 4, 6, 8]
            yield [1, 3]

        def __len__(self) -> int:
            return 2

    data = sharded(DataLoader(Numbers(), batch_sampler=ByParity()))
    assert numbers(data) == [[0, 2, 4, 6, 8], [1, 3]]


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("kind", ["weighted", "with replacement"])
def test_random_sampler_draws_an_epoch_alike_however_it_is_reached(
    kind: str, has_generator: bool
) -> None:
    def data() -> ShardedData:
        generator = torch.Generator().manual_seed(3) if has_generator else None
        sampler: Any = RandomSampler(range(10), replacement=True, generator=generator)
        if kind == "weighted":
            weights = [float(index) for index in range(10)]
            sampler = WeightedRandomSampler(weights, 8, generator=generator)
        return sharded(DataLoader(Numbers(), batch_size=4, sampler=sampler))

    straight = data()
    epochs = [numbers(straight, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert numbers(data(), 2) == epochs[2]
    assert kind != "weighted" or all(0 not in batch for epoch in epochs for batch in epoch)


def test_drawing_an_order_leaves_the_process_generators_alone() -> None:
    loader = DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(range(10), num_samples=20))
    before = torch.get_rng_state()
    sharded(loader).order(0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_function_is_kept(num_workers: int) -> None:
    def only_sum(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([sample["x"] for sample in samples]).sum()}

    loader = DataLoader(Numbers(), batch_size=5, collate_fn=only_sum, num_workers=num_workers)
    assert [batch["x"].item() for batch in sharded(loader).iterate(0)] == [10, 35]


def test_worker_processes_are_set_up_kept_and_asked_ahead_as_the_loader_says() -> None:
    loader = DataLoader(
        Numbers(),
        batch_size=1,
        num_workers=2,
        worker_init_fn=open_handle,
        persistent_workers=True,
        prefetch_factor=5,
        timeout=30,
    )
    data = sharded(loader)
    shards = [list(data.iterate(epoch)) for epoch in range(2)]
    handles = {shard["handle"][0] for epoch in shards for shard in epoch}
    assert handles == {"opened by 0", "opened by 1"}
    pids = [{shard["pid"].item() for shard in epoch} for epoch in shards]
    assert pids[0] == pids[1]
    assert os.getpid() not in pids[0]
    clone = data._clone
    assert (clone.prefetch_factor, clone.timeout, clone.persistent_workers) == (5, 30, True)
    assert Numbers.handle == loader.dataset.handle == "unopened"  # type: ignore[attr-defined]


def test_attributes_of_the_data_set_are_within_reach_in_worker_processes() -> None:
    def size(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.handle = str(info.dataset.size)

    loader = DataLoader(Numbers(4), batch_size=4, num_workers=1, worker_init_fn=size)
    assert next(iter(sharded(loader).iterate(0)))["handle"] == ["4"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_processes_start_as_the_loader_says(method: str) -> None:
    loader = DataLoader(
        torch.utils.data.TensorDataset(torch.arange(4)),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=method,
    )
    assert [batch[0].tolist() for batch in sharded(loader).iterate(0)] == [[0, 1], [2, 3]]


def test_batches_come_in_order_even_if_the_loader_need_not() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                torch.rand(3_000_000).sort()
            return super().__getitem__(index)

    loader = DataLoader(Slow(), batch_size=1, num_workers=2, in_order=False)
    assert numbers(sharded(loader)) == [[index] for index in range(10)]


def test_pinned_memory_does_no_harm_without_a_gpu() -> None:
    with warnings.catch_warnings():
        # torch itself says that there is nothing to pin for.
        warnings.filterwarnings("ignore", message="'?pin_memory'? argument")
        data = sharded(DataLoader(Numbers(4), batch_size=2, pin_memory=True))
        assert data._clone.pin_memory
        assert numbers(data) == [[0, 1], [2, 3]]


def test_traces_show_the_batches_that_are_read_meanwhile() -> None:
    data = sharded(DataLoader(Numbers(), batch_size=2, shuffle=True))
    batches = data.iterate(0)
    read = [next(batches)]
    with torch.profiler.profile() as profile:
        read += [next(batches), next(batches)]
    read += batches
    marks = [event for event in profile.events() if "enumerate(DataLoader)" in event.name]
    assert len(marks) == 2
    assert [batch["x"].tolist() for batch in read] == numbers(data)


def test_loader_of_the_users_own_class_stays_one() -> None:
    class Doubling(DataLoader[Any]):
        def __init__(self, factor: int) -> None:
            super().__init__(Numbers(4), batch_size=2)
            self.factor = factor

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield {"x": self.factor * batch["x"]}

    loader = Doubling(2)
    assert numbers(sharded(loader)) == [[0, 2], [4, 6]]
    assert [batch["x"].tolist() for batch in loader] == [[0, 2], [4, 6]]


def test_the_users_loader_stays_as_it_was() -> None:
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=1)
    data = sharded(loader)
    numbers(data)
    assert type(loader.dataset) is Numbers
    assert type(loader.sampler) is SequentialSampler
    assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_loader_that_does_not_batch_is_refused() -> None:
    data = sharded(DataLoader(Numbers(), batch_size=None))
    with pytest.raises(ValueError, match="must batch its samples, but `batch_size` is None. Hint"):
        data.order(0)


@pytest.mark.timeout(20)
def test_sampler_that_never_ends_is_refused() -> None:
    class Endless(RandomSampler):
        is_endless = True

        def __iter__(self) -> Iterator[int]:
            while True:
                yield from super().__iter__()

    data = sharded(DataLoader(Numbers(), batch_size=2, sampler=Endless(range(10))))
    with pytest.raises(ValueError, match="must end"):
        data.order(0)
