"""Steps do not wait for the device, and compiled ones are told rightly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import pytorch


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_do_not_wait_for_the_device(
    precision: str, device: torch.device, trial_class: Any, fit: Callable[..., Any]
) -> None:
    """Between the first batch and the last one, at which training reports."""

    class Trial(trial_class):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error" if 1 < batch_idx < 98 else "default")
            return super().train_batch(batch, epoch_idx, batch_idx)

    result = fit(Trial, 100, precision=precision, checkpoint_period=pytorch.Batch(100))
    assert result.steps_completed == 100
    assert result.metrics["loss"] < 0.6


def test_a_compiled_model_trains_as_a_plain_one(
    device: torch.device, trial_class: Any, fit: Callable[..., Any]
) -> None:
    """And its checkpoint is that of a plain one."""
    names, losses = [], []

    def make(is_compiled: bool) -> Callable[[Any], Any]:
        def made(context: Any) -> Any:
            trial = trial_class(context)
            trial.model[2].p = 0.0
            if is_compiled:
                trial.model.compile(backend="inductor" if device.type == "cuda" else "eager")
            names.append(sorted(trial.model.state_dict()))
            return trial

        return made

    for is_compiled in (False, True):
        losses.append(fit(make(is_compiled), 30).metrics["loss"])
    assert names[0] == names[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_metrics_that_a_cuda_graph_computes_are_those_of_their_batch(
    device: torch.device, trial_class: Any, fit: Callable[..., Any]
) -> None:
    """Each run of a graph computes them in the same memory."""
    losses: list[float] = []
    reported: list[float] = []

    class Noting(pytorch.PyTorchCallback):
        def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
            reported.append(avg_metrics["loss"])

    class Trial(trial_class):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            options = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "eager"}
            self.compiled = torch.compile(super().loss_of, **options)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.compiled(batch)
            losses.append(loss.item())
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def build_callbacks(self) -> Any:
            return {"noting": Noting()}

    fit(Trial, 20, reporting_period=pytorch.Batch(10))
    means = [sum(losses[start : start + 10]) / 10 for start in (0, 10)]
    assert reported == pytest.approx(means, rel=1e-6)


def test_several_models_and_optimizers_train(
    device: torch.device, trial_class: Any, fit: Callable[..., Any]
) -> None:
    """In fp16 one scale serves all, and is updated once a batch."""
    scalers: list[Any] = []

    class Trial(trial_class):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.second = context.wrap_model(nn.Linear(32, 32))
            sgd = torch.optim.SGD(self.second.parameters(), lr=0.1)
            self.other = context.wrap_optimizer(sgd)
            scalers.append(context.scaler)
            state = context.scaler.state_dict()
            context.scaler.load_state_dict({**state, "scale": 1024.0, "growth_interval": 1000})
            self.at_first = self.second.weight.detach().clone()
            assert self.second.weight.device.type == device.type

        def loss_of(self, batch: Any) -> torch.Tensor:
            return super().loss_of((batch[0] + self.second(batch[0]), batch[1]))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss_of(batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            self.context.step_optimizer(self.other)
            assert batch_idx == 0 or not torch.equal(self.second.weight, self.at_first)
            return {"loss": loss}

    result = fit(Trial, 60, precision="fp16")
    assert result.metrics["loss"] < 0.8
    assert scalers[0].state_dict()["_growth_tracker"] == 60
