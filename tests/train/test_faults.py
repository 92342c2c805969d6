"""Workers that die, hang or cannot store anything, for real."""

import gc
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import core, train
from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver
from paceline._training.workers.processes.rank_environment import is_port_free
from paceline.storage import CheckpointWriteError, storage_from

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Noisy(Dataset[Any]):
    """Numbers with random noise, drawn where they are fetched."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index + random.random()]), torch.tensor([2.0 * index])


def strike_once(number: int) -> None:
    """Send this process a signal, unless that was done before."""
    marker = Path("struck")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), number)


def fit(config: dict[str, Any]) -> Any:
    """Train with loader processes, dropout and batch norm; one rank is struck once."""
    train.enable_reproducibility(3)
    torch.set_deterministic_debug_mode("default")
    model: Any = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model = train.prepare_model(model)
    optimizer = train.prepare_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    loader = train.prepare_data_loader(DataLoader(Noisy(), 2, shuffle=True, num_workers=1))
    stored = train.load_checkpoint() or {"epoch": 0, "step": 0}
    if stored["step"]:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
    step = stored["step"]
    for epoch in range(stored["epoch"], 3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            train.report(loss=loss, step=step)
            if step == config["strike_at"] and train.world_rank() == config.get("strikes", 1):
                strike_once(config["signal"])
            if step % 3 == 0:
                train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch, step=step)
    return model.state_dict(), step, torch.rand(1), random.random()


def bits(results: train.Results) -> Any:
    return [
        ({name: value.tolist() for name, value in state.items()}, step, draw.tolist(), number)
        for state, step, draw, number in results
    ]


def fit_shared(config: dict[str, Any]) -> Any:
    """Train on the driver's data, which are in shared memory; one rank is struck once."""
    train.enable_reproducibility(3)
    model = train.prepare_model(nn.Linear(4, 1))
    optimizer = train.prepare_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    loader = train.get_dataset().to_torch(2, shuffle=True, num_workers=1)
    stored = train.load_checkpoint() or {"epoch": 0}
    if "model" in stored:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
    for epoch in range(stored["epoch"], 3):
        for (x,) in loader:
            optimizer.zero_grad()
            train.backward(model(x[:, :4]).square().mean())
            optimizer.step()
            # Each worker changes its own copy of a page alone.
            x.fill_(0)
        if epoch == 1 and train.world_rank() == config["strikes"]:
            strike_once(signal.SIGKILL)
        train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch + 1)
    return model.state_dict(), "memfd:paceline" in Path("/proc/self/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_data_in_shared_memory_outlive_a_lost_worker(rank: int) -> None:
    data = TensorDataset(torch.randn(26, 250_000, generator=torch.Generator().manual_seed(0)))
    before = data.tensors[0].clone()
    with train.Trainer(num_workers=3) as trainer:
        disturbed = trainer.run(fit_shared, {"strikes": rank}, dataset=data)
        assert disturbed.num_restarts == 1
        expected = trainer.run(fit_shared, {"strikes": None}, dataset=data)
    for (state, is_shared), (other, _) in zip(disturbed, expected, strict=True):
        assert is_shared
        assert {name: value.tolist() for name, value in state.items()} == {
            name: value.tolist() for name, value in other.items()
        }
    assert torch.equal(data.tensors[0], before)


@pytest.mark.parametrize(
    ("number", "strike_at", "rank"),
    [
        (signal.SIGKILL, 8, 2),
        pytest.param(signal.SIGKILL, 6, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 8, 1, marks=pytest.mark.slow),
    ],
)
def test_run_with_a_lost_worker_ends_in_the_same_bits(
    number: int, strike_at: int, rank: int
) -> None:
    class Seen(train.TrainingCallback):
        def __init__(self) -> None:
            self.restarts: list[Any] = []
            self.steps: list[int] = []

        def handle_result(self, report: train.Report) -> None:
            if report.rank == 0:
                self.steps.append(report["step"])

        def handle_restart(self, error: Exception, generation: int) -> None:
            self.restarts.append((type(error), generation))

    seen = Seen()
    config = {"strike_at": strike_at, "signal": number, "strikes": rank}
    # One that is stopped is noticed by that alone; others may be slow.
    timeout_s = 3.0 if number == signal.SIGSTOP else 60.0
    # Three workers, as the order of additions shows with no fewer.
    with train.Trainer(num_workers=3, heartbeat_timeout_s=timeout_s) as trainer:
        disturbed = trainer.run(fit, config, callbacks=[seen])
        straight = trainer.run(fit, config)
    assert seen.restarts == [(train.WorkerFailedError, 1)]
    assert disturbed.num_restarts == 1
    assert bits(disturbed) == bits(straight)
    [cause] = core.summarize_run(disturbed.run_dir).restart_causes
    assert cause.startswith(f"Rank {rank} ")
    assert core.summarize_run(straight.run_dir).restart_causes == ()
    # What was trained again was reported again, and stands once.
    assert len(seen.steps) > 15
    assert [r["step"] for r in disturbed.metrics] == list(range(1, 16))
    other = 2 - rank
    assert [dict(r) for r in disturbed.metrics_of(other)] == [
        dict(r) for r in straight.metrics_of(other)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_run_with_checkpoints_in_a_bucket_survives_a_lost_worker(s3: str, rank: int) -> None:
    config = {"strike_at": 8, "signal": signal.SIGKILL, "strikes": rank}
    strategy = train.CheckpointStrategy(num_to_keep=2)
    with train.Trainer(num_workers=3, checkpoint_storage=s3) as trainer:
        disturbed = trainer.run(fit, config, checkpoint_strategy=strategy)
        straight = trainer.run(fit, config, checkpoint_strategy=strategy)
    assert (disturbed.num_restarts, straight.num_restarts) == (1, 0)
    assert bits(disturbed) == bits(straight)
    kept = [*disturbed.checkpoints, *straight.checkpoints]
    assert [c.load()["step"] for c in kept] == [12, 15, 12, 15]
    storage = storage_from(s3)
    assert storage.list() == sorted(c.uuid for c in kept)
    assert storage.sweep(older_than_s=0) == []


def test_workers_that_are_always_lost_are_an_error_that_says_so() -> None:
    def function() -> None:
        train.report(x=1)
        if train.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    class Seen(train.TrainingCallback):
        num_reports = 0
        error: BaseException | None = None

        def handle_result(self, report: train.Report) -> None:
            self.num_reports += report.rank == 1

        def finish_training(self, error: BaseException | None) -> None:
            self.error = error

    seen = Seen()
    with train.Trainer(num_workers=2, max_retries=1) as trainer:
        with pytest.raises(
            train.WorkersLostError,
            match=r"`max_retries` \(1\) allows, but were 2 time\(s\).*SIGKILL",
        ) as raised:
            trainer.run(function, callbacks=[seen])
        assert raised.value.num_losses == 2
        cause = raised.value.__cause__
        assert isinstance(cause, train.WorkerFailedError)
        assert cause.__traceback__ is None, "frames of the driver, which explain nothing"
        assert seen.error is raised.value
        # What a worker reported before its death is not lost.
        assert seen.num_reports == 2
        assert trainer.run(lambda config: 1) == [1, 1]


@pytest.mark.slow
def test_death_in_the_initialization_hook_is_survived() -> None:
    def die_once() -> None:
        if os.environ["RANK"] == "1":
            strike_once(signal.SIGKILL)

    with train.Trainer(num_workers=2, max_retries=1) as trainer:
        trainer.start(initialization_hook=die_once)
        assert Path("struck").exists()
        assert trainer.run(train.world_rank) == [0, 1]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with train.Trainer(num_workers=2, max_retries=1) as trainer:
        with pytest.raises(train.WorkersLostError, match="while they were started"):
            trainer.start(initialization_hook=die)
        with pytest.raises(train.WorkersLostError, match="2 time"):
            trainer.run(train.world_rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["train.report", "train.save", "storage.before_done", "storage.before_manifest"]
)
def test_death_in_a_report_or_while_a_checkpoint_is_saved_loses_at_most_that_one(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(train.TrainingCallback):
        def handle_checkpoint(self, checkpoint: train.Checkpoint) -> None:
            Path(f"stored-{checkpoint.load()}").touch()

    def function() -> Any:
        step = train.load_checkpoint() or 0
        begun_at = step
        while step < 3:
            step += 1
            train.report(step=step)
            train.save_checkpoint(step)
            # The ranks do not wait for one another, so that one could die in its second save
            # while another is not yet at the first.
            while not Path(f"stored-{step}").exists():
                time.sleep(0.001)
        return begun_at, train.load_checkpoint()

    rank = 0 if point == "storage.before_manifest" else 1
    monkeypatch.setenv("PACELINE_FAULT", f"{point}:2,rank={rank}")
    with train.Trainer(num_workers=2) as trainer:
        results = trainer.run(function, callbacks=[Seen()])
    # Each new process gets through one step and is struck in the second.
    assert results.num_restarts == 2
    assert results == [(2, 2), (2, 2)]
    assert [c.load() for c in results.checkpoints] == [1, 2, 3]
    assert [r["step"] for r in results.metrics] == [1, 2, 3]
    left = {path.name for path in (results.run_dir / "checkpoints").iterdir()}
    assert left == {checkpoint.uuid for checkpoint in results.checkpoints}


def test_full_disk_is_the_error_of_the_run_and_of_no_worker(
    small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    def function() -> None:
        train.save_checkpoint(torch.zeros(1000))
        train.save_checkpoint(torch.zeros(1_000_000))

    trainer = train.Trainer(num_workers=0, run_dir=small_disk / "run")
    with pytest.raises(CheckpointWriteError, match="No space left on device"):
        trainer.run(function)
    last = trainer.get_last_checkpoint()
    assert last is not None
    assert len(last) == 1000


@pytest.mark.slow
def test_full_disk_under_several_workers_costs_one_checkpoint_and_no_worker(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        train.save_checkpoint(torch.zeros(1000))
        train.save_checkpoint(torch.zeros(1_000_000))
        train.save_checkpoint(torch.zeros(1))

    with train.Trainer(num_workers=2, run_dir=small_disk / "run") as trainer:
        results = trainer.run(function)
        # The one that did not fit is lost; no generation followed.
        assert [len(each.load()) for each in results.checkpoints] == [1000, 1]
        journals = (small_disk / "run" / "journal").iterdir()
        assert sorted(path.name for path in journals) == ["a0.g0.r0", "a0.g0.r1"]
        assert "No space left on device" in capfd.readouterr().err


@pytest.mark.slow
def test_port_in_use_does_not_keep_workers_from_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with train.Trainer(num_workers=2) as trainer:
            assert trainer.run(train.world_rank) == [0, 1]


DRIVER = """
import os, sys, time
from pathlib import Path
from paceline import train

def function():
    import torch
    from torch.utils.data import DataLoader

    data = torch.zeros(1000, 1000)
    loader = train.prepare_data_loader(DataLoader(data, 2, num_workers=1, prefetch_factor=8))
    for batch in loader:
        train.save_checkpoint(batch)
        Path(f"port-{os.environ['MASTER_PORT']}").touch()
        Path(f"ready-{train.world_rank()}").touch()
        time.sleep(600)

print("torch" in sys.modules, flush=True)
with train.Trainer(num_workers=2) as trainer:
    trainer.start()
    print("torch" in sys.modules, flush=True)
    trainer.run(function)
"""


def processes_in(directory: Path) -> set[int]:
    """Return the processes that work in a directory."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").readlink() == directory:
                found.add(int(path.name))
    return found


@pytest.mark.slow
def test_killed_driver_leaves_no_process_port_or_shared_memory(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    memory = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "driver.py"], env=clean_environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        # The driver itself needs no torch, which takes seconds to load.
        assert [driver.stdout.readline() for _ in range(2)] == ["False\n", "False\n"]
        await_true(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        (port,) = (int(path.name.partition("-")[2]) for path in tmp_path.glob("port-*"))
        assert not is_port_free(port)
        # The driver, its fork server, two workers, and a loader process of each.
        left = processes_in(tmp_path) - {os.getpid()}
        assert len(left) >= 6
        driver.kill()
    await_true(lambda: not processes_in(tmp_path) - {os.getpid()})
    await_true(lambda: is_port_free(port))
    pids = set(map(str, left))
    names = set(os.listdir("/dev/shm")) - memory
    assert [name for name in names if pids & set(re.findall(r"\d+", name))] == []


def await_true(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met within 60 s"
        time.sleep(0.01)


@pytest.mark.slow
def test_exit_of_a_worker_counts_as_its_loss() -> None:
    def function() -> int:
        if train.world_rank() == 1 and not Path("struck").exists():
            Path("struck").touch()
            sys.exit(3)
        return train.world_rank()

    with train.Trainer(num_workers=2) as trainer:
        results = trainer.run(function)
    assert results == [0, 1]
    assert results.num_restarts == 1


@pytest.mark.slow
def test_exit_of_a_worker_that_comes_again_is_not_repeated_for_ever() -> None:
    class Seen(train.TrainingCallback):
        num_restarts = 0

        def handle_restart(self, error: Exception, generation: int) -> None:
            self.num_restarts += 1

    seen = Seen()
    with (
        train.Trainer(num_workers=2, max_retries=5) as trainer,
        pytest.raises(train.WorkersLostError, match=r"failed the same way twice .* code 3"),
    ):
        trainer.run(lambda: sys.exit(3), callbacks=[seen])
    assert seen.num_restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_last", [False, True])
def test_part_that_could_not_be_stored_is_an_error_if_no_later_checkpoint_is_whole(
    is_last: bool,
) -> None:
    def function() -> int:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if train.world_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        train.save_checkpoint(torch.zeros(1000))
        savers = [each for each in gc.get_objects() if type(each) is CheckpointSaver]
        while any(each.is_storing for each in savers):
            time.sleep(0.001)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if not is_last:
            train.save_checkpoint(2)
        return train.world_rank()

    with train.Trainer(num_workers=2) as trainer:
        if is_last:
            with pytest.raises(CheckpointWriteError, match="File too large"):
                trainer.run(function)
            assert trainer.latest_checkpoint is None
        else:
            assert [each.load() for each in trainer.run(function).checkpoints] == [2]


class FaultyData(Dataset[Any]):
    """Thirteen samples, of which one cannot be read, or kills the process that reads it."""

    def __init__(self, bad: int, *, kills: bool) -> None:
        self.bad = bad
        self.kills = kills

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        if index == self.bad and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([1 / (index - self.bad)])


def train_on(config: dict[str, Any]) -> None:
    model = train.prepare_model(nn.Linear(1, 1))
    loader = DataLoader(config["data"], batch_size=2, num_workers=config["processes"])
    for x in train.prepare_data_loader(loader):
        model(x).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "rank"), [(0, 0), (5, 2)])
def test_a_sample_that_cannot_be_read_is_named_with_the_rank_that_reads_it(
    bad: int, rank: int
) -> None:
    with train.Trainer(num_workers=3, max_retries=0) as trainer:
        with pytest.raises(ZeroDivisionError) as caught:
            trainer.run(train_on, {"data": FaultyData(bad, kills=False), "processes": 0})
        assert caught.value.__notes__ == [f"While reading sample {bad} of FaultyData."]
        told = str(caught.value.__cause__)
        assert told.startswith(f"\nRank {rank} raised, the first of 3 to fail:")
        assert re.search(r"test_faults.py.*, line \d+, in train_on", told)
        assert re.search(r"test_faults.py.*, line \d+, in __getitem__", told)
        with pytest.raises(RuntimeError, match="exited unexpectedly") as lost:
            trainer.run(train_on, {"data": FaultyData(bad, kills=True), "processes": 1})
        assert "a process of the data loader was killed" in str(lost.value.__notes__)
        assert str(lost.value.__cause__).startswith(f"\nRank {rank} raised, the first of 3")
