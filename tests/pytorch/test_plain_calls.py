"""Trials that call `loss.backward()` and `optimizer.step()` themselves, on 1, 2 and 3 ranks."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, logging, sys
import torch
from torch import nn
from paceline import pytorch

class Warnings(logging.Handler):
    texts = []
    def emit(self, record):
        self.texts.append(record.getMessage())

logging.getLogger("paceline").addHandler(Warnings(logging.WARNING))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.unused = nn.Linear(2, 2)
    def forward(self, x):
        return self.body(x)

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        torch.manual_seed(3)
        self.model = context.wrap_model(Net().double())
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = self.make_optimizer([*self.model.parameters(), self.scale])
        self.optimizer = context.wrap_optimizer(optimizer)
        every_step = pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP
        decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        context.wrap_lr_scheduler(decay, every_step)
    def make_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    def loss(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]) * self.scale, batch[1])
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}
    def evaluate_batch(self, batch):
        with torch.no_grad():
            return {"error": self.loss(batch)}
    def data(self, size=41):
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1)).double()
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self.data(), batch_size=size, shuffle=True)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(5), batch_size=self.context.get_per_slot_batch_size())

class Zeroed(Trial):
    "Clear gradients at the end."
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss

class Clipped(Trial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        return {"loss": loss, "norm": self.norm}

class TwoLosses(Trial):
    "Two backward passes before a step, the second one of some parameters only."
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.scale.pow(2).sum().backward()
        self.optimizer.step()
        return {"loss": loss}

class ByHand(Trial):
    "Gradients of two batches for a step."
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch) / 2
        loss.backward()
        if batch_idx % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss}

class Gan(Trial):
    "Two optimizers; the second steps every third batch and its loss reaches both models."
    def __init__(self, context):
        super().__init__(context)
        self.generator = context.wrap_model(nn.Linear(4, 4).double())
        adam = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        self.second = context.wrap_optimizer(adam)
    def step_second(self, loss):
        self.second.zero_grad()
        loss.backward()
        self.second.step()
    def train_batch(self, batch, epoch_idx, batch_idx):
        x, y = batch
        made = self.generator(x)
        self.optimizer.zero_grad()
        loss = self.loss((made.detach(), y))
        loss.backward()
        self.optimizer.step()
        if batch_idx % 3 == 2:
            self.step_second((self.model(made) - 1).pow(2).mean())
        return {"loss": loss}

class HalfContext(Gan):
    "The second optimizer goes by the context."
    def step_second(self, loss):
        self.context.backward(loss)
        self.context.step_optimizer(self.second)

class StepOfContext(Trial):
    "Plain backward, the context's step with clipping."
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        loss.backward()
        clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3)
        self.context.step_optimizer(self.optimizer, clip)
        return {"loss": loss}

class Lbfgs(Trial):
    "Calls the closure as often as the loss asks for."
    def make_optimizer(self, parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    def train_batch(self, batch, epoch_idx, batch_idx):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss
        return {"loss": self.optimizer.step(closure).detach()}

class Scaled(Trial):
    "A gradient scaler with an infinite gradient on one rank, which all of them skip."
    def __init__(self, context):
        super().__init__(context)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        self.scaler = self.wrap(scaler)
    def wrap(self, scaler):
        return self.context.wrap_scaler(scaler)
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        factor = float("inf") if batch_idx == 5 else 1.0
        self.scaler.scale(loss * factor).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"loss": loss, "factor": self.scaler.get_scale()}

class Evaluating(Trial):
    "Backward passes in validation are each rank's own, and ranks have different batches."
    def evaluate_batch(self, batch):
        with torch.enable_grad():
            error = self.loss(batch)
            error.backward()
        return {"error": error.detach()}

class Whole(Trial):
    "The chief alone evaluates, with a backward pass and a private optimizer."
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch
    def evaluate_full_dataset(self, data_loader):
        noise = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        private = torch.optim.SGD([noise], lr=0.1)
        x, y = self.data()[:]
        with torch.enable_grad():
            error = self.loss((x + noise, y))
            error.backward()
        private.step()
        return {"error": error.item()}

class Private(Trial):
    "An optimizer of inputs, which are no part of the model."
    def train_batch(self, batch, epoch_idx, batch_idx):
        noise = nn.Parameter(torch.zeros_like(batch[0]))
        private = torch.optim.SGD([noise], lr=0.1)
        gradient, = torch.autograd.grad(-self.loss((batch[0] + noise, batch[1])), [noise])
        noise.grad = gradient.sign()
        private.step()
        return super().train_batch((batch[0] + noise.detach(), batch[1]), epoch_idx, batch_idx)

class Grown(Trial):
    "A parameter group that comes later."
    def make_optimizer(self, parameters):
        return super().make_optimizer(parameters[:-1])
    def build_callbacks(self):
        trial = self
        class Grow(pytorch.PyTorchCallback):
            def on_training_epoch_end(self, epoch_idx):
                if epoch_idx == 0:
                    trial.optimizer.add_param_group({"params": [trial.scale], "lr": 0.1})
        return {"grow": Grow()}

class ByParent(torch.optim.SGD):
    "An optimizer whose step is that of its parent class."
    def step(self, closure=None):
        return super().step(closure)

class Inherited(Trial):
    def make_optimizer(self, parameters):
        return ByParent(parameters, lr=0.1, momentum=0.9)

class InheritedByContext(Inherited):
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

class StepMixed(Trial):
    "The context's backward, a plain step."
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss}

class BackwardMixed(Trial):
    "A plain backward pass, then one of the context."
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        loss.backward()
        self.context.backward(self.scale.pow(2).sum())
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

class ClippedBetween(Trial):
    "Clip by hand what the context has not summed."
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

class ClippedByContext(Trial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.3)
        self.context.step_optimizer(self.optimizer, clip)
        return {"loss": loss}

class Later(Trial):
    "Plain calls after some of the context."
    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx > 3:
            return super().train_batch(batch, epoch_idx, batch_idx)
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

class OwnScaler(Scaled):
    "A scaler that is not wrapped."
    def wrap(self, scaler):
        return scaler

class Unwrapped(Gan):
    def __init__(self, context):
        super().__init__(context)
        self.second = torch.optim.Adam(self.generator.parameters(), lr=0.01)

class Loop(Trial):
    "A loop over the data in a callback."
    def build_callbacks(self):
        trial = self
        class Loop(pytorch.PyTorchCallback):
            def on_training_epoch_end(self, epoch_idx):
                trial.train_batch(trial.data()[:6], 0, 0)
        return {"loop": Loop()}

def train(kind, options, fit):
    said, Warnings.texts = {}, []
    options = {"hparams": {"global_batch_size": 12}, "seed": 7, **options}
    with pytorch.init(**options) as context:
        fit = {"max_length": pytorch.Batch(17), "reporting_period": pytorch.Batch(5), **fit}
        try:
            trial = kind(context)
            result = pytorch.Trainer(trial, context).fit(**fit)
            said["rows"] = [
                {k: v for k, v in row.metrics.items()} for row in result.history("training")
            ]
            said["error"] = result.metrics["error"]
            parameters = [p for model in context.models for p in model.parameters()]
            said["weights"] = torch.cat([p.detach().flatten() for p in (*parameters, trial.scale)])
            said["weights"] = [value.hex() for value in said["weights"].tolist()]
            said["num_steps"] = [*context.stepper.num_steps_of.values()]
            said["rate"] = trial.optimizer.param_groups[0]["lr"]
        except RuntimeError as error:
            said["raised"] = str(error)
        said["warned"] = [text for text in Warnings.texts if "must not change gradients" in text]
        return context.distributed, context.distributed.allgather(said)

OVERLAPPED = {"data_parallel": "overlapped"}
for case in sys.argv[1:]:
    name, _, option = case.partition("/")
    options = {"overlapped": OVERLAPPED, "fp16": {"precision": "fp16"}, "shards": {"num_shards": 4}}
    fit = {"aggregation_frequency": 2} if option == "window" else {}
    place, by_rank = train(globals()[name], options.get(option, {}), fit)
    if place.rank == 0:
        print("SAID", json.dumps([case, by_rank]), flush=True)
"""

