"""Every override that the guide names, alone and with `super()`, on 1 and 3 ranks: a plain loop."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import Subset, TensorDataset

from paceline.data._order_and_random_generators import shuffled_indices
from paceline.declarative._training_step import split

GUIDE = Path(__file__).parents[2] / "docs/declarative.md"

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset
from paceline import declarative
from paceline.declarative import LossTracker, ParallelizationConfig, TrainingConfig
from paceline.declarative import _saved_outputs

class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor
        self.body, self.head = (nn.Linear(n, m, dtype=torch.float64) for n, m in ((4, 8), (8, 5)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    def forward(self, x):
        both = self.head(self.body(self.factor * x).tanh())
        return both[:, :3], both[:, 3:]

class Trainer(declarative.Trainer):
    fields = {}

def losses_of(preds, labels):
    phase = nn.functional.cross_entropy(preds[0], labels[0])
    return phase, nn.functional.mse_loss(preds[1], labels[1])

def penalty_of(preds):
    return 0.1 * preds[1].square().mean()

# ---- a step ----

class load_data_and_get_loss_alone(Trainer):
    def load_data_and_get_loss(self, data_and_labels, loss_buffer):
        x, *labels = data_and_labels
        preds = list(self.model(x))
        phase, energy = losses_of(preds, labels)
        loss = phase + 2.0 * energy
        return [loss.detach(), phase.detach(), energy.detach()], loss, preds, labels

class load_data_and_get_loss_super(Trainer):
    def load_data_and_get_loss(self, data_and_labels, loss_buffer):
        records, loss, preds, labels = super().load_data_and_get_loss(data_and_labels, loss_buffer)
        return records, loss + penalty_of(preds), preds, labels

class run_model_update_step_alone(Trainer):
    def run_model_update_step(self, loss_node):
        self.optimizer.zero_grad()
        loss_node.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()

class run_model_update_step_super(Trainer):
    def run_model_update_step(self, loss_node):
        super().run_model_update_step(2.0 * loss_node)

class run_model_update_step_scaler(Trainer):
    "The step of generic_trainer."
    def run_model_update_step(self, loss_node):
        self.optimizer.zero_grad()
        self.grad_scaler.scale(2.0 * loss_node).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()

class run_model_update_step_accumulated(run_model_update_step_scaler):
    fields = {"accumulation_steps": 2}

class run_model_update_step_closure(Trainer):
    fields = {"optimizer": torch.optim.LBFGS, "optimizer_params": {"max_iter": 2}}
    def load_data_and_get_loss(self, data_and_labels, loss_buffer):
        if not self.model.training:
            return super().load_data_and_get_loss(data_and_labels, loss_buffer)
        def closure():
            self.optimizer.zero_grad()
            usual = super(type(self), self).load_data_and_get_loss
            self.results = usual(data_and_labels, self.get_epoch_loss_buffer())
            self.results[1].backward()
            return self.results[1]
        self.optimizer.step(closure)
        return self.results
    def run_model_update_step(self, loss_node):
        pass

class build_optimizer_closure(Trainer):
    fields = {"optimizer": torch.optim.LBFGS}

class build_amp_never(Trainer):
    def build_amp(self):
        self.grad_scaler = None

class process_data_loader_yield_index(Trainer):
    "As generic_trainer calls it."
    def process_data_loader_yield(self, data_and_labels, data_label_separation_index):
        items, labels = super().process_data_loader_yield(
            data_and_labels, data_label_separation_index=None
        )
        assert not labels
        index = data_label_separation_index
        return [2.0 * items[0], *items[1:index]], items[index:]

class process_data_loader_yield_alone(Trainer):
    def process_data_loader_yield(self, data_and_labels):
        return [2.0 * data_and_labels[0].to(self.device)], list(data_and_labels[1:])

class process_data_loader_yield_super(Trainer):
    def process_data_loader_yield(self, data_and_labels):
        data, labels = super().process_data_loader_yield(data_and_labels)
        return [2.0 * data[0]], labels

class move_to_device_alone(Trainer):
    def move_to_device(self, var):
        return var.to(self.device) * (2.0 if var.shape[1:] == (4,) else 1)

class move_to_device_super(Trainer):
    def move_to_device(self, var):
        return super().move_to_device(var) * (2.0 if var.shape[1:] == (4,) else 1)

class compute_losses_alone(Trainer):
    def compute_losses(self, loss_records, preds, labels):
        phase, energy = losses_of(preds, labels)
        loss = phase + 2.0 * energy
        loss_records[:3] = loss, phase, energy
        return loss_records, loss

class compute_losses_super(Trainer):
    def compute_losses(self, loss_records, preds, labels):
        records, loss = super().compute_losses(loss_records, preds, labels)
        return records, loss + penalty_of(preds)

def regularizer(energy, phase):
    return penalty_of([phase, energy])

class compute_losses_criterion(Trainer):
    "The loop over losses of generic_trainer."
    fields = {"loss_weights": [1.0, 2.0]}
    def compute_losses(self, loss_records, preds, labels):
        total = 0.0
        for i in range(len(preds)):
            loss = self.loss_criterion[i](preds[i], labels[i])
            total = total + self.loss_weights[i] * loss
            loss_records[i + 1] += loss.detach().item()
        loss_records[0] += total.detach().item()
        return loss_records, total

class get_pred_dict_alone(Trainer):
    fields = {"loss_function": [nn.CrossEntropyLoss(), nn.MSELoss(), regularizer]}
    def get_pred_dict(self, preds):
        return {"phase": preds[0], "energy": 2.0 * preds[1]}

class get_pred_dict_super(Trainer):
    fields = get_pred_dict_alone.fields
    def get_pred_dict(self, preds):
        return {name: 2.0 * pred for name, pred in super().get_pred_dict(preds).items()}

# ---- an epoch ----

class run_training_epoch_alone(Trainer):
    def run_training_epoch(self):
        records, num_batches = self.get_epoch_loss_buffer(), 0
        for batch in self.training_dataloader:
            own, loss, _, _ = self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())
            self.run_model_update_step(2.0 * loss)
            records = [before + float(now) for before, now in zip(records, own)]
            num_batches += 1
        assert num_batches == len(self.training_dataloader)
        means = [record / num_batches for record in records]
        self.loss_tracker.update_losses(means, "loss", self.current_epoch)

class run_training_epoch_plain(Trainer):
    "Nothing of the trainer's but the batches and the optimizer; the history is left alone."
    def run_training_epoch(self):
        for x, phase, energy in self.training_dataloader:
            self.optimizer.zero_grad()
            (2.0 * sum(losses_of(self.model(x), [phase, energy]))).backward()
            self.optimizer.step()

class run_training_epoch_scheduled(run_training_epoch_plain):
    "The trainer steps the scheduler."
    fields = {"scheduler": StepLR, "scheduler_params": {"step_size": 2, "gamma": 0.5}}

class run_training_epoch_left(Trainer):
    "The rest of an epoch is left out."
    def run_training_epoch(self):
        for index, batch in enumerate(self.training_dataloader):
            self.run_model_update_step(self.load_data_and_get_loss(batch, [0.0] * 3)[1])
            if index == 1:
                break

class run_training_epoch_super(Trainer):
    def run_training_epoch(self):
        if self.current_epoch == 1:
            self.optimizer.param_groups[0]["lr"] = 0.05
        super().run_training_epoch()

class run_training_epoch_other(Trainer):
    "Other batches than those of the trainer."
    def run_training_epoch(self):
        for batch in DataLoader(self.training_dataset, 4):
            self.run_model_update_step(self.load_data_and_get_loss(batch, [0.0] * 3)[1])

class run_training_epoch_none(Trainer):
    def run_training_epoch(self):
        pass

class run_training_epoch_twice(Trainer):
    def run_training_epoch(self):
        for _ in range(2):
            for batch in self.training_dataloader:
                self.run_model_update_step(self.load_data_and_get_loss(batch, [0.0] * 3)[1])

class run_validation_alone(Trainer):
    def run_validation(self):
        assert not self.model.training
        totals = [0.0, 0.0, 0.0]
        with torch.no_grad():
            for batch in self.validation_dataloader:
                records = self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())[0]
                totals = [t + len(batch[0]) * float(r) for t, r in zip(totals, records)]
        means = [total / len(self.validation_dataset) for total in totals]
        self.loss_tracker.update_losses(means, "val_loss", self.current_epoch)

class run_validation_super(Trainer):
    def run_validation(self):
        super().run_validation()
        assert not self.model.training
        self.own = [*getattr(self, "own", []), self.loss_tracker["val_loss"][-1]]

class run_validation_testing(Trainer):
    def run_validation(self):
        super().run_validation()
        preds = self.run_testing(range(len(self.validation_dataset)), dataset="val")
        x, *labels = (torch.stack(items) for items in zip(*self.validation_dataset))
        self.own = [*getattr(self, "own", []), sum(losses_of(preds, labels)).item()]
        assert len(self.run_testing([3, 1])[0]) == 2

class run_test_alone(Trainer):
    has_test = True
    def run_test(self):
        assert not self.model.training
        with torch.no_grad():
            x, *labels = self.test_dataset[:]
            phase, energy = losses_of(self.model(x), labels)
        losses = [(phase + energy).item(), phase.item(), energy.item()]
        self.loss_tracker.update_losses(losses, "test_loss", self.current_epoch)

class run_test_super(Trainer):
    has_test = True
    def run_test(self):
        super().run_test()
        self.own = self.loss_tracker["test_loss"]

# ---- building ----

class build_loss_tracker_alone(Trainer):
    def build_loss_tracker(self):
        self.loss_tracker = LossTracker(["phase", "energy"])
        self.own = self.loss_tracker["val_loss"]

class build_loss_tracker_super(Trainer):
    def build_loss_tracker(self):
        super().build_loss_tracker()
        self.own = self.loss_tracker["val_loss"]

class build_loss_tracker_other(Trainer):
    def build_loss_tracker(self):
        self.loss_tracker = {}

class build_ranks_alone(Trainer):
    def build_ranks(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.num_processes = int(os.environ.get("WORLD_SIZE", 1))

class build_ranks_super(Trainer):
    def build_ranks(self):
        super().build_ranks()
        self.own = self.rank

class build_ranks_other(Trainer):
    def build_ranks(self):
        self.rank = 7

class build_scalable_parameters_alone(Trainer):
    def build_scalable_parameters(self):
        self.learning_rate = 0.03
        self.all_proc_batch_size = 6

class build_scalable_parameters_super(Trainer):
    def build_scalable_parameters(self):
        super().build_scalable_parameters()
        self.learning_rate *= 0.5

class build_scalable_parameters_other(Trainer):
    def build_scalable_parameters(self):
        self.all_proc_batch_size = 0

class build_device_alone(Trainer):
    def build_device(self):
        self.device = torch.device("cpu")

class build_device_super(Trainer):
    def build_device(self):
        super().build_device()
        self.own = str(self.device)

class build_device_other(Trainer):
    def build_device(self):
        self.device = torch.device("meta")

class build_split_datasets_alone(Trainer):
    def build_split_datasets(self):
        self.training_dataset = Subset(self.configs.dataset, range(31))
        self.validation_dataset = Subset(self.configs.dataset, range(31, 47))

class build_split_datasets_super(Trainer):
    def build_split_datasets(self):
        super().build_split_datasets()
        self.training_dataset = Subset(self.training_dataset, range(31))

class build_dataloaders_alone(Trainer):
    fields = {"scheduler": torch.optim.lr_scheduler.CyclicLR}
    def build_dataloaders(self):
        size = self.configs.batch_size_per_process
        self.training_dataloader = DataLoader(self.training_dataset, size)
        self.validation_dataloader = DataLoader(self.validation_dataset, size)

class Turned(Sampler):
    "An order that the script decides at the beginning of each epoch."
    def __init__(self, size):
        self.size, self.shift = size, None
    def __len__(self):
        return self.size
    def __iter__(self):
        return iter([(i + self.shift) % self.size for i in range(self.size)])

class build_dataloaders_super(Trainer):
    def build_dataloaders(self):
        super().build_dataloaders()
        self.sampler = Turned(len(self.training_dataset))
        size = self.configs.batch_size_per_process
        self.training_dataloader = DataLoader(self.training_dataset, size, sampler=self.sampler)
    def run_training_epoch(self):
        self.sampler.shift = 5 * self.current_epoch
        super().run_training_epoch()

class build_dataloaders_other(Trainer):
    def build_dataloaders(self):
        self.training_dataloader = self.validation_dataloader = [1, 2]

class build_model_alone(Trainer):
    fields = {"gradient_clip_norm": 0.3}
    def build_model(self):
        self.model = Net(2.0).to(self.device)

class build_model_super(Trainer):
    def build_model(self):
        super().build_model()
        self.model.factor = 2.0

class build_model_other(Trainer):
    def build_model(self):
        if self.context.distributed.size == 1:
            self.model = "a model"
        else:
            self.model = nn.parallel.DistributedDataParallel(Net())

class build_optimizer_alone(Trainer):
    fields = {"gradient_clip_norm": 0.3}
    def build_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

class build_optimizer_super(Trainer):
    def build_optimizer(self):
        super().build_optimizer()
        self.optimizer.param_groups[0]["lr"] = 0.05

class build_scheduler_alone(Trainer):
    def build_scheduler(self):
        self.scheduler = LambdaLR(self.optimizer, lambda count: 0.9 ** count)

class build_scheduler_epochs(build_scheduler_alone):
    fields = {"scheduler_step": "epoch"}

class build_scheduler_super(Trainer):
    fields = {"scheduler": StepLR, "scheduler_params": {"step_size": 2}}
    def build_scheduler(self):
        super().build_scheduler()
        self.scheduler.gamma = 0.5

class build_dir_alone(Trainer):
    def build_dir(self):
        if self.rank == 0:
            Path("own").mkdir(exist_ok=True)

class build_dir_super(Trainer):
    def build_dir(self):
        self.configs.model_save_dir = "renamed"
        super().build_dir()

class load_state_checkpoint_alone(Trainer):
    def load_state_checkpoint(self):
        with torch.no_grad():
            self.model.head.bias.fill_(1.0)
        self.current_epoch = 1

class load_state_checkpoint_super(Trainer):
    def load_state_checkpoint(self):
        super().load_state_checkpoint()
        with torch.no_grad():
            self.model.head.bias.fill_(1.0)
        self.current_epoch = 1

def write_state_late(*arguments, _write=_saved_outputs.write_state, **facts):
    time.sleep(0.05)
    _write(*arguments, **facts)

_saved_outputs.write_state = write_state_late
num_ranks = int(sys.argv[1])
for case in sys.argv[2:]:
    kind = globals()[case]
    x = torch.randn(47, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1), x[:, 2:].clone())
    fields = {
        "loss_function": [nn.CrossEntropyLoss(), nn.MSELoss()], "scheduler": None,
        "optimizer": torch.optim.SGD,
        "test_dataset": TensorDataset(*data[:9]) if hasattr(kind, "has_test") else None,
    }
    config = TrainingConfig(
        model_class=Net,
        dataset=data,
        validation_ratio=0.2,
        pred_names_and_types=[("phase", "cls"), ("energy", "regr")],
        task_type=None,
        batch_size_per_process=12 // num_ranks,
        learning_rate_per_process=0.12 / num_ranks,
        num_epochs=3,
        random_seed=4,
        model_save_dir=f"out-{case}",
        parallelization_params=ParallelizationConfig(parallelization_type="multi_node"),
        **{**fields, **kind.fields},
    )
    said, trainer = {}, kind(config)
    try:
        trainer.build()
        tracker = trainer.run_training()
        said["tracker"] = {k: v for k, v in tracker.items() if isinstance(v, list)}
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        said["weights"] = [value.hex() for value in weights.tolist()]
        said["own"] = getattr(trainer, "own", None)
        state = json.loads(Path(config.model_save_dir, "checkpoint.state").read_text())
        said["stored"] = len(state["checkpoints"])
        said["has_final"] = Path(config.model_save_dir, "final_model.pth").exists()
    except (RuntimeError, ValueError, TypeError) as error:
        said["raised"] = str(error)
        said["steps"] = trainer._engine.steps_completed if hasattr(trainer, "_engine") else 0
    Path(f"{case}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(said))
    trainer.cleanup()
"""


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.body = nn.Linear(4, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 5, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.head(self.body(self.factor * x).tanh())
        return both[:, :3], both[:, 3:]


def data() -> TensorDataset:
    x = torch.randn(47, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1), x[:, 2:].clone())


