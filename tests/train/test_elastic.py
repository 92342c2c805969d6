"""Groups whose size changes: the six points of what is done about lost workers, and exactness.

Points 1 to 3: the loss ends the call of all, its error says so, and no worker is left. Point 4:
as many as possible begin anew from the last checkpoint. Point 5: with too few, wait longer and
longer. Point 6: grow back when there is more.
"""

import logging
import math
import os
import random
import re
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline import train
from paceline._base.process_and_network import num_cores

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_STEPS = 12


class Slots(train.TrainingCallback):
    """A scheduler that lends slots, and what it saw of a run."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.told: list[Any] = []
        self.left: list[str] = []
        # For each step and rank what was trained last, and by which generation.
        self.samples: dict[int, dict[int, dict[int, list[int]]]] = {}

    def __call__(self) -> int:
        return self.capacity

    def start_training(self, run_dir: Path, config: Any, num_workers: int) -> None:
        self.told.append(num_workers)

    def handle_result(self, report: train.Report) -> None:
        generations = self.samples.setdefault(report["step"], {})
        generations.setdefault(report.generation, {})[report.rank] = report["samples"]

    def handle_checkpoint(self, checkpoint: train.Checkpoint) -> None:
        Path("stored").touch()

    def handle_restart(self, error: Exception, generation: int) -> None:
        self.told.append((str(error).partition(",")[0], generation))
        self.capacity = 2

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.told.append((num_workers, generation))
        self.left += [path.name for path in Path.cwd().glob("[0-9]*") if is_alive(path.name)]
        # There will be three again, but only checkpoints are looked at.
        self.capacity = 3

    def samples_by_step(self) -> dict[int, list[int]]:
        """Return the samples of each step that counts; others' stand in where a rank has none."""
        return {
            step: sorted(set().union(*generations[max(generations)].values()))
            for step, generations in sorted(self.samples.items())
        }


def is_alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


def fit(config: dict[str, Any]) -> Any:
    """Train on 24 samples, two a shard; if told so, die once and wait for the group to grow."""
    train.enable_reproducibility(3)
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = train.prepare_model(model)
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    data = [(torch.tensor([n / 10.0]).double(), n) for n in range(24)]
    loader = train.prepare_data_loader(DataLoader(data, 2, shuffle=True))  # type: ignore[arg-type]
    stored = train.load_checkpoint() or {"epoch": 0, "step": 0}
    if stored["step"]:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
    step = begun_at = stored["step"]
    for epoch in range(stored["epoch"], NUM_STEPS // 4):
        for x, numbers in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.square()).backward()
            optimizer.step()
            step += 1
            train.report(step=step, samples=numbers.tolist())
            if config["is_disturbed"]:
                disturb(step)
            if step in (2, 7, 11):
                train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch, step=step)
            while config["is_disturbed"] and step == 8 and train.world_size() == 2:
                # The checkpoint of step 7 must bring in the third worker.
                time.sleep(0.01)
    return model.state_dict(), step, begun_at, train.world_size()


def disturb(step: int) -> None:
    """Leave word of this process, and kill rank 1 of the first generation in step 5."""
    Path(str(os.getpid())).touch()
    if step == 5 and train.world_size() == 3 and not Path("struck").exists():
        while not Path("stored").exists():
            time.sleep(0.01)
        if train.world_rank() == 1:
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)


