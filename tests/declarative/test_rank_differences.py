"""Processes of a config that have drifted apart."""

import json
import os
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.declarative import ParallelizationConfig, Trainer, TrainingConfig
from paceline.pytorch import RanksDifferError

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    def forward(self, x):
        return self.body(x)

def train(odd, **fields):
    config = TrainingConfig(
        model_class=Net, dataset=TensorDataset(x, x.sum(1, keepdim=True)), num_epochs=1,
        pred_names=["sum"], loss_function=nn.MSELoss(), task_type="regression", scheduler=None,
        batch_size_per_process=4, model_save_dir=f"out{odd}{len(fields)}",
        parallelization_params=ParallelizationConfig(parallelization_type="multi_node"), **fields,
    )
    trainer = Trainer(config)
    trainer.build()
    if trainer.rank == odd:
        with torch.no_grad():
            trainer.model.body[2].weight += 1
    try:
        trainer.run_training()
        return "same"
    except RanksDifferError as error:
        return str(error)

said = [train(0), train(2), train(None), train(2, check_ranks=False)]
if torch.distributed.get_rank() == 0:
    json.dump(said, open("said.json", "w"))
"""


def test_weights_that_differ_are_named_with_the_ranks_unless_that_is_turned_off(
    tmp_path: Path, torch_ranks: Any
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    done = torch_ranks.run(3, tmp_path / "train.py", directory=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout
    first, last, *others = json.loads((tmp_path / "said.json").read_text())
    assert "`model_0.body.2.weight` must be the same on all ranks" in first
    assert "one on rank 0, one on ranks 1, 2" in first
    assert "one on ranks 0, 1, one on rank 2" in last
    assert others == ["same", "same"]
