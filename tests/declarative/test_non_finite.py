"""A training loop of a subclass's own whose loss is not finite."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.core import NonFiniteError
from paceline.declarative import ParallelizationConfig, Trainer, TrainingConfig

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))

class Own(Trainer):
    factor = float("nan")
    def run_training_epoch(self):
        for batch in self.training_dataloader:
            _, loss, _, _ = self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())
            self.run_model_update_step(loss * self.factor)

class Plain(Own):
    def run_training_epoch(self):
        for x, y in self.training_dataloader:
            self.optimizer.zero_grad()
            (nn.functional.mse_loss(self.model(x), y) * self.factor).backward()
            self.optimizer.step()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x)

def train(kind, **fields):
    torch.manual_seed(0)
    config = TrainingConfig(
        model_class=Net, training_dataset=data, validation_dataset=data, num_epochs=2,
        loss_function=nn.MSELoss(), task_type="regression", scheduler=None, pred_names=["sum"],
        batch_size_per_process=2, model_save_dir=f"out{kind.__name__}{len(fields)}{kind.factor}",
        parallelization_params=ParallelizationConfig(parallelization_type="multi_node"), **fields,
    )
    trainer = kind(config)
    trainer.build()
    try:
        trainer.run_training()
        return "done"
    except NonFiniteError as error:
        return str(error)

said = [train(Own), train(Plain), train(Own, stop_on_nan=False)]
Own.factor = 1.0
said.append(train(Own))
if int(os.environ.get("RANK", 0)) == 0:
    json.dump(said, open("said.json", "w"))
"""


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_weights_that_a_loop_of_ones_own_has_broken_are_refused(
    tmp_path: Path, torch_ranks: Any, num_ranks: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    done = torch_ranks.run(
        num_ranks, tmp_path / "train.py", directory=tmp_path, environment=environment
    )
    assert done.returncode == 0, done.stdout
    own, plain, *others = json.loads((tmp_path / "said.json").read_text())
    for said in (own, plain):
        assert "`run_training_epoch` left `layer.weight` NaN or infinite after" in said
    assert others == ["done", "done"]
