"""Measure the parts of a save that training waits for, beside a copy of the same bytes.

Usage: python benchmarks/save_parts.py [--megabytes N] [--rounds N] [--threads N]

One process trains and stores a checkpoint every few batches. Between two checkpoints it copies one
flat tensor of the same size into memory that was used before. Of each part the table has the median
and the least time, and the processor time of the training thread, which other programs on the
machine hardly change. A part includes those that are indented below it.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from save_ways import transformer_weights, warm_adam
from torch.utils.data import TensorDataset

from paceline import pytorch
from paceline._training.engine.checkpoints import capture_and_restore as _capture
from paceline._training.engine.checkpoints import checkpoint_saver as _background_saver
from paceline._training.engine.checkpoints import sharded_tensor_pieces as _host_copies
from paceline.pytorch import _resumable_training, _training_state

_PERIOD, _WORK_S, _NUM_WARM = 10, 0.005, 5
_PARTS: list[tuple[str, Any, str]] = [
    ("save", _resumable_training.ResumableTraining, "save"),
    ("  capture the state", _training_state.TrainingState, "capture"),
    ("    generators", _capture, "capture_random_state"),
    ("    models, optimizers, settings", _training_state.TrainingState, "_shared"),
    ("  copy and start the thread", _background_saver.CheckpointSaver, "save"),
    ("    collect and copy", _host_copies.HostCopies, "copy"),
    ("      look for shared memory", _host_copies, "_owners"),
    ("      copy the bytes", _host_copies, "copy_tensors"),
    ("    start the thread", threading.Thread, "start"),
]
_COPY = "copy of one flat tensor"

Times = dict[str, list[tuple[float, float]]]


def timed(times: Times, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes the time and the processor time of its calls in this thread."""
    main = threading.current_thread()

    def call(*arguments: Any, **options: Any) -> Any:
        began, processor = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            if threading.current_thread() is main:
                spent = time.perf_counter() - began, time.thread_time() - processor
                times.setdefault(name, []).append(spent)

    return call


class StoringTrial(pytorch.PyTorchTrial):
    """Batches of some milliseconds beside a state; a flat copy between two checkpoints."""

    def __init__(self, context: pytorch.PyTorchTrialContext, num_bytes: int, times: Times) -> None:
        self.model = context.wrap_model(transformer_weights(num_bytes, "cpu"))
        self.optimizer = context.wrap_optimizer(warm_adam(self.model))
        size = 3 * sum(parameter.nbytes for parameter in self.model.parameters())
        self.source, self.target = torch.ones(size // 4), torch.ones(size // 4)
        self.copy = timed(times, _COPY, self.target.copy_)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx % _PERIOD == _PERIOD // 2:
            self.copy(self.source)
        time.sleep(_WORK_S)
        return {"loss": 0.0}

    def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> Any:
        return {"loss": 0.0}

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(TensorDataset(torch.zeros(100_000)), batch_size=1)

    build_validation_data_loader = build_training_data_loader


def measure(num_bytes: int, num_rounds: int) -> Times:
    """Return the times of each part in seconds, with processor times, one pair a checkpoint."""
    times: Times = {}
    for name, owner, attribute in _PARTS:
        setattr(owner, attribute, timed(times, name, getattr(owner, attribute)))
    with pytorch.init({"global_batch_size": 1}, seed=1) as context:
        trial = StoringTrial(context, num_bytes, times)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(_PERIOD * (num_rounds + _NUM_WARM)),
            checkpoint_period=pytorch.Batch(_PERIOD),
            checkpoint_policy="none",
            reporting_period=pytorch.Batch(10**9),
            keep_latest=1,
        )
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        times = measure(options.megabytes * 10**6, options.rounds)
    print("| part | median ms | least ms | processor, median ms | of the copy, median |")
    print("|---|---|---|---|---|")
    copies = [processor for _, processor in times[_COPY][_NUM_WARM:]]
    for name in (_COPY, *(name for name, _, _ in _PARTS)):
        walls, processors = zip(*times[name][_NUM_WARM:], strict=True)
        ratio = statistics.median(processors) / statistics.median(copies)
        numbers = (statistics.median(walls), min(walls), statistics.median(processors))
        print(f"| {name} | " + " | ".join(f"{1000 * n:.3f}" for n in numbers) + f" | {ratio:.2f} |")


if __name__ == "__main__":
    main()
