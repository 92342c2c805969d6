"""Config objects on two processes of torchrun, MPI and Slurm: the same as one process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Start = Callable[..., "subprocess.CompletedProcess[str]"]
FactsOf = Callable[["subprocess.CompletedProcess[str]"], list[dict[str, Any]]]

SCRIPT = """
import json, os, signal
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.declarative import ParallelizationConfig, Trainer, TrainingConfig


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8, dtype=torch.float64)
        self.phase = nn.Linear(8, 3, dtype=torch.float64)
        self.energy = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.phase(hidden), self.energy(hidden)


def divide(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module

    rows = RowwiseParallel()
    parallelize_module(model, mesh, {"body": ColwiseParallel(), "phase": rows, "energy": rows})


def strike():
    place = f"{trainer.rank} {trainer.current_epoch}"
    if os.environ.get("STRIKE") == place and not Path("struck").exists():
        Path("struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)


num_processes = int(os.environ.get("PER_PROCESS", "1"))
x = torch.randn(47, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
config = TrainingConfig(
    model_class=Net,
    dataset=TensorDataset(x, x[:, :3].argmax(1), x[:, 2:].clone()),
    # One sample: the second process has none to validate on.
    validation_ratio=float(os.environ.get("RATIO", "0.2")),
    pred_names_and_types=[("phase", "cls"), ("energy", "regr")],
    loss_function=[nn.CrossEntropyLoss(), nn.MSELoss()],
    task_type="classification and regression",
    # What two processes multiply by two.
    batch_size_per_process=4 * num_processes,
    learning_rate_per_process=0.01 * num_processes,
    optimizer=torch.optim.SGD,
    gradient_clip_norm=2.0,
    gradient_clip_value=0.3,
    num_epochs=3,
    random_seed=int(os.environ["SEED"]) if "SEED" in os.environ else None,
    model_save_dir="out",
    parallelization_params=ParallelizationConfig(
        parallelization_type="multi_node",
        data_parallel=os.environ.get("MODE", "flat"),
        tensor_parallel_size=int(os.environ.get("TENSOR", "1")),
        tensor_plan=divide,
    ),
    post_training_epoch_hook=strike,
)

class OwnLoop(Trainer):
    def run_training_epoch(self):
        for index, batch in enumerate(self.training_dataloader):
            if index == 1 and self.rank == int(os.environ["OWN_LOOP"]) and self.current_epoch == 1:
                if not Path("struck").exists():
                    Path("struck").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.zero_grad()
            self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())[1].backward()
            self.optimizer.step()


trainer = (OwnLoop if "OWN_LOOP" in os.environ else Trainer)(config)
trainer.build()
tracker = trainer.run_training()
wholes = [getattr(p, "full_tensor", lambda p=p: p)() for p in trainer.model.parameters()]
values = torch.cat([p.detach().flatten() for p in wholes])
facts = {
    "rank": trainer.rank,
    "scale": trainer.num_processes,
    "split": trainer.validation_dataset.indices,
    "weights": values.tolist(),
    "tracker": dict(tracker),
}
Path(f"facts-{trainer.rank}.json").write_text(json.dumps(facts))
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)


@pytest.fixture
def torchrun(run_command: Start) -> Start:
    """Run the script as two processes of torchrun."""
    options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

    def run(**variables: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *options, "--no-python"]
        return run_command(command, **variables)

    return run


@pytest.fixture
def facts_of(tmp_path: Path) -> FactsOf:
    """Return a function that returns what the ranks of a run have left."""

    def read(result: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
        assert result.returncode == 0, result.stderr
        paths = sorted(tmp_path.glob("facts-*.json"))
        found = [json.loads(path.read_text()) for path in paths]
        for path in paths:
            path.unlink()
        return found

    return read


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "start",
    [
        "mpich",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("torchrun", "open_mpi", "srun")),
    ],
    indirect=True,
)
def test_two_processes_train_as_one_with_the_same_global_batch(
    start: Start, run_command: Start, facts_of: FactsOf
) -> None:
    one, other = facts_of(start(SEED="3"))
    assert (one.pop("rank"), other.pop("rank")) == (0, 1)
    assert one == other
    assert one["scale"] == 2
    (alone,) = facts_of(run_command([], SEED="3", PER_PROCESS="2"))
    assert alone["split"] == one["split"]
    assert alone["weights"] == pytest.approx(one["weights"], rel=1e-9, abs=1e-12)
    assert alone["tracker"].keys() == one["tracker"].keys()
    for name, values in alone["tracker"].items():
        assert values == pytest.approx(one["tracker"][name], rel=1e-9, abs=1e-12), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["paceline"], indirect=True)
