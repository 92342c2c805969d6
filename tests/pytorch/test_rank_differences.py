"""Ranks that have drifted apart: found at the start or at the next checkpoint, and named."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
from torch import nn
from paceline import pytorch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 4)
        self.tied = nn.Linear(8, 4)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
    def forward(self, x):
        hidden = self.drop(self.norm(self.first(x)).tanh())
        return (self.last(hidden) + self.tied(hidden)).sum(1, keepdim=True) * self.scale[0]

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context, what, odd, size):
        self.context, self.what, self.size, self.num_trained = context, what, size, 0
        self.is_odd = context.distributed.rank == odd
        self.model = Net()
        self.model.first.bias.requires_grad_(False)
        self.model = context.wrap_model(self.model)
        self.average = context.wrap_model(torch.optim.swa_utils.AveragedModel(self.model))
        is_other = what == "initialisation" and self.is_odd
        self.plain = nn.Parameter(torch.full((2,), 2.0 if is_other else 1.0))
        rate = 0.02 if what == "rate" and self.is_odd else 0.01
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam([*trained, self.plain], lr=rate))
        if what == "weights" and self.is_odd:
            with torch.no_grad():
                self.model.last.weight[1, 2] += 1e-6
        if what == "buffer" and self.is_odd:
            self.model.scale[2] = 2
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]) * self.plain.mean(), batch[1])
        self.model.queue[batch_idx % 4] = batch[0].mean() if self.what == "queue" else 0
        self.model.cache += batch[0].mean()
        if self.what == "autograd":
            parameters = self.optimizer.param_groups[0]["params"]
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
                parameter.grad = gradient
            torch.optim.Adam.step(self.optimizer)
        else:
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
        if self.what != "average" or self.is_odd:
            self.average.update_parameters(self.model)
        self.num_trained += 1
        return {"loss": loss}
    def evaluate_batch(self, batch):
        if self.what == "validation" and self.is_odd and self.num_trained > 2:
            with torch.no_grad():
                self.model.first.weight *= 2
        return {"error": nn.functional.mse_loss(self.model(batch[0]), batch[1])}
    def data(self):
        x = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4, shuffle=True)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4)

class SteppedByHand(Trial):
    # Ranks without samples get what the chief has then.
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + batch_idx)
        with torch.no_grad():
            self.model.tied.bias.clamp_(max=-0.01 * batch_idx)
        loss = nn.functional.mse_loss(self.model(batch[0]) * self.plain.mean(), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.is_odd and batch_idx == {"before": 1, "within": 3}.get(self.what):
            with torch.no_grad():
                self.model.last.weight[1, 2] += 1e-3
        if self.is_odd and batch_idx == 3 and self.what == "rate within":
            self.optimizer.param_groups[0]["lr"] = 0.5
        return {"loss": loss}

def train(what, odd, period=4, kind=Trial, size=40, **options):
    with pytorch.init(hparams={"global_batch_size": 12}, seed=7, **options) as context:
        trial = kind(context, what, odd, size)
        try:
            pytorch.Trainer(trial, context).fit(
                max_length=pytorch.Batch(8),
                validation_period=pytorch.Batch(4),
                checkpoint_period=pytorch.Batch(period),
            )
            said = "same"
        except pytorch.RanksDifferError as error:
            said = str(error)
        by_rank = context.distributed.allgather([said, context.loop.position.batches])
    return by_rank

def train_pieces(what):
    try:
        with pytorch.init(hparams={"global_batch_size": 12}, seed=7) as context:
            trainer = pytorch.Trainer(Trial(context, what, None, 48), context)
            trainer.train_for(pytorch.Batch(2))
            trainer.train_for(pytorch.Batch(1))
        return ["same"]
    except pytorch.RanksDifferError as error:
        return [str(error)]

said = {}
for what in ("weights", "initialisation", "rate", "buffer", "autograd", "validation"):
    for odd in (0, 2):
        said[f"{what} {odd}"] = train(what, odd, size=48 if what == "autograd" else 40)
said["queue"] = train("queue", 2)
said["named queue"] = train("queue", 2, check_ranks="*queue")
said["off"] = train("weights", 2, check_ranks=False)
for name in ("flat", "overlapped"):
    said[name] = train("", 0, data_parallel=name)
    said[f"weights {name}"] = train("weights", 2, data_parallel=name)
said["average"] = train("average", 0)
said["idle"] = train("", 0, num_shards=2)
by_hand = {"period": 8, "kind": SteppedByHand}
for odd in (0, 2):
    said[f"before the last batch {odd}"] = train("before", odd, **by_hand)
for odd in (0, 1):
    said[f"within the last batch {odd}"] = train("within", odd, size=44, **by_hand)
    said[f"with an idle rank {odd}"] = train("within", odd, num_shards=2, size=32, **by_hand)
said["rate within the last batch"] = train("rate within", 1, size=44, **by_hand)
said["by autograd"] = train("autograd", None, period=8)
for size in (40, 44):
    said[f"by hand {size}"] = train("", None, size=size, **by_hand)
said["by hand idle"] = train("", None, num_shards=2, **by_hand)
said["by hand named"] = train("before", 2, check_ranks=["*weight"], **by_hand)
said["by hand off"] = train("before", 2, check_ranks=False, **by_hand)
said["pieces by autograd"], said["pieces"] = train_pieces("autograd"), train_pieces("")
if torch.distributed.get_rank() == 0:
    json.dump(said, open("said.json", "w"))
"""

