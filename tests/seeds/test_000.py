"""Every snippet of the first source document runs: a dogfooder's guide to the PyTorch Trainer.

The scripts in `guide_000` are typed anew, with the guide's calls and argument names. They needed
these corrections and no others:

1. `from determined import pytorch` is `from paceline import pytorch`. The guide also uses `det`,
   which it never imports; `import paceline as det` keeps its `det.pytorch` and `det.LOG_FORMAT`.
2. `PyTorchTrialContext` in the first snippet is `pytorch.PyTorchTrialContext`, as the name is
   imported nowhere.
3. Each `...` is filled in: batches are taken apart, and the data sets made.
4. The backend `"gloo|nccl"` is one of the two, `"gloo"`. The class has one name,
   `MyPyTorchTrial`; the guide also writes `MyPytorchTrial` and `MNistTrial`.
5. In the config, `determined.launch` is `paceline.launch`, and `slots_per_trial` is 2, not 8.
6. On the command line, `det` is `paceline`.

The calls mean what the guide says, but for two defaults: `reporting_period` is `Batch(100)` and
not never, and `checkpoint_policy` is "best", which is the guide's "all" without a metric to judge
by. The flag USE_TORCH_DISTRIBUTED and the process group may be set up as in the guide or left out.
"""

import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import core, pytorch
from paceline.core import list_runs, read_metrics
from paceline.journal import RunDirectory

GUIDE = Path(__file__).parent / "guide_000"
LENGTH_OF_EPOCH = 24


