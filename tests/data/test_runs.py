"""Runs over files: every sample once an epoch, whoever dies, and no other data after a kill."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from paceline import data, train
from paceline.data._dataset import Fold
from paceline.storage._checkpoint_errors import CheckpointMismatchError

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Ledger(train.TrainingCallback):
    """The samples of each step and rank, by the generation that trained them last."""

    def __init__(self) -> None:
        self.samples: dict[int, dict[int, dict[int, list[int]]]] = {}

    def handle_result(self, report: train.Report) -> None:
        generations = self.samples.setdefault(report["step"], {})
        generations.setdefault(report.generation, {})[report.rank] = report["samples"]

    def steps(self) -> list[list[int]]:
        last = [each[max(each)] for _, each in sorted(self.samples.items())]
        return [sum((own for _, own in sorted(ranks.items())), []) for ranks in last]


def session() -> Any:
    from paceline.train._run_protocol import current_session

    return current_session()


def read_all(config: dict[str, Any]) -> int:
    """Train nothing on two epochs; the rank that is told so dies in a step, before a checkpoint."""
    train.enable_reproducibility(3)
    model = train.prepare_model(torch.nn.Linear(1, 1))
    shard = train.get_dataset().get_shard()
    loader = shard.to_torch(batch_size=4, shuffle=True, num_workers=config.get("processes", 0))
    stored = train.load_checkpoint() or {"step": 0, "epoch": 0}
    step = stored["step"]
    for epoch in range(stored["epoch"], 2):
        for batch in loader:
            model(batch["x"].float().unsqueeze(1)).sum().backward()
            step += 1
            if step in config.get("dies_at", ()) and train.world_rank() == config["rank"]:
                mark = Path(f"struck-{step}")
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            # A worker whose part of a stream has ended gets samples that count nothing.
            counts = session().gradients._weight > 0
            train.report(step=step, samples=batch["id"].tolist() if counts else [])
            if step % 3 == 0:
                train.save_checkpoint(step=step, epoch=epoch)
    return step


def fit(directory: Path, num_workers: Any, **config: Any) -> list[list[int]]:
    return fit_on(data.read(directory).shuffle(window=30), num_workers, **config)


def fit_on(files: Any, num_workers: Any, **config: Any) -> list[list[int]]:
    ledger = Ledger()
    with train.Trainer(num_workers=num_workers, max_retries=3) as trainer:
        trainer.run(read_all, config, dataset=files, callbacks=[ledger])
    return ledger.steps()


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a temporary directory, and put back what reproducible runs change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    mode = torch.get_deterministic_debug_mode()
    yield
    torch.set_deterministic_debug_mode(mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "rank", "processes"), [(3, 0, 0), (3, 2, 1), ((2, 3), 0, 1), ((2, 3), 2, 0)]
)
def test_every_sample_is_trained_once_an_epoch_whoever_dies(
    parquet: Callable[..., Path], rank: int, num_workers: Any, processes: int
) -> None:
    directory = parquet(17, 30, 0, 41, 8)
    straight = fit(directory, 3)
    assert len(straight) == 16
    for epoch in (straight[:8], straight[8:]):
        assert sorted(set(sum(epoch, []))) == list(range(96))
        assert len(sum(epoch, [])) == 96
    assert straight[:8] != straight[8:]
    # Also while processes of a loader read ahead for the worker that is killed.
    disturbed = {"dies_at": [5, 13], "rank": rank, "processes": processes}
    assert fit(directory, num_workers, **disturbed) == straight


def pieces(part: list[int]) -> Iterator[dict[str, float]]:
    sizes = (9, 0, 17, 5, 12, 1, 20, 6)
    for piece in part:
        first = sum(sizes[:piece])
        yield from ({"id": n, "x": float(n)} for n in range(first, first + sizes[piece]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "rank", "processes"), [(3, 0, 0), (3, 2, 1), ((2, 3), 0, 1), ((2, 3), 2, 0)]
)
def test_every_sample_of_a_stream_is_trained_once_an_epoch_whoever_dies(
    rank: int, num_workers: Any, processes: int
) -> None:
    import datasets

    stream = datasets.IterableDataset.from_generator(pieces, gen_kwargs={"part": list(range(8))})
    mixed = stream.shuffle(seed=1, buffer_size=5)
    straight = fit_on(mixed, 3)
    ends = [n for n in range(1, 1 + len(straight)) if len(set(sum(straight[:n], []))) == 70]
    epochs = straight[: ends[0]], straight[ends[0] :]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == list(range(70))
    assert epochs[0] != epochs[1]
    disturbed = {"dies_at": [5, 13], "rank": rank, "processes": processes}
    assert fit_on(mixed, num_workers, **disturbed) == straight


class Slots(Ledger):
    """A scheduler that lends three slots, two after a loss, and three again."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 3
        self.sizes: list[int] = []

    def __call__(self) -> int:
        return self.capacity

    def handle_checkpoint(self, checkpoint: train.Checkpoint) -> None:
        Path("stored").touch()

    def handle_restart(self, error: Exception, generation: int) -> None:
        self.capacity = 2

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.sizes.append(num_workers)
        self.capacity = 3