def plain(
    *,
    batch_size: int = 12,
    rate: float = 0.12,
    rates: Mapping[int, float] | None = None,
    epochs: Sequence[int] = (0, 1, 2),
    order: Callable[[int, int], Sequence[int]] = lambda size, epoch: shuffled_indices(
        size, 4, epoch
    ),
    num_batches: int | None = None,
    num_samples: int | None = None,
    is_split_by_hand: bool = False,
    model: nn.Module | None = None,
    x_factor: float = 1.0,
    loss_factor: float = 1.0,
    energy_factor: float = 1.0,
    penalty: float = 0.0,
    clip: float | None = None,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    scheduler: Callable[[Any], Any] | None = None,
    steps_by_epoch: bool = False,
) -> dict[str, Any]:
    """Train in plain PyTorch, and return the weights, the rates and the losses of validation."""
    if is_split_by_hand:
        training: Any = Subset(data(), range(31))
        validation: Any = Subset(data(), range(31, 47))
    else:
        training, validation = split(data(), 0.2, 4)
    if num_samples is not None:
        training = Subset(training, range(num_samples))
    model = Net() if model is None else model
    optimizer = make_optimizer(model.parameters(), lr=rate)
    stepped = None if scheduler is None else scheduler(optimizer)
    lrs, val_losses = [], []
    for count, epoch in enumerate(epochs):
        for group in optimizer.param_groups:
            group["lr"] = (rates or {}).get(epoch, group["lr"])
        indices = order(len(training), count)
        starts = range(0, len(indices), batch_size)[:num_batches]
        for start in starts:
            samples = [training[i] for i in indices[start : start + batch_size]]
            x, phase, energy = (torch.stack(items) for items in zip(*samples, strict=True))

            def closure() -> torch.Tensor:
                preds = model(x_factor * x)  # noqa: B023
                loss = nn.functional.cross_entropy(preds[0], phase)  # noqa: B023
                loss = loss + energy_factor * nn.functional.mse_loss(preds[1], energy)  # noqa: B023
                if penalty:
                    loss = loss + penalty * preds[1].square().mean()
                optimizer.zero_grad()
                (loss_factor * loss).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            if stepped is not None and not steps_by_epoch:
                stepped.step()
            lrs.append(optimizer.param_groups[0]["lr"])
        if stepped is not None and steps_by_epoch:
            stepped.step()
            lrs[-1] = optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            x, phase, energy = (torch.stack(items) for items in zip(*validation, strict=True))
            preds = model(x_factor * x)
            value = nn.functional.cross_entropy(preds[0], phase)
            value = value + energy_factor * nn.functional.mse_loss(preds[1], energy)
            if penalty and penalty != 0.1:
                # A regularizer is a part of the loss; what a method adds is not in its records.
                value = value + penalty * preds[1].square().mean()
            val_losses.append(value.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return {"weights": weights, "lrs": lrs, "val_loss": val_losses}


def from_one() -> nn.Module:
    model = Net()
    with torch.no_grad():
        model.head.bias.fill_(1.0)
    return model


def cyclic(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.1 * 0.12, 0.12, step_size_up=24, mode="triangular2", cycle_momentum=False
    )


# What each override comes to in plain PyTorch, by its name and how it is written.
TRAINED: dict[str, Callable[[], dict[str, Any]]] = {
    "load_data_and_get_loss_alone": lambda: plain(energy_factor=2.0),
    "load_data_and_get_loss_super": lambda: plain(penalty=0.1),
    "run_model_update_step_alone": lambda: plain(clip=0.3),
    "run_model_update_step_super": lambda: plain(loss_factor=2.0),
    "run_model_update_step_scaler": lambda: plain(loss_factor=2.0),
    "run_model_update_step_closure": lambda: plain(
        make_optimizer=lambda parameters, lr: torch.optim.LBFGS(parameters, lr, max_iter=2)
    ),
    "process_data_loader_yield_index": lambda: plain(x_factor=2.0),
    "process_data_loader_yield_alone": lambda: plain(x_factor=2.0),
    "process_data_loader_yield_super": lambda: plain(x_factor=2.0),
    "move_to_device_alone": lambda: plain(x_factor=2.0),
    "move_to_device_super": lambda: plain(x_factor=2.0),
    "compute_losses_alone": lambda: plain(energy_factor=2.0),
    "compute_losses_super": lambda: plain(penalty=0.1),
    "compute_losses_criterion": lambda: plain(energy_factor=2.0),
    "get_pred_dict_alone": lambda: plain(penalty=0.4),
    "get_pred_dict_super": lambda: plain(penalty=0.4),
    "run_training_epoch_alone": lambda: plain(loss_factor=2.0),
    "run_training_epoch_plain": lambda: plain(loss_factor=2.0),
    "run_training_epoch_scheduled": lambda: plain(
        loss_factor=2.0, scheduler=lambda optimizer: StepLR(optimizer, 2, 0.5)
    ),
    "run_training_epoch_left": lambda: plain(num_batches=2),
    "run_training_epoch_super": lambda: plain(rates={1: 0.05}),
    "run_validation_alone": plain,
    "run_validation_super": plain,
    "run_validation_testing": plain,
    "run_test_alone": plain,
    "run_test_super": plain,
    "build_loss_tracker_alone": plain,
    "build_loss_tracker_super": plain,
    "build_ranks_alone": plain,
    "build_ranks_super": plain,
    "build_scalable_parameters_alone": lambda: plain(rate=0.03, batch_size=6),
    "build_scalable_parameters_super": lambda: plain(rate=0.06),
    "build_device_alone": plain,
    "build_device_super": plain,
    "build_split_datasets_alone": lambda: plain(is_split_by_hand=True),
    "build_split_datasets_super": lambda: plain(num_samples=31),
    "build_dataloaders_alone": lambda: plain(
        order=lambda size, epoch: range(size), scheduler=cyclic
    ),
    "build_dataloaders_super": lambda: plain(
        order=lambda size, epoch: [(i + 5 * epoch) % size for i in range(size)]
    ),
    "build_model_alone": lambda: plain(model=Net(2.0), clip=0.3),
    "build_model_super": lambda: plain(model=Net(2.0)),
    "build_optimizer_alone": lambda: plain(rate=0.05, clip=0.3),
    "build_optimizer_super": lambda: plain(rate=0.05),
    "build_scheduler_alone": lambda: plain(
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda count: 0.9**count)
    ),
    "build_scheduler_epochs": lambda: plain(
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda count: 0.9**count),
        steps_by_epoch=True,
    ),
    "build_scheduler_super": lambda: plain(scheduler=lambda optimizer: StepLR(optimizer, 2, 0.5)),
    "build_dir_alone": plain,
    "build_dir_super": plain,
    "load_state_checkpoint_alone": lambda: plain(model=from_one(), epochs=(1, 2)),
    "load_state_checkpoint_super": lambda: plain(model=from_one(), epochs=(1, 2)),
}
REFUSED = {
    "run_model_update_step_accumulated": "`self.grad_scaler` must not be used .*self.context.backw",
    "build_optimizer_closure": r"LBFGS needs a closure.*override `load_data_and_get_loss`",
    "build_amp_never": r"`build_amp_never.build_amp` would have no effect.*`automatic_mixed_prec",
    "run_training_epoch_other": r"_other\.\w+` must train on the batches of the trainer, but.*once",
    "run_training_epoch_none": r"`run_training_epoch_none\.run_training_epoch` must train on.*none",
    "run_training_epoch_twice": "must go through `training_dataloader` once, .*`num_epochs`",
    "build_loss_tracker_other": r"must set `self\.loss_tracker` to an object of LossTracker, but",
    "build_ranks_other": r"`rank` must be that of the process group, \d, but got 7",
    "build_scalable_parameters_other": "`all_proc_batch_size` must be a multiple of the",
    "build_device_other": "`self.device` must be that of the run, cpu, but .* has set meta",
    "build_dataloaders_other": r"must set `self\.validation_dataloader` to an object of DataLoader",
    "build_model_other": r"`self\.model` to an object of Module|leave the summing of gradients to",
}
# What has trained before it was refused; nothing of it is stored.
TRAINED_BEFORE = {"run_training_epoch_twice": 4}

