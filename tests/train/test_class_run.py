"""Classes whose instances stay in the workers: their place, what they prepare, report and save."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import core, train
from paceline._base.exceptions import CollectiveMismatchError
from paceline._training.workers.worker_failures import WorkerFailedError
from paceline.core._arguments import rank_group
from paceline.journal import RunDirectory

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

X = torch.arange(24, dtype=torch.float64).view(12, 2) / 10
Y = X.sum(1, keepdim=True) - 1


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers may be replaced within a test."""


class Fit:
    """A linear model of a library's own loop; everything is prepared once, at the start."""

    def __init__(self, batch_size: int = 2) -> None:
        self.place = (train.world_rank(), train.world_size(), train.local_rank())
        torch.manual_seed(train.world_rank())
        model = nn.Linear(2, 1).double()
        self.model = train.prepare_model(model)
        data = DataLoader(TensorDataset(X, Y), batch_size=batch_size)
        self.loader = train.prepare_data_loader(data)
        self.optimizer = train.prepare_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        )
        self.epoch = 0

    def train(self) -> list[float]:
        seen = []
        for x, y in self.loader:
            seen += x[:, 0].tolist()
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
        self.epoch += 1
        train.report(epoch=self.epoch, rank=train.world_rank())
        return seen

    def weights(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


class Seen(train.TrainingCallback):
    def __init__(self) -> None:
        self.reports: list[tuple[int, Any]] = []
        self.ends: list[Any] = []
        self.sizes: list[int] = []

    def start_training(self, run_dir: Path, config: Any, num_workers: int) -> None:
        self.sizes.append(num_workers)

    def handle_result(self, report: train.Report) -> None:
        self.reports.append((report.rank, report["epoch"]))

    def finish_training(self, error: BaseException | None) -> None:
        self.ends.append(error)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_instances_train_together_and_their_reports_are_those_of_a_run(num_workers: int) -> None:
    callback = Seen()
    with train.Trainer(num_workers=num_workers) as trainer:
        trainer.start(Fit, callbacks=[callback])
        places = trainer.execute(lambda fit: fit.place)
        assert places == [(rank, num_workers, rank) for rank in range(num_workers)]
        assert trainer.execute_single(lambda fit: fit.place[0], rank=num_workers - 1) == (
            num_workers - 1
        )
        seen = trainer.execute(lambda fit: fit.train())
        assert sorted(sum(seen, [])) == X[:, 0].tolist()
        assert {len(part) for part in seen} == {12 // num_workers}
        trainer.execute(lambda fit: fit.train())
        # All was told by the time that the call has returned.
        expected = [(rank, epoch) for rank in range(num_workers) for epoch in (1, 2)]
        assert sorted(callback.reports) == expected
        first, *others = trainer.execute(lambda fit: fit.weights())
        assert others == [first] * (num_workers - 1)
        assert callback.ends == []
    assert callback.sizes == [num_workers]
    assert callback.ends == [None]
    assert trainer.run_dir is not None
    run = RunDirectory(trainer.run_dir)
    for rank in range(num_workers):
        group = rank_group("training", rank)
        rows = list(core.read_metrics(run, group, rank=rank))
        assert [row.metrics for row in rows] == [
            {"epoch": 1, "rank": rank},
            {"epoch": 2, "rank": rank},
        ]
    assert core.summarize_run(run.path).state is core.RunState.COMPLETED

    with train.Trainer(num_workers=1) as alone:
        alone.start(Fit, 2 * num_workers)
        for _ in range(2):
            alone.execute(lambda fit: fit.train())
        (weights,) = alone.execute(lambda fit: fit.weights())
    # The seed of the model is that of rank 0.
    torch.testing.assert_close(first, weights)


@pytest.mark.long
@pytest.mark.parametrize("alone", [0, 2])
def test_a_method_that_needs_all_ranks_is_named_when_one_runs_it_alone(alone: int) -> None:
    with train.Trainer(num_workers=3) as trainer:
        trainer.start(Fit)
        others = [rank for rank in range(3) if rank != alone]
        with pytest.raises(
            CollectiveMismatchError,
            match=rf"Rank {alone} waits in .* but ranks {others[0]} and {others[1]} have returned",
        ):
            trainer.execute_single(lambda fit: fit.train(), rank=alone)


def test_an_instance_in_the_driver_reports_to_the_run() -> None:
    callback = Seen()
    with train.Trainer(num_workers=0) as trainer:
        trainer.start(Fit, callbacks=[callback])
        assert trainer.execute(lambda fit: fit.place) == [(0, 1, 0)]
        trainer.execute(lambda fit: fit.train())
        assert callback.reports == [(0, 1)]
        assert not train.in_worker()
    assert trainer.run_dir is not None
    assert core.summarize_run(trainer.run_dir).state is core.RunState.COMPLETED


class Saving:
    def __init__(self) -> None:
        self.number = train.load_checkpoint() or 0

    def save(self) -> int:
        self.number += 1
        train.report(number=self.number)
        train.save_checkpoint(self.number)
        return self.number

    def save_alone(self) -> None:
        if train.world_rank() == 0:
            train.save_checkpoint(1)


@pytest.mark.parametrize("victim", [0, 2])
def test_new_instances_after_a_loss_are_given_the_last_checkpoint(victim: int) -> None:
    with train.Trainer(num_workers=3) as trainer:
        trainer.start(Saving)
        for number in (1, 2):
            assert trainer.execute(lambda saving: saving.save()) == [number] * 3
        assert trainer.get_last_checkpoint() == 2
        with pytest.raises(WorkerFailedError, match=f"Rank {victim} "):
            trainer.execute_single(lambda _: os.kill(os.getpid(), signal.SIGKILL), rank=victim)
        assert trainer.execute(lambda saving: saving.save()) == [3] * 3
        assert trainer.get_last_checkpoint() == 3
    assert trainer.run_dir is not None
    rows = core.read_metrics(RunDirectory(trainer.run_dir), "training")
    assert [row.metrics["number"] for row in rows] == [1, 2, 3]
    assert core.summarize_run(trainer.run_dir).state is core.RunState.COMPLETED


def test_a_checkpoint_of_one_instance_alone_is_named() -> None:
    with train.Trainer(num_workers=2) as trainer:
        trainer.start(Saving)
        with pytest.raises(train.IncompleteCheckpointError, match="rank 1 has made 0 of 1 calls"):
            trainer.execute(lambda saving: saving.save_alone())


def test_a_run_of_a_class_ends_by_its_last_call() -> None:
    with train.Trainer(num_workers=2) as trainer:
        trainer.start(Saving)
        with pytest.raises(ZeroDivisionError):
            trainer.execute(lambda _: 1 / 0)
        assert trainer.execute(lambda saving: saving.save()) == [1, 1]
        with pytest.raises(ZeroDivisionError):
            trainer.execute(lambda _: 1 / 0)
    assert trainer.run_dir is not None
    summary = core.summarize_run(trainer.run_dir)
    assert summary.state is core.RunState.CRASHED
    assert "ZeroDivisionError" in str(summary.error)


def test_a_run_between_two_calls_leaves_the_instances() -> None:
    with train.Trainer(num_workers=2) as trainer:
        trainer.start(Saving)
        assert trainer.execute(lambda saving: saving.save()) == [1, 1]
        first = trainer.run_dir
        assert list(trainer.run(train.world_rank)) == [0, 1]
        assert trainer.run_dir != first
        assert trainer.execute(lambda saving: saving.save()) == [2, 2]
    assert first is not None
    assert core.summarize_run(first).state is core.RunState.COMPLETED


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_functions_outside_of_a_run_know_their_place_and_report_nothing_in_silence(
    num_workers: int,
) -> None:
    with train.Trainer(num_workers=num_workers) as trainer:
        size = max(1, num_workers)
        places = trainer.execute(lambda: (train.world_rank(), train.world_size()))
        assert places == [(rank, size) for rank in range(size)]
        seen = trainer.execute(_read)
        assert sorted(sum(seen, [])) == X[:, 0].tolist()
        with pytest.raises(RuntimeError, match="`train.report` must be called in a run, but rank"):
            trainer.execute(lambda: train.report(loss=1.0))
        with pytest.raises(RuntimeError, match="`train.save_checkpoint` must be called in a run"):
            trainer.execute(lambda: train.save_checkpoint(1))
        with pytest.raises(TypeError, match="follow the run of a class, but no class was given"):
            train.Trainer(num_workers=1).start(callbacks=[Seen()])


def _read() -> list[float]:
    data = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True)
    return [value for x, _ in train.prepare_data_loader(data) for value in x[:, 0].tolist()]


SCRIPT = """
import sys
from paceline import train

class Told:
    def go(self):
        train.report(rank=train.world_rank(), size=train.world_size())

class Printed(train.TrainingCallback):
    def handle_result(self, report):
        print(report.rank, dict(report), flush=True)

if __name__ == "__main__":
    trainer = train.Trainer({arguments})
    trainer.start(Told, callbacks=[Printed()])
    trainer.execute(lambda told: told.go())
    {last}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("last", "state"),
    [("", core.RunState.COMPLETED), ("raise ValueError", core.RunState.CRASHED)],
)
def test_a_program_that_shuts_nothing_down_ends_the_run(
    run_python: RunPython, last: str, state: core.RunState
) -> None:
    run_python(SCRIPT.format(arguments="2", last=last))
    (path,) = Path("paceline_runs").iterdir()
    assert core.summarize_run(path).state is state


@pytest.mark.long
def test_processes_of_a_launcher_are_the_workers_of_a_class(run_python: RunPython) -> None:
    Path("told.py").write_text(SCRIPT.format(arguments="", last=""))
    done = run_python(
        "from torch.distributed.run import main; main(['--nproc-per-node', '3', 'told.py'])"
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "rank" in line)
    assert lines == [f"{rank} {{'rank': {rank}, 'size': 3}}" for rank in range(3)]
    (path,) = Path("paceline_runs").iterdir()
    assert core.summarize_run(path).state is core.RunState.COMPLETED


def test_a_class_and_runs_share_the_run_directory_of_a_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with core.init(name="prepared") as context:
        path = context.run_dir
    monkeypatch.setenv("PACELINE_RUN_DIR", str(path))
    with train.Trainer(num_workers=2) as trainer:
        trainer.start(Saving)
        assert trainer.execute(lambda saving: saving.save()) == [1, 1]
        assert list(trainer.run(lambda: train.report(number=7))) == [None, None]
        with pytest.raises(WorkerFailedError):
            trainer.execute_single(lambda _: os.kill(os.getpid(), signal.SIGKILL), rank=1)
        # The generation of the run in between is not taken twice.
        assert trainer.execute(lambda saving: saving.save()) == [2, 2]
        assert trainer.run_dir == path
    rows = core.read_metrics(RunDirectory(path), "training")
    assert [row.metrics["number"] for row in rows] == [1, 7, 2]


def test_handles_call_methods_of_the_instances() -> None:
    trainer = train.Trainer(num_workers=2)
    handles = trainer.to_worker_group(Fit, batch_size=3)
    assert [handle.train() for handle in handles[:0]] == []
    assert len(handles) == 2
    seen = handles.execute(lambda fit: fit.train())
    assert sorted(sum(seen, [])) == X[:, 0].tolist()
    first, second = (handle.weights() for handle in handles)
    assert first == second
    handles.shutdown()
    assert trainer.run_dir is not None
    assert core.summarize_run(trainer.run_dir).state is core.RunState.COMPLETED
