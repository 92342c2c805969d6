"""A training that stores its state by several ways in turn, for `save_stall.py`."""

import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from step_loops import Model, num_products_of
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

Times = dict[str, list[float]]

_NUM_COPIES = 20
_WORK_S = 0.005
# Batches of a small and of a large state between the begin of one way and that of the next.
_BATCHES_OF_PHASE = (80, 600)
_LARGE = 500_000_000
WAYS = ("paceline", "dcp.async_save, stager kept", "dcp.async_save", "torch.save", "copy")


def store_by_all_ways(num_bytes: int, num_rounds: int, num_threads: int) -> Times:
    """Train, store the state by each way in turn, and return seconds by name."""
    torch.set_num_threads(num_threads)
    num_products = num_products_of(_WORK_S)
    phase = _BATCHES_OF_PHASE[num_bytes > _LARGE]
    period = phase * len(WAYS)
    num_batches = period * num_rounds + 1

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            weights = transformer_weights(num_bytes)
            small = Model(num_products)
            self.model = context.wrap_model(torch.nn.ModuleDict({"large": weights, "small": small}))
            self.optimizer = context.wrap_optimizer(_warm_adam(self.model))
            self.ways = Ways(context.core.run_dir, _state_bytes(self.model, self.optimizer))
            self.end = 0.0

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            ways, phase_index = self.ways, batch_idx % period // phase
            if batch_idx and batch_idx % phase == 0:
                if WAYS[phase_index] == "paceline":
                    ways.note_paceline(time.perf_counter() - self.end)
                else:
                    state = {"model": self.model.state_dict(), "adam": self.optimizer.state_dict()}
                    ways.save(WAYS[phase_index], state)
            elif batch_idx:
                ways.add("between batches", time.perf_counter() - self.end)
            begin = time.perf_counter()
            loss = self.model["small"](batch[0]).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            ways.note_batch(time.perf_counter() - begin)
            if (batch_idx + 1) % phase == 0:
                ways.finish()
            self.end = time.perf_counter()
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": self.model["small"](batch[0]).mean()}

        def build_training_data_loader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(num_batches, 4)))

        def build_validation_data_loader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(1, 4)))

    with pytorch.init(hparams={"global_batch_size": 1}, name="bench") as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(num_batches), checkpoint_period=pytorch.Batch(period)
        )
    return trial.ways.times


def transformer_weights(num_bytes: int) -> torch.nn.Module:
    """Return weights of a transformer's shapes that take so many bytes with Adam's moments."""
    width = 512 if num_bytes > _LARGE else 256
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes += [(3 * width,), (4 * width,), *[(width,)] * 6]
    num_layers = round(num_bytes / (12 * sum(math.prod(shape) for shape in shapes)))
    return torch.nn.ParameterList(torch.randn(shape) for shape in shapes * num_layers)


def _state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors that are stored; layers come whole, so not quite as asked."""
    tensors = [*model.state_dict().values()]
    for moments in optimizer.state.values():
        tensors += [value for value in moments.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _warm_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that holds moments for every parameter."""
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Ways:
    """Stores a state by one way after the other while batches go on, and keeps the times.

    Args:
        run_dir: Where Paceline stores its checkpoints.
        num_bytes: The size of the state.
    """

    def __init__(self, run_dir: Path, num_bytes: int) -> None:
        self.times: Times = {}
        self._checkpoints = run_dir / "checkpoints"
        self._source = torch.ones(num_bytes // 4)
        self._target = torch.ones(num_bytes // 4)
        # Kept from save to save, it uses its memory again; its options are for GPUs.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._num_stored = 0
        self._way = ""
        self._begin = 0.0
        self._is_done: Callable[[], bool] = lambda: True

    def add(self, name: str, seconds: float) -> None:
        """Keep one time."""
        self.times.setdefault(name, []).append(seconds)

    def note_paceline(self, stall: float) -> None:
        """Take in that Paceline began to store a checkpoint between the last two batches."""
        self.add("paceline", stall)
        self._num_stored += 1
        self._go_on("paceline", time.perf_counter() - stall, self._is_stored)

    def save(self, way: str, state: Any) -> None:
        """Begin to store a state by another way, or copy as many bytes several times."""
        begin = time.perf_counter()
        if way == "copy":
            for _ in range(_NUM_COPIES):
                begin = time.perf_counter()
                self._target.copy_(self._source)
                self.add("copy", time.perf_counter() - begin)
        elif way == "torch.save":
            torch.save(state, "state.pt")
            self.add(way, time.perf_counter() - begin)
            with open("state.pt", "rb") as file:
                os.fsync(file.fileno())
            self.add(f"{way}, in all", time.perf_counter() - begin)
        else:
            stager = self._stager if way == "dcp.async_save, stager kept" else None
            future = dcp.async_save(state, checkpoint_id="state", async_stager=stager, no_dist=True)
            self.add(way, time.perf_counter() - begin)
            self._go_on(way, begin, future.done)

    def note_batch(self, seconds: float) -> None:
        """Keep a batch's time, apart for those within which something was being stored."""
        if not self._way:
            self.add("batch", seconds)
        elif not self._has_ended():
            self.add(f"{self._way}, batch meanwhile", seconds)

    def finish(self) -> None:
        """Wait until what is being stored is on disk, and remove it."""
        while self._way and not self._has_ended():
            time.sleep(0.001)
        shutil.rmtree("state", ignore_errors=True)
        Path("state.pt").unlink(missing_ok=True)

    def _go_on(self, way: str, begin: float, is_done: Callable[[], bool]) -> None:
        self._way, self._begin, self._is_done = way, begin, is_done

    def _has_ended(self) -> bool:
        if not self._is_done():
            return False
        self.add(f"{self._way}, in all", time.perf_counter() - self._begin)
        self._way = ""
        return True

    def _is_stored(self) -> bool:
        return len(list(self._checkpoints.glob("*/manifest.json"))) >= self._num_stored
