"""Layers of a trial that are thawed in training, compared with a plain loop."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCRIPT = """
import json, os
import torch
from torch import nn
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context, is_plain):
        self.context, self.is_plain = context, is_plain
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.1 * (1 + number))
        self.plain = model
        model[0].requires_grad_(False)
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.plain[0].requires_grad_(epoch_idx > 0)
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        if self.is_plain:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"error": nn.functional.mse_loss(self.model(batch[0]), batch[1])}
    def data(self):
        x = torch.arange(80.0).double().reshape(20, 4).sin()
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=self.context.get_per_slot_batch_size())
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4)

def train(is_plain):
    with pytorch.init(
        hparams={"global_batch_size": 6}, seed=7, data_parallel="overlapped"
    ) as context:
        trial = Trial(context, is_plain)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Epoch(2), checkpoint_period=pytorch.Epoch(1)
        )
        weights = [parameter.tolist() for parameter in trial.plain.parameters()]
        return context.distributed.allgather(weights)

said = [train(False), train(True)]
if int(os.environ.get("RANK", 0)) == 0:
    json.dump(said, open("said.json", "w"))
"""


def plain_loop() -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (1 + number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.arange(80.0).double().reshape(20, 4).sin()
    for epoch in range(2):
        model[0].requires_grad_(epoch > 0)
        for batch, target in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_layers_thawed_in_an_overlapped_model_are_trained_as_in_a_plain_loop(
    tmp_path: Path, torch_ranks: Any, num_ranks: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    done = torch_ranks.run(
        num_ranks, tmp_path / "train.py", directory=tmp_path, environment=environment
    )
    assert done.returncode == 0, done.stdout
    expected = plain_loop()
    for by_rank in json.loads((tmp_path / "said.json").read_text()):
        assert len(by_rank) == num_ranks
        for weights in by_rank:
            for found, wanted in zip(weights, expected, strict=True):
                torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted)