TRAINED = (
    *("Trial", "Zeroed", "Clipped", "TwoLosses", "ByHand", "Gan", "HalfContext", "StepOfContext"),
    *("Lbfgs", "Scaled", "Evaluating", "Whole", "Private", "Grown"),
    *("Trial/overlapped", "Clipped/overlapped", "Lbfgs/overlapped"),
    *("ClippedByContext/window", "ClippedByContext/shards"),
    *("Inherited", "Inherited/overlapped", "InheritedByContext", "InheritedByContext/fp16"),
)
# What clips a part of the gradients on any number of ranks, and what only on several.
CLIPPED_IN_PARTS = ("ClippedBetween", "ClippedBetween/window", "ClippedBetween/shards")
# What is refused on any number of ranks, and what only on several.
REFUSED = {
    "Trial/window": "`Trial.train_batch` must not call `.*`, as an optimizer step has 2 batches",
    "StepOfContext/window": "StepOfContext.train_batch` must (not )?call `",
    "Trial/shards": "`Trial.train_batch` must not call `.*as a batch has more shards than the",
    "StepMixed/fp16": "StepMixed.train_batch` must step its optimizer by `context.step_optimizer`",
}
REFUSED_ON_SEVERAL = {
    "StepMixed": "StepMixed.train_batch` must step its optimizer by `context.step_optimizer`",
    "BackwardMixed": "BackwardMixed.train_batch` must run all backward passes",
    "Later": "`Later.train_batch` must step its optimizer by `context.step_optimizer`",
    "OwnScaler": "OwnScaler.train_batch` must not step by a gradient scaler",
    "Unwrapped": "optimizer that `Unwrapped.step_second` steps must be wrapped, but Adam is not",
    "Gan/overlapped": "must not call `loss.backward\\(\\)`, as there are several models",
    "Loop": "`Loop.train_batch` must not step a wrapped optimizer outside",
}