def read_from_store(config: dict[str, Any]) -> int:
    """Read an epoch; a rank dies while it reads ahead, and then the group waits to grow."""
    from paceline.data import _file_source as _chunk_cache

    train.enable_reproducibility(3)
    model = train.prepare_model(torch.nn.Linear(1, 1))
    loader = train.get_dataset().get_shard().to_torch(batch_size=4, shuffle=True)
    step = begun_at = (train.load_checkpoint() or {"step": 0})["step"]
    for batch in loader:
        is_due = train.world_rank() == config["victim"] and step > 0 and not Path("dead").exists()
        if is_due and any(cache._under_way for cache in _chunk_cache._open_caches):
            Path("dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch["x"].float().unsqueeze(1)).sum().backward()
        step += 1
        counts = session().gradients._weight > 0
        train.report(step=step, samples=batch["id"].tolist() if counts else [])
        train.save_checkpoint(step=step)
        while not Path("stored").exists():
            time.sleep(0.01)
        while train.world_size() == 2 and step == begun_at + 1:
            # The checkpoint must bring in the third worker.
            time.sleep(0.01)
    return begun_at


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_group_that_shrinks_and_grows_reads_every_sample_of_a_store_once(
    server: Any, victim: int
) -> None:
    server.delay_s = 0.1
    files = data.read("s3://bucket/*.parquet").shuffle(window=4)
    steps, begun_at = {}, {}
    for rank in (None, victim):
        Path("stored").unlink(missing_ok=True)
        slots = Slots()
        elastic = train.ElasticConfig(capacity=slots)
        with train.Trainer(num_workers=(2, 3), max_retries=1, elastic=elastic) as trainer:
            results = trainer.run(
                read_from_store,
                {"victim": rank},
                dataset=files.pipeline(length=2),
                callbacks=[slots],
            )
        steps[rank], begun_at[rank] = slots.steps(), list(results)
    assert slots.sizes == [2, 3]
    assert steps[victim] == steps[None]
    assert sorted(sum(steps[None], [])) == list(range(75))
    # It went on within the epoch, after the loss and again after it had grown.
    assert begun_at[None] == [0, 0, 0]
    assert min(begun_at[victim]) > 1


class Pieces(torch.utils.data.IterableDataset[float]):
    """Four shards of three numbers, which remembers what was read of it."""

    num_shards = 4

    def __init__(self, read: list[int]) -> None:
        self.read = read

    def shard(self, num_shards: int, index: int) -> Iterator[float]:
        self.read.append(index)
        return iter([10.0 * index + n for n in range(3)])

    def __iter__(self) -> Iterator[float]:
        for piece in range(self.num_shards):
            yield from self.shard(self.num_shards, piece)


def read_pieces(config: dict[str, Any]) -> list[Any]:
    read: list[int] = []
    loader = data.Dataset(Pieces(read)).read_by(config["reader"]()).to_torch(batch_size=3)
    return [[batch.tolist() for batch in loader], sorted(set(read))]


def run_reader() -> Any:
    from paceline.train._worker_datasets import WorkerDatasetReader

    return WorkerDatasetReader(session())


def test_each_worker_reads_its_own_pieces_of_a_stream(two_workers: Any) -> None:
    first, second = two_workers.run(read_pieces, {"reader": run_reader})
    assert first == [[[0.0, 1.0, 2.0], [20.0, 21.0, 22.0]], [0, 2]]
    assert second == [[[10.0, 11.0, 12.0], [30.0, 31.0, 32.0]], [1, 3]]


class Told(logging.Handler):
    """Warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def read_generator(config: dict[str, Any]) -> list[Any]:
    """Read what cannot be split; return the batches, what was read, and the warnings."""
    told = Told()
    logging.getLogger("paceline").addHandler(told)
    read: list[int] = []
    stream = (read.append(number) or float(number) for number in range(8))  # type: ignore[func-returns-value]
    loader = data.Dataset(stream).read_by(config["reader"]()).to_torch(batch_size=2)
    batches = [batch.tolist() for batch in loader]
    logging.getLogger("paceline").removeHandler(told)
    return [batches, read, told.texts]


def test_a_generator_is_read_whole_by_each_worker_which_a_warning_says(two_workers: Any) -> None:
    (batches, read, texts), (others, read_by_other, no_texts) = two_workers.run(
        read_generator, {"reader": run_reader}
    )
    assert batches == [[0.0, 1.0], [4.0, 5.0]]
    assert others == [[2.0, 3.0], [6.0, 7.0]]
    assert read == read_by_other == list(range(8))
    (text,) = texts
    assert "each of the 2 workers reads all of it and keeps its own batches" in text
    assert no_texts == []


def test_one_worker_reads_a_generator_without_a_warning() -> None:
    trainer = train.Trainer(num_workers=0)
    (batches, _, texts), *_ = trainer.run(read_generator, {"reader": run_reader})
    assert sum(batches, []) == [float(number) for number in range(8)]
    assert texts == []


def test_a_fold_without_samples_is_refused_by_name() -> None:
    some, none = data.Dataset([1]), data.Dataset([])
    trainer = train.Trainer(num_workers=0)
    for given, name in (
        ([some, (some, none)], r"dataset\[1\]\[1\]"),
        ([Fold(some, some), Fold(some, none)], r"dataset\[1\]\.validation"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` has none. Hint: fewer folds"):
            trainer.run(lambda config: None, dataset=given)


def one_epoch(config: dict[str, Any]) -> list[Any]:
    train.enable_reproducibility(3)
    loader = train.get_dataset().to_torch(batch_size=4, shuffle=True)
    train.load_checkpoint()
    seen = []
    for batch in loader:
        seen.append(batch["id"].tolist())
        if config.get("stops_after") == len(seen):
            train.save_checkpoint(done=True)
            break
    return seen


def test_a_run_goes_on_within_an_epoch_with_the_same_data_only(
    parquet: Callable[..., Path],
) -> None:
    directory = parquet(25, 25, 25)
    trainer = train.Trainer(num_workers=0)
    (whole,) = trainer.run(one_epoch, dataset=data.read(directory))
    begun = trainer.run(one_epoch, {"stops_after": 5}, dataset=data.read(directory))
    (checkpoint,) = begun.checkpoints
    (rest,) = trainer.run(one_epoch, dataset=data.read(directory), checkpoint=checkpoint)
    assert begun[0] + rest == whole
    with pytest.raises(CheckpointMismatchError, match=r"a window of \d+ then, of 7 now"):
        trainer.run(one_epoch, dataset=data.read(directory).shuffle(7), checkpoint=checkpoint)
    time.sleep(0.01)
    content = (directory / "000.parquet").read_bytes()
    (directory / "001.parquet").write_bytes(content)
    with pytest.raises(
        CheckpointMismatchError, match=r"not what it was \(changed: \['001.parquet'\]; 3 files"
    ):
        trainer.run(one_epoch, dataset=data.read(directory), checkpoint=checkpoint)
    parquet(25, 25, 25, 5)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"new: \['003.parquet'\]; 3 files with 75 samples then, 4 with 80 now",
    ):
        trainer.run(one_epoch, dataset=data.read(directory), checkpoint=checkpoint)