def test_an_empty_validation_shard_and_a_drawn_seed_leave_ranks_alike(
    start: Start, facts_of: FactsOf
) -> None:
    one, other = facts_of(start(RATIO="0.01"))
    assert len(one["split"]) == 1
    assert (one.pop("rank"), other.pop("rank")) == (0, 1)
    assert one == other
    assert one["tracker"]["best_val_loss"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["paceline"], indirect=True)
def test_several_processes_of_single_node_are_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("multi_node", "single_node"))
    result = start()
    assert result.returncode != 0
    assert "`parallelization_type` must be 'multi_node' for the 2 processes that" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["paceline"], indirect=True)
def test_two_processes_divide_a_model_by_a_plan(
    start: Start, run_command: Start, facts_of: FactsOf, tmp_path: Path
) -> None:
    one, other = facts_of(start(SEED="3", TENSOR="2"))
    weights = torch.load(tmp_path / "out/final_model.pth", weights_only=True)
    assert (one.pop("rank"), other.pop("rank")) == (0, 1)
    assert one == other
    # They are one process as far as the data are concerned.
    assert one["scale"] == 1
    (alone,) = facts_of(run_command([], SEED="3"))
    assert alone["split"] == one["split"]
    assert alone["weights"] == pytest.approx(one["weights"], rel=1e-9, abs=1e-12)
    assert sum(weight.numel() for weight in weights.values()) == len(one["weights"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", ["paceline"], indirect=True)
def test_a_sharded_model_is_trained_as_a_whole_one(
    start: Start, run_command: Start, facts_of: FactsOf, tmp_path: Path
) -> None:
    one, other = facts_of(start(SEED="3", MODE="fsdp"))
    weights = torch.load(tmp_path / "out/final_model.pth", weights_only=True)
    assert (one.pop("rank"), other.pop("rank")) == (0, 1)
    assert one == other
    (alone,) = facts_of(run_command([], SEED="3", PER_PROCESS="2", MODE="fsdp"))
    assert alone["weights"] == pytest.approx(one["weights"], rel=1e-9, abs=1e-12)
    assert torch.cat([w.flatten() for w in weights.values()]).tolist() == one["weights"]
    for name, values in alone["tracker"].items():
        assert values == pytest.approx(one["tracker"][name], rel=1e-9, abs=1e-12), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_process_of_a_sharded_training_changes_no_bit(
    rank: int, run_command: Start, facts_of: FactsOf, tmp_path: Path
) -> None:
    options = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=3"]
    command = [sys.executable, *options, "--max-restarts=1", "--"]
    variables = {"SEED": "3", "MODE": "fsdp", "RATIO": "0.3"}
    struck = facts_of(run_command(command, STRIKE=f"{rank} 1", **variables))
    assert (tmp_path / "struck").exists()
    for name in ("out", "paceline_runs"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    assert struck == facts_of(run_command(command, **variables))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_killed_within_a_loop_of_ones_own_changes_no_bit(
    rank: int, run_command: Start, facts_of: FactsOf, tmp_path: Path
) -> None:
    options = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=3"]
    command = [sys.executable, *options, "--max-restarts=1", "--"]
    struck = facts_of(run_command(command, SEED="3", OWN_LOOP=str(rank)))
    assert (tmp_path / "struck").exists()
    for name in ("out", "paceline_runs"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    straight = facts_of(run_command(command, SEED="3", OWN_LOOP="-1"))
    assert struck == straight
    assert len(set(straight[0]["tracker"]["val_loss"])) == 3
