"""One training, written as a bare loop and for Paceline; `peer_loops.py` has the peers'.

Model, data, loader and optimizer are alike everywhere. The model counts its forward passes and
tells when a block of steps has passed, whoever drives it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 4
# Steps of a block: a default reporting period, so that each block holds one report.
BLOCK = 100
_WORK_SIZE = 256


class Model(torch.nn.Module):
    """A linear layer of five weights, with work of a given length before it.

    Args:
        num_products: How many products of matrices the forward pass does for nothing.
        interlude: Called after each block of steps with the nanoseconds of its begin and end; what
            it takes is part of no block.
    """

    def __init__(
        self, num_products: int = 0, interlude: Callable[[int, int], None] | None = None
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self._matrix = torch.eye(_WORK_SIZE)
        self._product = torch.empty(_WORK_SIZE, _WORK_SIZE)
        self._num_products = num_products
        self._count_step = None if interlude is None else block_counter(interlude)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Work, and return one number a sample."""
        if self._count_step is not None and self.training:
            self._count_step()
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        return self.layer(x)


def block_counter(interlude: Callable[[int, int], None]) -> Callable[[], None]:
    """Return what is to be called at each step, at the least cost to it."""
    num_steps = begin = 0

    def count_step() -> None:
        nonlocal num_steps, begin
        if num_steps % BLOCK == 0:
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


def data(num_steps: int) -> DataLoader[Any]:
    """Return shuffled data for a number of steps."""
    x = torch.randn(num_steps * BATCH_SIZE, 4)
    return DataLoader(TensorDataset(x, x.sum(1, True)), batch_size=BATCH_SIZE, shuffle=True)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """Return the mean square error of a batch."""
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def bare_steps(model: Model, loader: DataLoader[Any]) -> Iterator[None]:
    """Train by a loop that does nothing else; yield after each block of steps."""
    optimizer = optimizer_of(model)
    for num_steps, batch in enumerate(loader, 1):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if num_steps % BLOCK == 0:
            yield


def run_bare(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by the bare loop itself, which shows what the measurement adds."""
    optimizer = optimizer_of(model)
    num_left = num_steps
    while num_left:
        for batch in islice(loader, num_left):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            num_left -= 1


def run_paceline(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by `Trainer.fit`."""
    from paceline import pytorch

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model = context.wrap_model(model)
            self.optimizer = context.wrap_optimizer(optimizer_of(model))

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
            return data(1)

    with pytorch.init(hparams={"global_batch_size": BATCH_SIZE}, name="bench") as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(num_steps))


def run_creators(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train by the default function of creators, in this process as in its one worker."""
    from paceline.creators import _worker
    from paceline.creators._arguments import make_spec
    from paceline.creators._spec import PassOrder
    from paceline.workers import PortReservation

    spec = make_spec(
        creators={
            "model_creator": lambda config: model,
            "data_creator": lambda config: loader,
            "optimizer_creator": lambda model, config: optimizer_of(model),
            "loss_creator": torch.nn.MSELoss,
            "scheduler_creator": None,
        },
        functions=dict.fromkeys(("train_function", "validation_function", "initialization_hook")),
        config=None,
        loader_config=None,
        num_workers=1,
        batch_size=BATCH_SIZE,
        precision="fp32",
        settings={
            "scheduler_step_freq": None,
            "use_gpu": False,
            "backend": "gloo",
            "timeout_s": 60.0,
            "deals_out": True,
            "is_serial": True,
            "seed": 0,
        },
    )
    with PortReservation() as port:
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": "0"}
        os.environ |= {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.port)}
        _worker.set_up(spec)
        _worker.train(PassOrder(num_steps, is_profiled=False, info={}))


def run_declarative(model: Model, loader: DataLoader[Any], num_steps: int) -> None:
    """Train what config objects describe."""
    from paceline.declarative import Trainer, TrainingConfig

    class Given(torch.nn.Module):
        def __new__(cls) -> Any:
            return model

    trainer = Trainer(
        TrainingConfig(
            model_class=Given,
            training_dataset=loader.dataset,
            validation_dataset=data(1).dataset,
            pred_names=["y"],
            loss_function=torch.nn.functional.mse_loss,
            task_type=None,
            optimizer=torch.optim.SGD,
            learning_rate_per_process=0.01,
            scheduler=None,
            batch_size_per_process=BATCH_SIZE,
            num_epochs=-(-num_steps // len(loader)),
        )
    )
    trainer.build()
    trainer.run_training()


Run = Callable[[Model, DataLoader[Any], int], None]
LOOPS: dict[str, Run] = {
    "bare": run_bare,
    "paceline": run_paceline,
    "creators": run_creators,
    "declarative": run_declarative,
}


def paired_blocks(run: Run, num_blocks: int, num_products: int) -> list[tuple[float, float]]:
    """Train once, in an empty directory, with the bare loop in between.

    Returns:
        Microseconds per step of each block of the loop and of the block of bare steps that was
        run right after it.
    """
    torch.manual_seed(0)
    bare_model = Model(num_products)
    bare = bare_steps(bare_model, data(num_blocks * BLOCK))
    pairs = []

    def interlude(begin: int, end: int) -> None:
        bare_begin = perf_counter_ns()
        next(bare)
        bare_end = perf_counter_ns()
        pairs.append(((end - begin) / BLOCK / 1000, (bare_end - bare_begin) / BLOCK / 1000))

    model = Model(num_products, interlude)
    num_steps = num_blocks * BLOCK + 1
    with _empty_directory():
        run(model, data(num_steps), num_steps)
    return pairs


def resident_megabytes(run: Run, num_steps: int, every: int) -> list[float]:
    """Train for several epochs in an empty directory; return resident memory after each."""
    sizes = []
    num_blocks = 0

    def interlude(begin: int, end: int) -> None:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks * BLOCK % every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    with _empty_directory():
        run(Model(0, interlude), data(every), num_steps + 1)
    return sizes


@contextmanager
def _empty_directory() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)