Said = Mapping[str, list[dict[str, Any]]]


def run(ranks: Any, directory: Path, num_ranks: int) -> Said:
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    cases = [*TRAINED, *CLIPPED_IN_PARTS, *REFUSED, *REFUSED_ON_SEVERAL]
    script = directory / "train.py"
    done = ranks.run(
        num_ranks, script, *cases, directory=directory, environment=environment, timeout_s=300
    )
    assert done.returncode == 0, done.stdout
    lines = [line.partition("SAID ")[2] for line in done.stdout.splitlines() if "SAID " in line]
    return dict(json.loads(line) for line in lines)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> Said:
    return run(torch_ranks, tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any
) -> Said:
    """With 3 ranks, the last batch of an epoch has 5 samples: shards of 4, 1 and 0."""
    return run(torch_ranks, tmp_path_factory.mktemp("several"), request.param)


@pytest.mark.parametrize("case", TRAINED)
def test_plain_calls_train_all_ranks_as_one(alone: Said, several: Said, case: str) -> None:
    expected = alone[case][0]
    weights = [float.fromhex(value) for value in expected["weights"]]
    for said in several[case]:
        assert "raised" not in said
        assert not said["warned"]
        assert said["weights"] == several[case][0]["weights"]
        values = [float.fromhex(value) for value in said["weights"]]
        assert values == pytest.approx(weights, rel=1e-6, abs=1e-9)
        assert said["error"] == pytest.approx(expected["error"], rel=1e-6)
        assert said["rate"] == pytest.approx(expected["rate"])
        for row, expected_row in zip(said["rows"], expected["rows"], strict=True):
            assert row == pytest.approx(expected_row, rel=1e-6)


@pytest.mark.parametrize("case", ["Inherited", "InheritedByContext", "InheritedByContext/fp16"])
def test_a_step_within_a_step_of_its_own_optimizer_is_no_other_step(
    alone: Said, several: Said, case: str
) -> None:
    for said in (*alone[case], *several[case]):
        assert said["rate"] == pytest.approx(alone["Trial"][0]["rate"])
        assert said["num_steps"] == [17]
        if "fp16" not in case:
            values = [float.fromhex(value) for value in said["weights"]]
            expected = [float.fromhex(value) for value in alone["Trial"][0]["weights"]]
            assert values == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_train_something_else_is_refused(alone: Said, several: Said, case: str) -> None:
    for said in (*alone[case], *several[case]):
        with pytest.raises(RuntimeError, match=REFUSED[case]):
            raise RuntimeError(said.get("raised"))


@pytest.mark.parametrize("case", REFUSED_ON_SEVERAL)
def test_what_would_train_ranks_apart_is_refused(alone: Said, several: Said, case: str) -> None:
    assert "weights" in alone[case][0]
    for said in several[case]:
        with pytest.raises(RuntimeError, match=REFUSED_ON_SEVERAL[case]):
            raise RuntimeError(said.get("raised"))


@pytest.mark.parametrize("case", CLIPPED_IN_PARTS)
def test_clipping_of_a_part_of_the_gradients_is_told_once(
    alone: Said, several: Said, case: str
) -> None:
    reasons = {
        "ClippedBetween": "the . ranks' gradients are summed with the step",
        "ClippedBetween/window": "an optimizer step has 2 batches",
        "ClippedBetween/shards": "a batch has more shards than the",
    }
    chief, *others = [said["warned"] for said in several[case]]
    assert re.search(f"ClippedBetween.train_batch` must not .*, as {reasons[case]}", *chief)
    assert not any(others)
    assert len(alone[case][0]["warned"]) == (case != "ClippedBetween")
