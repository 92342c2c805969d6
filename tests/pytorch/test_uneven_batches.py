"""Trials whose last batch of an epoch leaves ranks without samples, compared with a plain loop."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SCRIPT = """
import json, sys
import torch
from torch import nn
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context, kind, counts, drops):
        self.context, self.kind, self.counts, self.drops = context, kind, counts, drops
        self.num_trained = 0
        model = nn.Linear(4, 1).double()
        nn.init.constant_(model.weight, 0.1)
        nn.init.constant_(model.bias, 0.2)
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        )
        if kind in ("average", "own average"):
            averages = torch.optim.swa_utils
            half = averages.get_ema_multi_avg_fn(0.5)
            self.average = averages.AveragedModel(self.model, multi_avg_fn=half)
            if kind == "average":
                context.wrap_model(self.average)
        schedulers = torch.optim.lr_scheduler
        if kind == "cycle":
            scheduler = schedulers.OneCycleLR(self.optimizer, 0.2, total_steps=9)
        else:
            scheduler = schedulers.StepLR(self.optimizer, 1, gamma=0.9)
        self.scheduler = context.wrap_lr_scheduler(
            scheduler, pytorch.LRScheduler.StepMode.MANUAL_STEP
        )
    def train_batch(self, batch, epoch_idx, batch_idx):
        if self.kind.startswith("thaws"):
            self.model.bias.requires_grad_(batch_idx == 3)
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        if self.kind in ("by hand", "thaws by hand"):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
        self.scheduler.step()
        if hasattr(self, "average"):
            self.average.update_parameters(self.model)
        if self.counts:
            self.num_trained += 1
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"error": nn.functional.mse_loss(self.model(batch[0]), batch[1])}
    def data(self):
        x = torch.arange(80.0).double().reshape(20, 4).sin()
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.data(), batch_size=size, drop_last=self.drops)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4)

def train(kind="step", counts=False, drops=False):
    with pytorch.init(hparams={"global_batch_size": 6}, seed=7) as context:
        trial = Trial(context, kind, counts, drops)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Epoch(2), checkpoint_period=pytorch.Batch(1)
        )
        rates = [group["lr"] for group in trial.optimizer.param_groups]
        model = getattr(trial, "average", trial.model)
        weights = [value for p in model.parameters() for value in p.flatten().tolist()]
        return context.distributed.allgather([weights, rates, context.loop.position.batches])

said = {kind: train(kind) for kind in ("step", "cycle", "by hand", "average")}
said["drops"] = train(drops=True)
print("COUNTS FROM HERE", flush=True)
train(counts=True)
train("own average")
for kind in ("thaws", "thaws by hand"):
    try:
        train(kind)
        said[kind] = "trained"
    except RuntimeError as error:
        said[kind] = str(error)
if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    json.dump(said, open("said.json", "w"))
"""


def plain_loop(*, kind: str = "step", drops: bool = False) -> tuple[list[float], float, int]:
    x = torch.arange(80.0).double().reshape(20, 4).sin()
    model = nn.Linear(4, 1).double()
    nn.init.constant_(model.weight, 0.1)
    nn.init.constant_(model.bias, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if kind == "cycle":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)
    averages = torch.optim.swa_utils
    average = averages.AveragedModel(model, multi_avg_fn=averages.get_ema_multi_avg_fn(0.5))
    num_batches = 0
    for _ in range(2):
        data = TensorDataset(x, x.sum(1, keepdim=True))
        for batch, target in DataLoader(data, batch_size=6, drop_last=drops):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), target).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            num_batches += 1
    wanted = average if kind == "average" else model
    weights = [value for p in wanted.parameters() for value in p.flatten().tolist()]
    return weights, optimizer.param_groups[0]["lr"], num_batches


@pytest.fixture(scope="module", params=[1, 2, 3])
def done(
    request: Any, tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any
) -> tuple[int, dict[str, list[Any]], str]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    num = request.param
    run = torch_ranks.run(num, directory / "train.py", directory=directory, environment=environment)
    assert run.returncode == 0, run.stdout
    return num, json.loads((directory / "said.json").read_text()), run.stdout


@pytest.mark.long
@pytest.mark.parametrize("kind", ["step", "cycle", "by hand", "average"])
def test_schedulers_and_averages_that_a_batch_updates_are_the_same_as_in_a_plain_loop(
    done: tuple[int, dict[str, list[Any]], str], kind: str
) -> None:
    num_ranks, said, _ = done
    weights, rate, num_batches = plain_loop(kind=kind)
    for of_rank in said[kind]:
        assert of_rank == [pytest.approx(weights), [pytest.approx(rate)], num_batches]
    assert len(said[kind]) == num_ranks


def test_drop_last_trains_the_steps_of_a_plain_loop(
    done: tuple[int, dict[str, list[Any]], str],
) -> None:
    weights, rate, num_batches = plain_loop(drops=True)
    for of_rank in done[1]["drops"]:
        assert of_rank == [pytest.approx(weights), [pytest.approx(rate)], num_batches]


@pytest.mark.parametrize("name", ["num_trained", "average"])
def test_what_lags_on_ranks_without_samples_is_named_once(
    done: tuple[int, dict[str, list[Any]], str], name: str
) -> None:
    num_ranks, _, printed = done
    before = printed.split("COUNTS FROM HERE", 1)[0]
    warning = f"so `self.{name}` is behind there"
    assert warning not in before
    assert printed.count(warning) == (num_ranks > 1)


@pytest.mark.parametrize("kind", ["thaws", "thaws by hand"])
def test_parameters_thawed_where_ranks_have_no_samples_are_refused_by_name(
    done: tuple[int, dict[str, Any], str], kind: str
) -> None:
    num_ranks, said, _ = done
    if num_ranks == 1:
        assert said[kind] == "trained"
        return
    assert said[kind].startswith("`train_batch` must train the same parameters on all ranks")
    assert "some rank trains 4 values, and another 5. Hint: change `requires_grad`" in said[kind]
