"""A training whose every part draws random numbers or keeps state, run as a user runs it.

Variables: PRECISION, DATA_PARALLEL, SHARDING (words for what is special in a sharded model), WINDOW
(batches per optimizer step), LOADERS (loader processes), SCALER, and DROP, the item of the saved
state that is replaced by a fresh one when the training is resumed.
CHECKPOINT_EVERY is 6 by default; with "continuous", a batch lasts long enough for a checkpoint.
With MEMORY, states are in memory too: each batch waits until the last one is whole there. With
SURVIVORS, only the first state is copied there, and survivors of a lost rank save theirs.
There are three epochs of nine batches.
"""

import os
import random
import time
from typing import Any

import numpy
import torch
from torch import nn

from paceline import pytorch
from paceline._training.engine.weighted_means import WeightedMeans
from paceline.data._order_and_random_generators import capture_random_state
from paceline.pytorch import _memory_checkpoints, _resumable_training
from paceline.pytorch._loop_agreement import RankAgreement

CHECKPOINT_EVERY: Any = os.environ.get("CHECKPOINT_EVERY", "6")
SHARDING = os.environ.get("SHARDING", "").split()
NUM_WORKERS = int(os.environ.get("WORLD_SIZE", "1"))
SHARD, BATCHES = 4, 9
# The last batch of an epoch is smaller, and with several ranks the last one has no part of it.
NUM_SAMPLES = SHARD * BATCHES * NUM_WORKERS - (2 if NUM_WORKERS == 1 else 6)


