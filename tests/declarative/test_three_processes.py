"""Config objects on three processes: what one process gives, within rounding."""

import json
import os
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline.declarative import ParallelizationConfig, Trainer, TrainingConfig

x = torch.randn(43, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
num_processes = int(sys.argv[1])
Path(sys.argv[1]).mkdir(exist_ok=True)
os.chdir(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        body = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)
        self.body = nn.Sequential(*body).double()

    def forward(self, x):
        return self.body(x)


def config_of(name, mode="flat", **fields):
    kind = "multi_node" if num_processes > 1 else "single_node"
    return TrainingConfig(**{
        **dict(
            model_class=Net, training_dataset=data, validation_dataset=data,
            pred_names=["sum"], loss_function=nn.MSELoss(), num_epochs=2, random_seed=1,
            # What three processes multiply by three; the last batch of an epoch has 7 samples,
            # so that the third process has none of it.
            batch_size_per_process=12 // num_processes,
            learning_rate_per_process=0.06 / num_processes,
            optimizer=torch.optim.SGD, optimizer_params={"momentum": 0.9}, scheduler=None,
            model_save_dir=name,
            parallelization_params=ParallelizationConfig(
                parallelization_type=kind, data_parallel=mode if num_processes > 1 else "flat"
            ),
        ),
        **fields,
    })


def values(model):
    return [v.item() for p in model.state_dict().values() for v in p.flatten()]


def plain(mode):
    trainer = Trainer(config_of(mode, mode))
    trainer.build()
    history = trainer.run_training()
    return {"weights": values(trainer.get_model_object()), "losses": history["val_loss"]}


class Averaged(Trainer):
    def build_optimizer(self):
        super().build_optimizer()
        averages = torch.optim.swa_utils
        half = averages.get_ema_multi_avg_fn(0.5)
        average = averages.AveragedModel(self.get_model_object(), multi_avg_fn=half)
        self.average = self.context.wrap_model(average)

    def run_model_update_step(self, loss):
        super().run_model_update_step(loss)
        self.average.update_parameters(self.get_model_object())


def averaged():
    trainer = Averaged(config_of("averaged"))
    trainer.build()
    trainer.run_training()
    return {"weights": values(trainer.average)}


class Scheduled(Trainer):
    def build_dataloaders(self):
        super().build_dataloaders()
        size = self.configs.batch_size_per_process
        # 43 samples: three batches of 12 a whole, or eleven shards of 4.
        loader = DataLoader(self.training_dataset, batch_size=size, drop_last=True)
        self.training_dataloader = loader if self.drops else self.training_dataloader

    def build_scheduler(self):
        self.num_batches = len(self.training_dataloader)
        steps = self.num_batches * self.configs.num_epochs
        schedulers = torch.optim.lr_scheduler
        self.scheduler = schedulers.OneCycleLR(self.optimizer, 0.2, total_steps=steps)


def scheduled(drops):
    trainer = Scheduled(config_of(f"scheduled {drops}"))
    trainer.drops = drops
    trainer.build()
    trainer.run_training()
    num_steps = len(trainer.loss_tracker["lrs"])
    weights = values(trainer.get_model_object())
    return {"weights": weights, "length": trainer.num_batches, "steps": num_steps}


def resumed():
    # Training in two parts, on a file system that shows the others late what the chief has written.
    first = Trainer(config_of("halves", num_epochs=1))
    first.build()
    first.run_training()
    Path("late").mkdir(exist_ok=True)
    if first.rank == 0:
        Path("late/checkpoints").symlink_to("../halves/checkpoints")
    directory = "late" if first.rank else "halves"
    trainer = Trainer(config_of("halves", checkpoint_dir=directory))
    trainer.build()
    history = trainer.run_training()
    return {"weights": values(trainer.get_model_object()), "losses": history["val_loss"]}


cases = {
    "flat": plain("flat"),
    "overlapped": plain("overlapped"),
    "resumed": resumed(),
    "averaged": averaged(),
    "scheduled": scheduled(False),
    "dropped": scheduled(True),
}
rank = torch.distributed.get_rank() if num_processes > 1 else 0
with open(f"out-{rank}.json", "w") as file:
    json.dump(cases, file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> dict[str, Any]:
    """Return what each case gave in one process, and in each of three."""
    directory = tmp_path_factory.mktemp("three")
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    found = {}
    for size in (1, 3):
        script = directory / "train.py", str(size)
        done = torch_ranks.run(size, *script, directory=directory, environment=environment)
        assert done.returncode == 0, done.stdout
        for rank in range(size):
            found[size, rank] = json.loads((directory / f"{size}/out-{rank}.json").read_text())
    return {case: [found[key][case] for key in found] for case in found[1, 0]}


@pytest.mark.long
@pytest.mark.parametrize(
    "case", ["flat", "overlapped", "resumed", "averaged", "scheduled", "dropped"]
)
def test_three_processes_give_what_one_gives(trained: dict[str, Any], case: str) -> None:
    alone, *together = trained[case]
    assert together[0] == together[1] == together[2]
    for name, found in alone.items():
        assert together[0][name] == pytest.approx(found, rel=1e-9, abs=1e-12), name


def test_ranks_go_on_from_what_the_chief_finds(trained: dict[str, Any]) -> None:
    assert trained["resumed"] == trained["flat"]