# What differs, and how many batches are trained before it is found.
FOUND = {
    "weights": ("model_0.last.weight", 0),
    "initialisation": (r"parameter \d+ of optimizer 0", 0),
    "rate": ("lr of group 0 of optimizer 0", 0),
    "buffer": ("model_0.scale", 0),
    "autograd": ("model_0.first.weight", 4),
    "validation": ("model_0.first.weight", 4),
}
GROUPS = {0: "on rank 0, .* on ranks 1, 2", 2: "on ranks 0, 1, .* on rank 2"}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> dict[str, list[list[Any]]]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    done = torch_ranks.run(3, directory / "train.py", directory=directory, environment=environment)
    assert done.returncode == 0, done.stdout
    found: dict[str, list[list[Any]]] = json.loads((directory / "said.json").read_text())
    return found


@pytest.mark.long
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", FOUND)
def test_the_first_tensor_that_differs_is_named_with_the_ranks(
    said: dict[str, list[list[Any]]], what: str, odd: int
) -> None:
    name, num_batches = FOUND[what]
    messages = {message for message, _ in said[f"{what} {odd}"]}
    assert len(messages) == 1
    ranks = ".* on rank 0, .* on rank 1, .* on rank 2" if what == "autograd" else GROUPS[odd]
    assert re.match(f"`{name}` must be the same on all ranks, but .*{ranks}", messages.pop())
    assert {batch for _, batch in said[f"{what} {odd}"]} == {num_batches}


@pytest.mark.parametrize(
    ("case", "name", "groups"),
    [
        ("before the last batch 0", "model_0.last.weight", GROUPS[0]),
        ("before the last batch 2", "model_0.last.weight", GROUPS[2]),
        ("within the last batch 0", "model_0.last.weight", "on rank 0, .* on rank 1"),
        ("within the last batch 1", "model_0.last.weight", "on rank 0, .* on rank 1"),
        ("with an idle rank 0", "model_0.last.weight", "on rank 0, .* on rank 1"),
        ("with an idle rank 1", "model_0.last.weight", "on rank 0, .* on rank 1"),
        ("rate within the last batch", "lr of group 0 of optimizer 0", "rank 0, 0.5 on rank 1"),
        ("by autograd", "model_0.first.weight", "on rank 0, .* on rank 1, .* on rank 2"),
    ],
)
def test_ranks_are_compared_before_those_without_samples_get_the_results_of_the_chief(
    said: dict[str, list[list[Any]]], case: str, name: str, groups: str
) -> None:
    (message, num_batches), *others = said[case]
    assert others == [[message, num_batches]] * 2
    assert re.match(f"`{name}` must be the same on all ranks, but .*{groups}", message)
    assert num_batches == 4


@pytest.mark.parametrize("case", ["40", "44", "idle", "named", "off"])
def test_ranks_without_samples_are_no_difference(
    said: dict[str, list[list[Any]]], case: str
) -> None:
    assert said[f"by hand {case}"] == [["same", 8]] * 3


def test_a_buffer_of_each_rank_is_refused_unless_it_is_named(
    said: dict[str, list[list[Any]]],
) -> None:
    assert "`model_0.queue` must be the same" in said["queue"][0][0]
    assert said["named queue"] == [["same", 8]] * 3


def test_nothing_is_compared_if_that_is_turned_off(said: dict[str, list[list[Any]]]) -> None:
    assert said["off"] == [["same", 8]] * 3


@pytest.mark.parametrize("case", ["flat", "overlapped", "idle", "average"])
def test_batch_norm_dropout_ties_frozen_and_averaged_models_are_no_difference(
    said: dict[str, list[list[Any]]], case: str
) -> None:
    assert said[case] == [["same", 8]] * 3


def test_overlapped_models_are_compared(said: dict[str, list[list[Any]]]) -> None:
    assert "`model_0.last.weight` must be the same" in said["weights overlapped"][2][0]


def test_a_training_without_checkpoints_is_compared_at_its_end(
    said: dict[str, list[Any]],
) -> None:
    assert "`model_0.first.weight` must be the same" in said["pieces by autograd"][0]
    assert said["pieces"] == ["same"]