class Noisy(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = random.random() + float(numpy.random.rand())
        return self.x[index] + self.noise * (torch.randn(8) + drawn), self.y[index]


class Count(pytorch.PyTorchCallback):
    """A callback with a state of its own."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.num_epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_epochs = state_dict["num_epochs"]


def wrapped_model(context: pytorch.PyTorchTrialContext) -> nn.Module:
    # Batch normalization needs parameters in single precision.
    norm = nn.LayerNorm if "bf16" in SHARDING else nn.BatchNorm1d
    with torch.device("meta" if "meta" in SHARDING else "cpu"):
        model = nn.Sequential(
            *(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)),
        )
    options: dict[str, Any] = {}
    if "adapters" in SHARDING:
        model[0].requires_grad_(False)
        options["trainable_only"] = "the-base"
    if "bf16" in SHARDING:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options["shard_precision"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    if "compiled" in SHARDING:
        options["compile"] = {"backend": "aot_eager", "dynamic": False}
    return context.wrap_model(model, gradient_checkpointing="recomputed" in SHARDING, **options)


class Trial(pytorch.PyTorchTrial):
    trainer: pytorch.Trainer

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = wrapped_model(context)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        sgd = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        self.optimizer = context.wrap_optimizer(sgd)
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7),
            pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        self.scaler: Any = None
        if "SCALER" in os.environ:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
            self.scaler = context.wrap_scaler(scaler)
        self.reducer = context.wrap_reducer(sum, name="sum", for_validation=False)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        x, y = batch
        if CHECKPOINT_EVERY == "continuous":
            time.sleep(0.03)
        while self.is_memory_busy():
            time.sleep(0.001)
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.reducer.update(loss.item())
        self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
            scaler=self.scaler,
        )
        if self.scaler is not None and self.context.accumulation.is_boundary:
            self.scaler.update()
        return {"loss": loss}

    def is_memory_busy(self) -> bool:
        checkpoints = self.trainer._training.checkpoints
        savers = [] if checkpoints.memory is None else [checkpoints.memory]
        # Batches are short: many pass while a busy disk takes a checkpoint.
        savers += [checkpoints] if "SURVIVORS" in os.environ else []
        return any(each._saver.is_storing or each._parts.num_pending for each in savers)

    def evaluate_batch(self, batch: Any) -> Any:
        x, y = batch
        return {"validation_loss": nn.functional.cross_entropy(self.model(x), y)}

    def build_training_data_loader(self) -> Any:
        loaders = int(os.environ.get("LOADERS", "0"))
        data = Noisy(NUM_SAMPLES, 0.1)
        return pytorch.DataLoader(data, batch_size=SHARD, shuffle=True, num_workers=loaders)

    def build_validation_data_loader(self) -> Any:
        # Two batches for every rank.
        return pytorch.DataLoader(Noisy(16 * NUM_WORKERS - 3, 0.0), batch_size=8)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"count": Count()}


def drop(item: str, parts: dict[str, Any], trial: Trial) -> None:
    """Replace an item of a state that was read by what a fresh start has."""
    training, own = parts["training"], parts["rank"]
    is_first = trial.context.distributed.rank == 0
    if item == "model":
        parts["model_0"] = dict(trial.model.state_dict())
    elif item == "optimizer":
        parts["optimizer_0"]["state"] = {}
    elif item == "scheduler":
        scheduler = trial.context.lr_schedulers[0].scheduler
        training["schedulers"] = [{**training["schedulers"][0], "last_epoch": scheduler.last_epoch}]
    elif item == "scaler":
        training["scaler"] = trial.context.scaler.state_dict()
    elif item == "callback":
        training["callbacks"] = {}
    elif item == "position":
        training["position"]["batch_in_epoch"] = 0
    elif item == "order":
        training["seed"] += 1
        # Another one than was given is refused.
        trial.context.given_seed = None
    elif item in ("python", "numpy", "torch"):
        own["random"][item] = capture_random_state()[item]
    elif item == "torch of rank 1" and not is_first:
        own["random"]["torch"] = capture_random_state()["torch"]
    elif item == "buffers of rank 1" and not is_first:
        own["buffers"] = None
    elif item == "means":
        own["means"] = WeightedMeans(trial.context.distributed, "training").state()
    elif item == "reducer":
        own["reducers"] = trial.context.reducers.storable_state()
    elif item == "gradients":
        own["gradients"] = None


def drop_at_restore(trial: Trial) -> None:
    """Have the item that DROP names dropped before anything is made of the state."""
    item, read = os.environ.get("DROP", ""), _resumable_training.read_state

    def read_and_drop(*place: Any, **options: Any) -> dict[str, Any]:
        parts = read(*place, **options)
        drop(item, parts, trial)
        return parts

    _resumable_training.read_state = read_and_drop


def main() -> None:
    if "MEMORY" in os.environ:
        # A state as often as the ranks can agree on one.
        RankAgreement.look_interval_s = _memory_checkpoints._LEAST_INTERVAL_S = 1e-6
    # Small states at each boundary, on a busy machine too.
    _memory_checkpoints._MAX_STRIDE = 1
    hparams = {"global_batch_size": SHARD * NUM_WORKERS}
    with pytorch.init(
        hparams=hparams,
        seed=7,
        precision=os.environ.get("PRECISION", "fp32"),
        data_parallel=os.environ.get("DATA_PARALLEL", "flat"),
        shard_size=2 if "hybrid" in SHARDING else None,
    ) as context:
        trial = Trial(context)
        drop_at_restore(trial)
        trial.trainer = pytorch.Trainer(trial, context)
        trial.trainer.fit(
            max_length=pytorch.Epoch(3),
            checkpoint_period=CHECKPOINT_EVERY
            if CHECKPOINT_EVERY == "continuous"
            else pytorch.Batch(int(CHECKPOINT_EVERY)),
            validation_period=pytorch.Epoch(1),
            reporting_period=pytorch.Batch(5),
            checkpoint_policy="none",
            aggregation_frequency=int(os.environ.get("WINDOW", "1")),
            memory_checkpoints={"MEMORY": 0.99, "SURVIVORS": 1e6}.get(
                next((name for name in ("MEMORY", "SURVIVORS") if name in os.environ), "")
            ),
        )


if __name__ == "__main__":
    main()
