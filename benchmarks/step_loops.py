"""One training, written as a bare loop and for Paceline; `peer_loops.py` has the peers'.

Model, data, loader and optimizer are alike everywhere. The model counts its forward passes and
tells when a block of steps has passed, whoever drives it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

# Steps of a block: a default reporting period, so that each block holds one report.
BLOCK = 100
_WORK_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and how a training computes.

    Attributes:
        device: "cpu" or "cuda".
        precision: What the forward pass computes in: "fp32", "bf16" or "fp16".
    """

    device: str = "cpu"
    precision: str = "fp32"

    @property
    def is_cuda(self) -> bool:
        """Whether it computes on a GPU."""
        return self.device == "cuda"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, getattr(torch, _DTYPES[self.precision]))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
ON_CPU = Place()


class Model(torch.nn.Module):
    """What is trained: a linear layer of five weights, or something larger.

    Args:
        num_products: How many products of matrices the forward pass does for nothing.
        interlude: Called after each block of steps with the nanoseconds of its begin and end; what
            it takes is part of no block.
        body: What is trained instead of the layer.
        place: Where; on a GPU blocks begin and end when that has done what it was given.
        block: The steps of a block.
    """

    def __init__(
        self,
        num_products: int = 0,
        interlude: Callable[[int, int], None] | None = None,
        *,
        body: torch.nn.Module | None = None,
        place: Place = ON_CPU,
        block: int = BLOCK,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1) if body is None else body
        self._matrix = torch.eye(_WORK_SIZE)
        self._product = torch.empty(_WORK_SIZE, _WORK_SIZE)
        self._num_products = num_products
        self._count_step = None
        if interlude is not None:
            self._count_step = block_counter(interlude, place, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Work, and return what the layer or body makes of a batch."""
        if self._count_step is not None and self.training:
            self._count_step()
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        return self.layer(x)


def block_counter(
    interlude: Callable[[int, int], None], place: Place = ON_CPU, block: int = BLOCK
) -> Callable[[], None]:
    """Return what is to be called at each step, at the least cost to it."""
    num_steps = begin = 0

    def count_step() -> None:
        nonlocal num_steps, begin
        if num_steps % block == 0:
            place.synchronize()
            if num_steps:
                interlude(begin, perf_counter_ns())
            begin = perf_counter_ns()
        num_steps += 1

    return count_step


def num_products_of(work_s: float) -> int:
    """Return how many products take a time on this machine."""
    if not work_s:
        return 0
    model, x = Model(100), torch.zeros(1, 4)
    durations = []
    for _ in range(5):
        begin = perf_counter_ns()
        model(x)
        durations.append(perf_counter_ns() - begin)
    return max(1, round(work_s / (min(durations) / 1e9 / 100)))


def first_batch(loader: DataLoader[Any]) -> Any:
    """Return as little to validate on as there can be."""
    return Subset(loader.dataset, range(loader.batch_size or 1))


def loss_function(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean square error of numbers, or the cross entropy of classes."""
    if y.is_floating_point():
        return torch.nn.functional.mse_loss(output, y)
    return torch.nn.functional.cross_entropy(output, y)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    x, y = batch
    return loss_function(model(x), y)


def optimizer_of(model: torch.nn.Module, place: Place = ON_CPU) -> torch.optim.Optimizer:
    """Return the optimizer; on a GPU that which can skip a step without the host's knowledge."""
    return torch.optim.SGD(model.parameters(), lr=0.01, fused=place.is_cuda or None)


def train_barely(
    model: Model, batch: Any, optimizer: torch.optim.Optimizer, place: Place = ON_CPU
) -> None:
    """Take a step by nothing but torch."""
    if place.is_cuda:
        batch = [part.to(place.device, non_blocking=True) for part in batch]
    if place.precision == "fp32":
        loss = loss_of(model, batch)
    else:
        with place.autocast():
            loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bare_steps(
    model: Model, loader: DataLoader[Any], place: Place = ON_CPU, block: int = BLOCK
) -> Iterator[None]:
    """Train by a loop that does nothing else; yield after each block of steps."""
    model.to(place.device)
    optimizer = optimizer_of(model, place)
    for num_steps, batch in enumerate(loader, 1):
        train_barely(model, batch, optimizer, place)
        if num_steps % block == 0:
            place.synchronize()
            yield


def run_bare(model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU) -> None:
    """Train by the bare loop itself, which shows what the measurement adds."""
    model.to(place.device)
    optimizer = optimizer_of(model, place)
    num_left = num_steps
    while num_left:
        for batch in islice(loader, num_left):
            train_barely(model, batch, optimizer, place)
            num_left -= 1


def run_paceline(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train by `Trainer.fit`."""
    from paceline import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model = context.wrap_model(model)
            self.optimizer = context.wrap_optimizer(optimizer_of(model, place))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = loss_of(self.model, batch)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"validation_loss": loss_of(self.model, batch)}

        def build_training_data_loader(self) -> Any:
            return loader

        def build_validation_data_loader(self) -> Any:
            return DataLoader(first_batch(loader), batch_size=loader.batch_size)

    with pytorch.init(
        hparams={"global_batch_size": loader.batch_size},
        name="bench",
        precision=place.precision,
        device=place.device,
    ) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(num_steps))


def run_train(model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU) -> None:
    """Train by a loop of one's own in `train.Trainer`, which reports as often as the others do."""
    from paceline import train

    def function() -> None:
        prepared, optimizer = train.accelerate(
            model, optimizer_of(model, place), precision=place.precision
        )
        for step, batch in enumerate(train.prepare_data_loader(loader), 1):
            loss = loss_of(prepared, batch)
            train.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % BLOCK == 0:
                train.report(loss=loss.item())

    train.Trainer(num_workers=0).run(function)


def run_creators(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train by the default function of creators, in this process as in its one worker."""
    from paceline._base.process_and_network import PortReservation
    from paceline.creators._creator_arguments import ReplicaPassOrder, make_replica_spec
    from paceline.creators._replica import execute, make_replica

    spec = make_replica_spec(
        creators={
            "model_creator": lambda config: model,
            "data_creator": lambda config: loader,
            "optimizer_creator": lambda model, config: optimizer_of(model, place),
            "loss_creator": lambda config: loss_function,
            "scheduler_creator": None,
        },
        functions=dict.fromkeys(("train_function", "validation_function", "initialization_hook")),
        config=None,
        loader_config=None,
        num_workers=1,
        batch_size=loader.batch_size,
        precision=place.precision,
        settings={
            "scheduler_step_freq": None,
            "use_gpu": place.is_cuda,
            "backend": "auto",
            "timeout_s": 60.0,
            "deals_out": True,
            "is_serial": True,
            "stop_on_nan": False,
            "check_ranks": True,
            "verify_steps": None,
            "on_mismatch": "stop",
            "data_parallel": "flat",
            "shard_units": None,
            "shard_precision": None,
            "seed": 0,
        },
    )
    with PortReservation() as port:
        worker = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}
        before = dict(os.environ)
        os.environ |= {**worker, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.port)}
        try:
            make_replica(spec)
            execute("train", ReplicaPassOrder(num_steps, is_profiled=False, info={}))
        finally:
            os.environ.clear()
            os.environ |= before
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def run_declarative(
    model: Model, loader: DataLoader[Any], num_steps: int, place: Place = ON_CPU
) -> None:
    """Train what config objects describe."""
    from paceline.declarative import Trainer, TrainingConfig

    class Given(torch.nn.Module):
        def __new__(cls) -> Any:
            return model

    trainer = Trainer(
        TrainingConfig(
            model_class=Given,
            training_dataset=loader.dataset,
            validation_dataset=first_batch(loader),
            pred_names=["y"],
            loss_function=loss_function,
            task_type=None,
            optimizer=torch.optim.SGD,
            optimizer_params={"fused": True} if place.is_cuda else {},
            learning_rate_per_process=0.01,
            scheduler=None,
            batch_size_per_process=loader.batch_size,
            cpu_only=not place.is_cuda,
            automatic_mixed_precision=place.precision != "fp32",
            mixed_precision_type="bf16" if place.precision == "fp32" else place.precision,
            num_epochs=-(-num_steps // len(loader)),
        )
    )
    trainer.build()
    trainer.run_training()


Run = Callable[[Model, DataLoader[Any], int, Place], None]
LOOPS: dict[str, Run] = {
    "bare": run_bare,
    "paceline": run_paceline,
    "train": run_train,
    "creators": run_creators,
    "declarative": run_declarative,
}


@contextmanager
def empty_directory() -> Iterator[None]:
    """Work in an empty directory that is removed afterwards."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)
