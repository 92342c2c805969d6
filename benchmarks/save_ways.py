"""A training that stores its state by several ways in turn, for `save_stall.py`."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from memory_peak import MemoryPeak
from step_loops import Model, Place, num_products_of
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

Times = dict[str, list[float]]

_NUM_COPIES = 20
# No more is copied at once to learn how fast a GPU copies, as it takes as much memory besides.
_COPIED_FROM_GPU = 10**9
_WORK_S = 0.005
# Products of matrices of this size that take a GPU some milliseconds.
_GPU_WORK_SIZE, _NUM_GPU_PRODUCTS = 4096, 20
# Batches of a small and of a large state between the begin of one way and that of the next.
_BATCHES_OF_PHASE = (80, 600)
_LARGE = 500_000_000
WAYS = ("paceline", "dcp.async_save, stager kept", "dcp.async_save", "torch.save", "copy")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to store how often.

    Attributes:
        num_bytes: The size of the state.
        num_rounds: How often by each way.
        num_threads: torch's threads.
        place: Where the state is.
        ways: By which ways, in turn.
        phase: Batches between the begin of one way and that of the next; what suits the size by
            default.
        once: The ways of the first round alone.
    """

    num_bytes: int
    num_rounds: int
    num_threads: int = 1
    place: Place = Place()
    ways: Sequence[str] = WAYS
    phase: int | None = None
    once: Sequence[str] = ()


def store_by_all_ways(plan: Plan) -> Times:
    """Train, store the state by each way in turn, and return seconds by name.

    What is known after each phase is printed, as JSON, in case the time runs out.
    """
    torch.set_num_threads(plan.num_threads)
    hparams = {"global_batch_size": 1}
    with (
        suppress(_Done),
        pytorch.init(hparams=hparams, name="bench", device=plan.place.device) as context,
    ):
        trial = StoringTrial(context, plan)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(trial.num_batches),
            checkpoint_period=pytorch.Batch(trial.period),
        )
    return trial.ways.times


class _Done(Exception):
    """Raised when all is measured, as training to the end would store once more."""


