"""Partitioned streams: each sample once an epoch, and an exact resume, for any worker count."""

import io
import json
import random
import signal
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import Dataset, stream_pieces
from paceline.data._sharded_loader import ShardedData, worker_batches
from paceline.storage._checkpoint_errors import CheckpointMismatchError

SIZES = (9, 0, 17, 5, 12, 1, 8)


@pytest.fixture(autouse=True)
def reaped() -> Iterator[None]:
    """Put back the handler that torch installs when a loader starts processes."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "noise": random.random()}


def numbers(part: list[int]) -> Iterator[dict[str, int]]:
    for piece in part:
        first = sum(SIZES[:piece])
        yield from ({"id": number} for number in range(first, first + SIZES[piece]))


def hugging_face() -> Any:
    import datasets

    datasets.disable_progress_bars()
    stream = datasets.IterableDataset.from_generator(
        numbers, gen_kwargs={"part": list(range(len(SIZES)))}
    )
    return stream.shuffle(seed=1, buffer_size=4).map(noisy)


def noisy_collate(samples: list[Any]) -> Any:
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "noise": torch.tensor([sample["noise"] for sample in samples]),
        "more": torch.rand(len(samples)),
    }


class Read:
    """A stream with three shards of two samples, as a worker with some of them reads it."""

    def __init__(self, own: range = range(3), processes: int = 0) -> None:
        loader = DataLoader(
            hugging_face(), batch_size=2, num_workers=processes, collate_fn=noisy_collate
        )
        self.data = ShardedData(loader, num_shards=3, own_shards=own, seed=5)

    def batches(self, start: int = 0, epoch: int = 0, **options: Any) -> Iterator[list[list[Any]]]:
        for shards in self.data.iterate_stream(epoch, start, **options):
            yield [[part[name].tolist() for name in ("id", "noise", "more")] for part in shards]

    def resumed(self, state: Any, start: int) -> list[list[list[Any]]]:
        self.data.load_stream_state(json.loads(json.dumps(state)))
        return list(self.batches(start))


def ids(batches: list[list[list[Any]]]) -> list[int]:
    return [number for shards in batches for shard in shards for number in shard[0]]


@pytest.mark.long
@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_in_partitions_goes_on_anywhere_as_often_as_one_likes(processes: int) -> None:
    straight = Read(processes=processes)
    whole = list(straight.batches())
    assert sorted(ids(whole)) == list(range(sum(SIZES)))
    assert list(straight.batches(epoch=1)) != whole
    assert list(straight.batches()) == whole
    # Each partition by itself, as one worker for each reads them without asking the others.
    alone = [Read(range(partition, partition + 1)).batches(agrees=False) for partition in range(3)]
    if not processes:
        assert sorted(sum((ids(list(each)) for each in alone), [])) == list(range(sum(SIZES)))
    stops = range(1, len(whole), 3) if not processes else (4,)
    for stop in stops:
        first = Read(processes=processes)
        random.seed(stop)
        torch.manual_seed(stop)
        assert list(islice(first.batches(), stop)) == whole[:stop]
        # A second kill follows soon, and other numbers were drawn meanwhile.
        second = Read(processes=processes)
        state = first.data.stream_state()
        second.data.load_stream_state(state)
        again = list(islice(second.batches(stop), 1))
        assert again == whole[stop : stop + 1]
        third = Read(processes=0)
        assert again + third.resumed(second.data.stream_state(), stop + 1) == whole[stop:]


def test_only_the_present_pieces_are_read_again() -> None:
    read: list[tuple[int, int]] = []

    class Recorded(IterableDataset[int]):
        num_shards = 6

        def shard(self, num_shards: int, index: int) -> Iterator[int]:
            assert num_shards == 6
            return self.numbers(index)

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("It is read in pieces.")

        def numbers(self, index: int) -> Iterator[int]:
            for number in range(100 * index, 100 * index + 20):
                read.append((index, number))
                yield number

    def shards() -> ShardedData:
        loader = Dataset(Recorded()).map(lambda number: -number).to_torch(batch_size=5)
        return ShardedData(loader, num_shards=2, own_shards=range(2), seed=5)

    first = shards()
    whole = [[part.tolist() for part in batch] for batch in islice(first.iterate_stream(), 9)]
    # Partitions have every second piece, in order as nothing is mixed.
    assert [batch[0][0] for batch in whole[::4]] == [0, -200, -400]
    assert [batch[1][0] for batch in whole[::4]] == [-100, -300, -500]
    state = first.stream_state()
    read.clear()
    second = shards()
    second.load_stream_state(state)
    rest = [[part.tolist() for part in batch] for batch in second.iterate_stream(0, 9)]
    assert rest == [[[-n for n in range(s + 5, s + 10)] for s in (400, 500)], *rest[1:]]
    assert {piece for piece, _ in read} == {2, 3, 4, 5}
    assert not first.is_read_whole
    other = ShardedData(DataLoader(Recorded()), num_shards=3, own_shards=range(3), seed=5)
    with pytest.raises(CheckpointMismatchError, match="had 2 partitions then and has 3 now"):
        other.load_stream_state(state)
    fewer = ShardedData(DataLoader(Recorded()), num_shards=7, own_shards=range(7), seed=5)
    assert fewer.is_read_whole
    with pytest.raises(CheckpointMismatchError, match="a piece for each of 7 shards"):
        fewer.load_stream_state(state)


def test_an_epoch_that_an_earlier_version_began_is_read_whole_to_its_end() -> None:
    earlier = Read()
    earlier.data.load_stream_state(None)
    rest = list(earlier.batches(4))
    assert earlier.data.stream_state() is None
    whole = Read().data._whole
    batches = list(whole.iterate(0, 4))
    assert [[shard["id"].tolist() for shard in batch] for batch in batches] == [
        [shard[0] for shard in batch] for batch in rest
    ]
    assert list(earlier.batches(epoch=1)) == list(Read().batches(epoch=1))


def test_a_worker_whose_partitions_have_ended_gets_others_samples_that_do_not_count() -> None:
    data = ShardedData(
        DataLoader(hugging_face(), batch_size=2), num_shards=3, own_shards=range(3), seed=5
    )
    batches = list(worker_batches(data, 0, 0))
    assert sum(batch.num_own for batch in batches) == sum(SIZES)
    sizes = [batch.sizes for batch in data.iterate_sized_stream()]
    assert [len(column) for column in sizes] == [3] * len(sizes)
    assert [batch.num_shards for batch in batches] == [
        column.index(0) if 0 in column else 3 for column in sizes
    ]
    (ended,) = islice((batch for batch in data.iterate_sized_stream() if 0 in batch.sizes), 1)
    assert ended.stand_in()["id"].shape == (2,)


def shard_of_webdataset(path: Path, first: int, count: int) -> str:
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + count):
            info = tarfile.TarInfo(f"{number:03}.cls")
            info.size = len(str(number))
            tar.addfile(info, io.BytesIO(str(number).encode()))
    return str(path)


# WebDataset leaves files open if its iterators are left early.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_shards_of_a_pipeline_of_webdataset_are_pieces(tmp_path: Path) -> None:
    import webdataset

    urls = [shard_of_webdataset(tmp_path / f"{n}.tar", 10 * n, 10) for n in range(4)]
    pipeline = webdataset.WebDataset(urls, shardshuffle=4).shuffle(5).decode().to_tuple("cls")

    def read(state: Any = None, start: int = 0) -> tuple[list[list[list[int]]], ShardedData]:
        loader = DataLoader(pipeline, batch_size=4)
        data = ShardedData(loader, num_shards=2, own_shards=range(2), seed=5)
        data.load_stream_state(state)
        batches = data.iterate_stream(0, start)
        return [[shard[0].tolist() for shard in each] for each in islice(batches, 3)], data

    begun, data = read()
    state = data.stream_state()
    assert read(state, 3)[0] == read(state, 3)[0]
    seen = sum(sum(begun + read(state, 3)[0], []), [])
    assert sorted(seen) == list(range(40)) != seen
    assert stream_pieces(pipeline.repeat(2)) is None
    assert stream_pieces(webdataset.WebDataset(urls, resampled=True, shardshuffle=False)) is None


def test_a_stream_that_was_split_already_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(ValueError, match=r"must be whole.*but got part 1 of 2"):
        stream_pieces(split_dataset_by_node(hugging_face(), rank=1, world_size=2))
    assert stream_pieces(iter(range(3))) is None