@pytest.mark.long
def test_points_1_to_4_and_6_a_lost_worker_shrinks_the_group_and_a_checkpoint_grows_it_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    slots, straight_slots = Slots(3), Slots(3)
    with train.Trainer(
        num_workers=(2, 3), max_retries=1, elastic=train.ElasticConfig(capacity=slots)
    ) as trainer:
        results = trainer.run(fit, {"is_disturbed": True}, callbacks=[slots])
        straight = trainer.run(fit, {"is_disturbed": False}, callbacks=[straight_slots])
    # Growing is no retry, of which there was one.
    assert slots.told == [3, ("Rank 1 was ended by SIGKILL", 1), (2, 1), (3, 2)]
    assert slots.left == []
    assert straight_slots.told == [3]
    assert (results.num_restarts, straight.num_restarts) == (1, 0)
    assert "Going on with 2 worker(s) instead of 3." in caplog.text
    assert "3 workers can run: ending the present 2 after a checkpoint" in caplog.text
    # The last generation went on from the checkpoint after which there were more.
    assert [value[1:] for value in results] == [(NUM_STEPS, 7, 3)] * 3
    assert slots.samples_by_step() == straight_slots.samples_by_step()
    assert sorted(straight_slots.samples_by_step()) == list(range(1, NUM_STEPS + 1))
    for state, expected in zip(results, straight, strict=True):
        for name, weight in state[0].items():
            torch.testing.assert_close(weight, expected[0][name], rtol=1e-9, atol=0)
    # What every rank has reported stands once, also of the rank that was away.
    assert [r["step"] for r in results.metrics] == list(range(1, NUM_STEPS + 1))
    assert [r["step"] for r in results.metrics_of(2)] == [1, 2, 8, 9, 10, 11, 12]


def test_point_5_with_too_few_workers_the_group_waits_longer_and_longer_up_to_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[float] = []

    def capacity() -> int:
        asked.append(time.monotonic())
        return 1

    config = train.ElasticConfig(
        max_wait_s=0.35, first_delay_s=0.05, longest_delay_s=0.1, capacity=capacity
    )
    trainer = train.Trainer(num_workers=(2, 4), elastic=config)
    with pytest.raises(
        train.NotEnoughWorkersError,
        match=r"At least 2 worker\(s\) must be able to run, but no more than 1 could at last, after"
        r" a wait of \S+ s\. Hint: ElasticConfig",
    ) as raised:
        trainer.run(fit)
    assert (raised.value.wanted, raised.value.available) == (2, 1)
    told = re.findall(r"2 worker\(s\) must be able .* but 1 can: .* in (\S+) s", caplog.text)
    first, *others = map(float, told)
    assert first == 0.05
    # The last one ends with the wait.
    assert all(0 < delay <= 0.1 for delay in others)
    with pytest.raises(train.NotEnoughWorkersError):
        trainer.start()


def test_point_5_after_a_loss_the_run_goes_on_as_soon_as_there_are_enough_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    short, more = [1, 0, 1], []

    def capacity() -> int:
        return short.pop() if Path("struck").exists() and short else 2 + len(more)

    def die_once() -> int:
        if train.world_rank() == 1 and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return train.world_size()

    config = train.ElasticConfig(first_delay_s=0.01, capacity=capacity)
    with train.Trainer(num_workers=(2, 3), max_retries=1, elastic=config) as trainer:
        results = trainer.run(die_once)
        assert results == [2, 2]
        assert results.num_restarts == 1
        assert "At least 2 worker(s) must be able to run, but 0 can: looking again" in caplog.text
        # Between two runs a group grows without a checkpoint.
        more.append("worker")
        assert trainer.run(train.world_size) == [3, 3, 3]


def test_resources_that_can_never_be_met_are_an_error_at_once() -> None:
    with pytest.raises(
        train.ResourcesError, match=r"9999 worker\(s\) .* need 9999 CPU core\(s\), but this machine"
    ):
        train.Trainer(num_workers=(9999, math.inf), cpus_per_worker=1)


def test_many_workers_for_few_cores_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    num_cores = len(os.sched_getaffinity(0))
    train.Trainer(num_workers=4 * num_cores)
    assert caplog.text == ""
    train.Trainer(num_workers=4 * num_cores + 1)
    assert f"{4 * num_cores + 1} workers are to share {num_cores} CPU core(s)" in caplog.text


def test_far_more_workers_than_cores_are_refused_before_any_starts() -> None:
    num_cores = len(os.sched_getaffinity(0))
    train.Trainer(num_workers=16 * num_cores)
    with pytest.raises(train.ResourcesError, match=f"but {16 * num_cores + 1} are asked for"):
        train.Trainer(num_workers=16 * num_cores + 1)