# ---- signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (pytorch.init, ["hparams", "distributed"]),
        (
            pytorch.Trainer.fit,
            [
                *("checkpoint_period", "validation_period", "max_length", "reporting_period"),
                *("average_aggregated_gradients", "aggregation_frequency", "checkpoint_policy"),
                "test_mode",
            ],
        ),
        (
            pytorch.Trainer.configure_profiler,
            ["sync_timings", "enabled", "begin_on_batch", "end_after_batch"],
        ),
    ],
)
def test_arguments_have_the_names_and_the_order_of_the_guide(
    function: Callable[..., Any], names: list[str]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    given = [p for p in parameters if p.name != "self" and p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in given] == names
    assert all(p.default is not p.empty for p in given)


class OneWeight(pytorch.PyTorchTrial):
    """One weight w, loss w * x with x = 1: a step with learning rate 1 subtracts the gradient."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1, bias=False))
        nn.init.zeros_(self.model.weight)  # type: ignore[arg-type]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1.0))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"weight": self.model.weight.mean()}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(20, 1)), batch_size=4)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(1, 1)))


@pytest.fixture
def trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[OneWeight, pytorch.Trainer]]:
    """Return a trial of 5 batches per epoch and its trainer, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    alone = core.DistributedContext.single()
    with pytorch.init(hparams={"global_batch_size": 4}, distributed=alone) as context:
        trial = OneWeight(context)
        yield trial, pytorch.Trainer(trial, context)


def test_every_argument_of_fit_means_what_the_guide_says(
    trainer: tuple[OneWeight, pytorch.Trainer],
) -> None:
    """Each of four steps sums the gradients of two batches, 2; the window of batch 9 stays open."""
    trial, fitter = trainer
    result = fitter.fit(
        checkpoint_period=pytorch.Batch(4),
        validation_period=pytorch.Epoch(1),
        max_length=pytorch.Record(36),
        reporting_period=pytorch.Batch(3),
        average_aggregated_gradients=False,
        aggregation_frequency=2,
        checkpoint_policy="none",
        test_mode=False,
    )
    assert trial.model.weight.item() == -8
    assert [row.steps_completed for row in result.history("training")] == [3, 6, 9]
    assert [row.steps_completed for row in result.history("validation")] == [5, 9]
    checkpoints = core.read_checkpoints(RunDirectory(result.run_dir))
    assert [stored.steps_completed for stored in checkpoints] == [4, 8, 9]


def test_the_defaults_are_those_of_the_guide(trainer: tuple[OneWeight, pytorch.Trainer]) -> None:
    """Nothing is due before the end; gradients are averaged, after each batch: 1 each."""
    trial, fitter = trainer
    result = fitter.fit(max_length=pytorch.Epoch(2))
    assert trial.model.weight.item() == -10
    groups = ("training", "validation")
    assert [[r.steps_completed for r in result.history(g)] for g in groups] == [[10], [10]]
    assert len(result.checkpoints) == 1


@pytest.mark.parametrize(("policy", "expected"), [("all", [2, 4, 5]), ("none", [5])])
def test_a_checkpoint_policy_speaks_of_validations(
    trainer: tuple[OneWeight, pytorch.Trainer], policy: str, expected: list[int]
) -> None:
    result = trainer[1].fit(
        max_length=pytorch.Epoch(1), validation_period=pytorch.Batch(2), checkpoint_policy=policy
    )
    checkpoints = core.read_checkpoints(RunDirectory(result.run_dir))
    assert [stored.steps_completed for stored in checkpoints] == expected


def test_the_profiler_times_a_window_and_a_later_call_replaces_an_earlier_one(
    trainer: tuple[OneWeight, pytorch.Trainer],
) -> None:
    fitter = trainer[1]
    fitter.configure_profiler(enabled=True, sync_timings=True, begin_on_batch=0, end_after_batch=10)
    fitter.configure_profiler(sync_timings=False, enabled=True, begin_on_batch=2, end_after_batch=4)
    result = fitter.fit(max_length=pytorch.Epoch(2))
    timed = [r for r in result.history("profiling") if "train_batch_s" in r.metrics]
    assert [row.steps_completed for row in timed] == [3, 4, 5]


def test_the_global_batch_size_is_required_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = pytest.raises(ValueError, match="`hparams.global_batch_size` must be an integer")
    with pytorch.init(hparams={"lr": 0.1}) as context, missing:
        context.get_global_batch_size()


# ---- the walkthrough ---------------------------------------------------------------------------


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty directory to work in, with the guide's scripts on the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(GUIDE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("trial", None)


@pytest.fixture
def run(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return a function that runs a Python module in `tmp_path`, with a home of its own."""

    def run_module(*arguments: object) -> "subprocess.CompletedProcess[str]":
        result = subprocess.run(
            [sys.executable, "-m", *map(str, arguments)],
            cwd=tmp_path,
            env={
                **clean_environment,
                "PACELINE_HOME": str(tmp_path / "home"),
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{clean_environment['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    return run_module


def only_run(directory: Path) -> RunDirectory:
    [summary] = list_runs(directory / "paceline_runs")
    assert summary.state.value == "completed"
    return RunDirectory(summary.path)


def validations(run: RunDirectory) -> dict[int, Mapping[str, Any]]:
    return {row.steps_completed: row.metrics for row in read_metrics(run, "validation")}


def test_the_script_runs_locally(guide: Path) -> None:
    runpy.run_path(str(GUIDE / "local.py"), run_name="__main__")
    done = validations(only_run(guide))
    assert list(done) == [10, 20, LENGTH_OF_EPOCH]
    assert done[24].keys() >= {"validation_loss", "accuracy"}
    stored = core.read_checkpoints(only_run(guide))
    assert [checkpoint.steps_completed for checkpoint in stored] == [10, 20, LENGTH_OF_EPOCH]


def test_the_test_mode_trains_and_validates_one_batch(guide: Path) -> None:
    runpy.run_path(str(GUIDE / "local_test_mode.py"), run_name="__main__")
    assert list(validations(only_run(guide))) == [1]
    assert [c.steps_completed for c in core.read_checkpoints(only_run(guide))] == [1]


@pytest.mark.slow
def test_torchrun_starts_the_script_with_a_process_group_of_its_own(
    guide: Path, run: Callable[..., Any]
) -> None:
    """Each of two processes gives one sample to a batch, so an epoch has half as many."""
    script = GUIDE / "distributed.py"
    run("torch.distributed.run", "--standalone", "--nproc_per_node=2", script)
    assert list(validations(only_run(guide))) == [10, LENGTH_OF_EPOCH // 2]


@pytest.mark.slow
def test_the_config_is_tried_locally(guide: Path, run: Callable[..., Any]) -> None:
    run("paceline.cli", "e", "create", GUIDE / "det.yaml", GUIDE, "--local", "--test")
    assert list(validations(only_run(guide))) == [1]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_config_is_submitted_to_a_master(run: Callable[..., Any]) -> None:
    run("paceline.cli", "up", "--detach", "--port", "0", "--slots", "2")
    try:
        # The 937 batches of the guide would take ten times as long and say no more.
        short = ["--config", "searcher.max_length.batches=95"]
        run("paceline.cli", "e", "create", GUIDE / "det.yaml", GUIDE, "--follow", *short)
        output = run("paceline.cli", "t", "metrics", "1", "-g", "validation", "--json").stdout
    finally:
        run("paceline.cli", "down", "--timeout", "1")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["steps_completed"] for row in rows] == [*range(10, 91, 10), 95]
    assert rows[-1]["metrics"].keys() >= {"validation_loss", "accuracy"}