Said = Mapping[str, list[dict[str, Any]]]


def run(ranks: Any, directory: Path, num_ranks: int) -> Said:
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    cases = [*TRAINED, *REFUSED]
    arguments = str(directory / "train.py"), str(num_ranks), *cases
    done = ranks.run(num_ranks, *arguments, directory=directory, environment=environment)
    assert done.returncode == 0, done.stdout
    return {
        case: [
            json.loads((directory / f"{case}-{rank}.json").read_text()) for rank in range(num_ranks)
        ]
        for case in cases
    }


@pytest.fixture(scope="module", params=[1, 3])
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any
) -> Said:
    """An epoch ends with a batch of one shard: two of three ranks have no sample in it."""
    return run(torch_ranks, tmp_path_factory.mktemp("overrides"), request.param)


def test_each_override_of_the_guide_is_tried_alone_and_with_super() -> None:
    section = GUIDE.read_text().partition("## Methods to override")[2].partition("\n## ")[0]
    bullets = section.partition("\n- ")[2].partition("\n- In your own step")[0]
    called = {name.partition("(")[0] for name in re.findall(r"`([\w(), ]+)`", bullets)}
    named = {name for name in called if not name.startswith("build(") and name != "build"}
    tried = {name.rpartition("_")[0] for name in TRAINED}
    assert named == tried
    for name in named:
        assert {f"{name}_alone", f"{name}_super"} <= TRAINED.keys()