def test_an_elastic_group_starts_no_more_than_the_machine_can() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert train.Trainer(num_workers=(1, 16 * num_cores + 1)).num_workers == 16 * num_cores


def test_nccl_is_refused_for_workers_that_share_gpus() -> None:
    with pytest.raises(ValueError, match=r"whole number with the backend NCCL, .* but got 0\.5"):
        train.Trainer(2, gpus_per_worker=0.5, backend_config=train.TorchConfig(backend="nccl"))


def test_an_open_range_takes_what_the_machine_has() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert train.Trainer(num_workers=(1, math.inf), cpus_per_worker=1).num_workers == num_cores
    assert train.Trainer(num_workers=(1, math.inf), gpus_per_worker=0).num_workers >= num_cores
    trainer = train.Trainer(num_workers=(num_cores + 1, math.inf))
    assert trainer.num_workers == num_cores + 1
    assert f"Trainer: {num_cores + 1} worker(s) ({num_cores + 1} to inf), not" in str(trainer)
    assert train.Trainer(num_workers=(1, 9999), cpus_per_worker=1).num_workers == num_cores


@pytest.mark.parametrize("num_workers", [(0, 2), (3, 2), (1, 2.5), (1, 2, 3), (math.inf, math.inf)])
def test_a_range_must_be_two_numbers_in_order(num_workers: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="a pair of the least and the most such as"):
        train.Trainer(num_workers=num_workers)


def accumulate(config: dict[str, Any]) -> Any:
    """Train with two batches a step, scaled gradients, and a checkpoint within a step."""
    torch.manual_seed(0)
    model: Any = nn.Linear(1, 1).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = train.accelerate(model, optimizer=optimizer, gradient_accumulation=2)
    # Ten samples: the last global batch has two of four, and fewer of rank 1.
    data = [torch.tensor([n / 10.0]).double() for n in range(10)]
    loader = train.prepare_data_loader(DataLoader(data, 2, shuffle=True))  # type: ignore[arg-type]
    stored = train.load_checkpoint()
    if stored is not None:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
    for epoch in range(0 if stored is None else stored["epoch"], 2):
        for number, x in enumerate(loader):
            train.backward(nn.functional.mse_loss(model(x), x.square()))
            optimizer.step()
            optimizer.zero_grad()
            if config["save_at"] == (epoch, number):
                train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch)
    return model.weight, train.world_size()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_gradients_within_an_accumulated_step_survive_a_resize(number: int) -> None:
    with train.Trainer(num_workers=2) as trainer:
        straight = trainer.run(accumulate, {"save_at": (1, number)})
        (checkpoint,) = straight.checkpoints
        one = train.Trainer(num_workers=0).run(accumulate, {"save_at": None}, checkpoint=checkpoint)
        assert [size for _, size in one] == [1]
        torch.testing.assert_close(one[0][0], straight[0][0], rtol=1e-9, atol=0)


@pytest.mark.slow
def test_workers_beyond_the_number_of_shards_stay_idle(caplog: pytest.LogCaptureFixture) -> None:
    straight = train.Trainer(num_workers=0).run(accumulate, {"save_at": (0, 3)})
    with train.Trainer(num_workers=2) as trainer:
        resumed = trainer.run(accumulate, {"save_at": None}, checkpoint=straight.checkpoints[0])
    assert "1 of the 2 workers stay idle, as a global batch has 1 shard(s)." in caplog.text
    assert [size for _, size in resumed] == [2, 2]
    for weight, _ in resumed:
        torch.testing.assert_close(weight, straight[0][0], rtol=1e-9, atol=0)


@pytest.mark.slow
def test_exceptions_of_the_user_are_never_retried() -> None:
    def fail() -> None:
        Path(str(os.getpid())).touch()
        # The error of one rank ends the other, which may not have begun by then.
        while len(list(Path.cwd().glob("[0-9]*"))) < 2:
            time.sleep(0.01)
        raise ZeroDivisionError("mine")

    trainer = train.Trainer(num_workers=(1, 2), max_retries=5)
    with trainer, pytest.raises(ZeroDivisionError, match="mine"):
        trainer.run(fail)
    assert len(list(Path.cwd().glob("[0-9]*"))) == 2