class StoringTrial(pytorch.PyTorchTrial):
    """Batches of some milliseconds beside a large state that is stored again and again."""

    def __init__(self, context: pytorch.PyTorchTrialContext, plan: Plan) -> None:
        self.context = context
        self.plan = plan
        self.place = place = plan.place
        self.phase = plan.phase or _BATCHES_OF_PHASE[plan.num_bytes > _LARGE]
        self.period = self.phase * len(plan.ways)
        self.num_batches = self.period * plan.num_rounds + self.phase
        weights = transformer_weights(plan.num_bytes, place.device)
        small = Model(0 if place.is_cuda else num_products_of(_WORK_S))
        self.model = context.wrap_model(torch.nn.ModuleDict({"large": weights, "small": small}))
        self.optimizer = context.wrap_optimizer(warm_adam(self.model))
        num_bytes = _state_bytes(self.model, self.optimizer)
        self.ways = Ways(context.core.run_dir, num_bytes, place)
        self.end = 0.0
        size = _GPU_WORK_SIZE if place.is_cuda else 1
        self.matrix = torch.randn(size, size, device=place.device, dtype=torch.bfloat16)

    def now(self) -> float:
        """Return the time once the device is done, as what it has yet to copy stops training."""
        self.place.synchronize()
        return time.perf_counter()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train, after what is due before this batch and before what is due after it."""
        if batch_idx:
            self.begin_phase(batch_idx)
        begin = self.now()
        for _ in range(_NUM_GPU_PRODUCTS if self.place.is_cuda else 0):
            self.matrix @ self.matrix
        loss = self.model["small"](batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.ways.note_batch(self.now() - begin)
        if (batch_idx + 1) % self.phase == 0:
            self.end_phase(batch_idx + 1)
        self.end = self.now()
        return {"loss": loss}

    def begin_phase(self, num_batches: int) -> None:
        """Store the state, if it is the turn of a way, or note that Paceline does."""
        if num_batches % self.phase:
            self.ways.add("between batches", self.now() - self.end)
            return
        way = self.plan.ways[num_batches % self.period // self.phase]
        if way == "paceline":
            self.ways.note_paceline(self.now() - self.end)
        elif num_batches < self.period or way not in self.plan.once:
            # The stager of torch 2.11 knows nothing of ordered dictionaries.
            state = {"model": dict(self.model.state_dict()), "adam": self.optimizer.state_dict()}
            try:
                self.ways.save(way, state)
            except Exception as error:
                # Another library's failure is no reason to measure nothing.
                self.ways.note_failure(way, error)

    def end_phase(self, num_batches: int) -> None:
        """Wait until all is on disk, and tell what is known."""
        self.ways.finish()
        print(json.dumps(self.ways.times), flush=True)
        if num_batches == self.num_batches:
            raise _Done
        if num_batches % self.period == 0:
            # Before the next batch Paceline stores.
            self.ways.peak.start()

    def evaluate_batch(self, batch: Any) -> Any:
        """Return a loss."""
        return {"loss": self.model["small"](batch[0]).mean()}

    def build_training_data_loader(self) -> Any:
        """Return one sample a batch."""
        return DataLoader(TensorDataset(torch.randn(self.num_batches, 4)))

    def build_validation_data_loader(self) -> Any:
        """Return one batch."""
        return DataLoader(TensorDataset(torch.randn(1, 4)))


def transformer_weights(num_bytes: int, device: str) -> torch.nn.Module:
    """Return weights of a transformer's shapes that take so many bytes with Adam's moments."""
    width = 512 if num_bytes > _LARGE else 256
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes += [(3 * width,), (4 * width,), *[(width,)] * 6]
    num_layers = round(num_bytes / (12 * sum(math.prod(shape) for shape in shapes)))
    shapes *= num_layers
    return torch.nn.ParameterList(torch.randn(shape, device=device) for shape in shapes)


def _state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors that are stored; layers come whole, so not quite as asked."""
    tensors = [*model.state_dict().values()]
    for moments in optimizer.state.values():
        tensors += [value for value in moments.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def warm_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
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
        place: Where the state is.
    """

    def __init__(self, run_dir: Path, num_bytes: int, place: Place) -> None:
        self.times: Times = {"bytes": [num_bytes]}
        self.peak = MemoryPeak(place)
        self._place = place
        self._checkpoints = run_dir / "checkpoints"
        num_copied = min(num_bytes, _COPIED_FROM_GPU) if place.is_cuda else num_bytes
        self._share_copied = num_copied / num_bytes
        self._source = torch.ones(num_copied // 4, device=place.device)
        self._target = torch.ones(num_copied // 4, pin_memory=place.is_cuda)
        # Kept from save to save, it uses its memory again: pinned memory, if the state is on a GPU.
        is_cuda = place.is_cuda
        self._stager = DefaultStager(StagingOptions(is_cuda, False, False, is_cuda))
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
        self.peak.start()
        begin = time.perf_counter()
        if way == "copy":
            for _ in range(_NUM_COPIES):
                begin = time.perf_counter()
                self._target.copy_(self._source, non_blocking=True)
                self._place.synchronize()
                self.add("copy", (time.perf_counter() - begin) / self._share_copied)
        elif way == "torch.save":
            torch.save(state, "state.pt")
            self.add(way, time.perf_counter() - begin)
            with open("state.pt", "rb") as file:
                os.fsync(file.fileno())
            self.add(f"{way}, in all", time.perf_counter() - begin)
            self._note_memory(way)
        else:
            stager = self._stager if way == "dcp.async_save, stager kept" else None
            future = dcp.async_save(state, checkpoint_id="state", async_stager=stager, no_dist=True)
            self.add(way, time.perf_counter() - begin)
            self._go_on(way, begin, future.done)

    def note_failure(self, way: str, error: Exception) -> None:
        """Tell that a way has failed, which has no times then."""
        print(f"{way} failed: {type(error).__name__}: {error}", file=sys.stderr)
        self.peak.stop()

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
        for manifest in self._checkpoints.glob("*/manifest.json"):
            for path in manifest.parent.glob("*.safetensors"):
                path.unlink()

    def _go_on(self, way: str, begin: float, is_done: Callable[[], bool]) -> None:
        self._way, self._begin, self._is_done = way, begin, is_done

    def _has_ended(self) -> bool:
        if not self._is_done():
            return False
        self.add(f"{self._way}, in all", time.perf_counter() - self._begin)
        self._note_memory(self._way)
        self._way = ""
        return True

    def _note_memory(self, way: str) -> None:
        for where, num_bytes in self.peak.stop().items():
            self.add(f"{way}, {where} bytes", num_bytes)

    def _is_stored(self) -> bool:
        return len(list(self._checkpoints.glob("*/manifest.json"))) >= self._num_stored