@pytest.mark.parametrize("case", TRAINED)
def test_an_override_trains_as_a_plain_loop_does(said: Said, case: str) -> None:
    expected = TRAINED[case]()
    num_ranks = len(said[case])
    for told in said[case]:
        assert "raised" not in told, told
        assert told["weights"] == said[case][0]["weights"]
        weights = [float.fromhex(value) for value in told["weights"]]
        if num_ranks == 1:
            assert weights == expected["weights"]
        assert weights == pytest.approx(expected["weights"], rel=1e-9, abs=1e-12)
        assert told["tracker"]["lrs"] == pytest.approx(expected["lrs"], rel=1e-12)
        assert told["tracker"]["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
        assert told["tracker"]["epochs"] == list(range(3))[-len(expected["val_loss"]) :]
        assert told["stored"] == 2
        assert told["has_final"]
        if case.startswith("run_test"):
            assert len(told["tracker"]["test_loss"]) == 3
        if case.startswith(("run_validation_", "build_loss_tracker_")) and told["own"]:
            assert told["own"] == pytest.approx(told["tracker"]["val_loss"], rel=1e-9)


@pytest.mark.parametrize("case", REFUSED)
def test_an_override_that_cannot_train_is_refused_before_the_first_step(
    said: Said, case: str
) -> None:
    for told in said[case]:
        with pytest.raises(RuntimeError, match=REFUSED[case]):
            raise RuntimeError(told.get("raised"))
        assert told["steps"] == TRAINED_BEFORE.get(case, 0)