class Weather(Slots):
    """A capacity that changes at random with every restart and every checkpoint."""

    def __init__(self, seed: int) -> None:
        super().__init__(4)
        self._random = random.Random(seed)

    def handle_checkpoint(self, checkpoint: train.Checkpoint) -> None:
        self.capacity = max(self.capacity, self._random.randint(1, 4))

    def handle_restart(self, error: Exception, generation: int) -> None:
        self.told.append(generation)
        self.capacity = self._random.randint(1, 4)

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.told.append((num_workers, generation))


def weather_the_storm(config: dict[str, Any]) -> Any:
    """Train on 26 samples, so that some ranks have none in the last batch of an epoch."""
    train.enable_reproducibility(3)
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = train.accelerate(model, optimizer=optimizer, gradient_accumulation=2)
    data = [(torch.tensor([n / 10.0]).double(), n) for n in range(26)]
    loader = train.prepare_data_loader(DataLoader(data, 2, shuffle=True))  # type: ignore[arg-type]
    stored = train.load_checkpoint() or {"epoch": 0, "step": 0}
    if stored["step"]:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
    step = stored["step"]
    for epoch in range(stored["epoch"], 5):
        for x, numbers in loader:
            train.backward(nn.functional.mse_loss(model(x), x.square()))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            train.report(step=step, samples=numbers.tolist())
            if config["strikes"].get(step) == train.world_rank():
                strike_once(f"struck-{step}")
            if step % 3 == 0:
                train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch, step=step)
            time.sleep(config["pause_s"])
    return model.state_dict(), step


def strike_once(marker: str) -> None:
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_random_losses_and_growth_change_no_step(seed: int) -> None:
    chance = random.Random(seed)
    strikes = {step: chance.randrange(4) for step in chance.sample(range(1, 20), 6)}
    weather, calm = Weather(seed), Slots(4)
    with train.Trainer(
        num_workers=(1, 4), max_retries=math.inf, elastic=train.ElasticConfig(capacity=weather)
    ) as trainer:
        config = {"strikes": strikes, "pause_s": 0.05}
        results = trainer.run(weather_the_storm, config, callbacks=[weather])
        weather.capacity = 4
        straight = trainer.run(weather_the_storm, {"strikes": {}, "pause_s": 0.0}, callbacks=[calm])
    assert len(straight) == 4
    assert 1 <= results.num_restarts <= len(strikes)
    assert weather.samples_by_step() == calm.samples_by_step()
    for state, step in results:
        assert step == 20
        for name, weight in state.items():
            torch.testing.assert_close(weight, straight[0][0][name], rtol=1e-9, atol=0)
    assert [r["step"] for r in results.metrics] == list(range(1, 21))


def report_size(config: dict[str, Any]) -> int:
    """Save until the group has grown to the number of workers asked for."""
    begun_at = (train.load_checkpoint() or {"step": 0})["step"]
    for step in count(begun_at + 1):
        train.report(step=step, samples=[])
        train.save_checkpoint(step=step)
        if train.world_size() == config["until"]:
            break
        time.sleep(0.05)
    return train.world_size()


@pytest.mark.parametrize("num_shards", [None, 2])
def test_a_group_without_an_upper_bound_grows_beyond_its_first_number(
    num_shards: int | None,
) -> None:
    if num_cores() < 2:
        pytest.skip("NOT TESTED: needs two cores")
    slots = Slots(1)
    elastic = train.ElasticConfig(capacity=slots, num_shards=num_shards)
    with train.Trainer(num_workers=(1, math.inf), elastic=elastic) as trainer:

        class Lender(train.TrainingCallback):
            def handle_checkpoint(self, checkpoint: train.Checkpoint) -> None:
                slots.capacity = 9

        results = trainer.run(report_size, {"until": 2}, callbacks=[Lender()])
    assert list(results) == [2, 2]


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_a_wrong_number_of_shards_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="`num_shards` must be"):
        train.ElasticConfig(num_shards=value)
