"""A split that depends on the rank: refused on three ranks before anything trains on it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from paceline._training.engine.rank_differences import check_same_data

Run = Callable[..., "subprocess.CompletedProcess[str]"]

DATA = TensorDataset(torch.arange(8.0))


class Ranks:
    """Three ranks, of which this is one; all are asked for their data sets at once."""

    size = 3

    def __init__(self, others: list[dict[str, str]]) -> None:
        self.others = others

    def allgather(self, own: dict[str, str]) -> list[dict[str, str]]:
        self.own = own
        return [*self.others, own]


def digest_of(data: object) -> dict[str, str]:
    ranks = Ranks([{"training": ""}])
    with pytest.raises(ValueError, match="must have the same samples"):
        check_same_data(ranks, {"training": data})  # type: ignore[arg-type] # what it asks of them
    return ranks.own


def parts(order: list[int]) -> list[object]:
    subset = Subset(DATA, order)
    sampler: SubsetRandomSampler = SubsetRandomSampler(order)
    return [
        subset,
        DataLoader(subset, batch_size=2),
        DataLoader(DATA, sampler=sampler),
        ConcatDataset([subset, DATA]),
        Subset(Subset(DATA, order), [0, 1]),
        Subset(DATA, torch.tensor(order)),  # type: ignore[arg-type] # users pass tensors too
    ]


def test_indices_are_compared_wherever_they_are() -> None:
    first, again, other = (
        [digest_of(part) for part in parts(order)] for order in ([0, 1, 2], [0, 1, 2], [0, 1, 3])
    )
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


DECLARATIVE = """
import sys, os
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset
from paceline.declarative import ParallelizationConfig, Trainer, TrainingConfig
odd = int(os.environ["RANK"]) == int(sys.argv[1])
x = torch.arange(80.0).reshape(20, 4)
data = TensorDataset(x, x[:, :1])
order = list(range(20))[:: -1 if odd else 1]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x)
config = TrainingConfig(
    model_class=Net, training_dataset=Subset(data, order[4:]),
    validation_dataset=Subset(data, order[:4]), pred_names_and_types=[("y", "regr")],
    loss_function=nn.MSELoss(), task_type="regression", batch_size_per_process=2,
    learning_rate_per_process=0.01, optimizer=torch.optim.SGD, num_epochs=1,
    model_save_dir="out", cpu_only=True,
    parallelization_params=ParallelizationConfig(parallelization_type="multi_node"),
)
Trainer(config).build()
print("BUILT")
"""

TRIAL = """
import sys
import torch
from torch import nn
from torch.utils.data import random_split, TensorDataset
from paceline import pytorch
class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        odd = context.distributed.rank == int(sys.argv[1])
        generator = torch.Generator().manual_seed(1 if odd else 0)
        data = TensorDataset(torch.arange(20.0)[:, None])
        self.parts = random_split(data, [16, 4], generator=generator)
    def train_batch(self, batch, epoch_idx, batch_idx):
        print("TRAINED")
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"loss": 0.0}
    def build_training_data_loader(self):
        return pytorch.DataLoader(self.parts[0], batch_size=2)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.parts[1], batch_size=2)
with pytorch.init(hparams={"global_batch_size": 6}) as context:
    pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(2))
print("BUILT")
"""


@pytest.mark.long
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("script", [DECLARATIVE, TRIAL], ids=["declarative", "trial"])
def test_a_split_that_depends_on_the_rank_is_refused_with_ranks(
    run_python: Run, tmp_path: Path, script: str, odd: int
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [
        sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node=3",
        "train.py", str(odd),
    ]  # fmt: skip
    done = run_python(f"import subprocess, sys; sys.exit(subprocess.call({json.dumps(command)}))")
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    assert "The training data must have the same samples on all ranks" in said
    assert f"but those of rank {odd} are others than those of ranks {others}." in said
    assert "BUILT" not in said
    assert "TRAINED" not in said


@pytest.mark.parametrize(
    ("script", "given"),
    [
        (DECLARATIVE, 'model_save_dir="out"'),
        (TRIAL, 'hparams={"global_batch_size": 6}'),
    ],
    ids=["declarative", "trial"],
)
def test_nothing_is_compared_if_ranks_are_not(
    torch_ranks: Any, tmp_path: Path, clean_environment: dict[str, str], script: str, given: str
) -> None:
    (tmp_path / "train.py").write_text(script.replace(given, f"{given}, check_ranks=False"))
    arguments = tmp_path / "train.py", "2"
    environment = {**clean_environment, "OMP_NUM_THREADS": "1"}
    done = torch_ranks.run(3, *arguments, directory=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("BUILT") == 3


@pytest.mark.parametrize("odd", [0, 2])
def test_data_to_evaluate_that_depend_on_the_rank_are_refused_with_ranks(
    torch_ranks: Any, tmp_path: Path, clean_environment: dict[str, str], odd: int
) -> None:
    script = TRIAL.replace("manual_seed(1 if odd else 0)", "manual_seed(0)").replace(
        "pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(2))",
        """trial = Trial(context)
    data = torch.arange(20.0)[:, None]
    if context.distributed.rank == int(sys.argv[1]):
        data = data.flip(0)
    other = pytorch.DataLoader(TensorDataset(data), batch_size=2)
    pytorch.Trainer(trial, context).evaluate(other)""",
    )
    (tmp_path / "train.py").write_text(script)
    arguments = tmp_path / "train.py", str(odd)
    environment = {**clean_environment, "OMP_NUM_THREADS": "1"}
    done = torch_ranks.run(3, *arguments, directory=tmp_path, environment=environment)
    assert done.returncode != 0, done.stdout
    assert "The evaluated data must have the same samples on all ranks" in done.stdout
    assert f"but those of rank {odd} are others than those of ranks" in done.stdout
    assert "BUILT" not in done.stdout
