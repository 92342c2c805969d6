"""Batch inference as its user writes it: a processor, and the context that it is made with."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline import core
from paceline.engine import MetricReducer, ReducerSet, to_device
from paceline.pytorch._batches_and_loaders import TorchData


class TorchBatchProcessorContext:
    """Place of a processor: its rank, its device, and where its results go.

    Attributes:
        core: The core context of the run.
        distributed: The place among the ranks.
        device: The device of this rank.
    """

    def __init__(
        self, core_context: core.Context, device: torch.device, reducers: ReducerSet
    ) -> None:
        self.core = core_context
        self.distributed = core_context.distributed
        self.device = device
        self._reducers = reducers
        self._warned: set[type] = set()
        self._output: Path | None = None

    def get_distributed_rank(self) -> int:
        """Return the number of this rank."""
        return self.distributed.rank

    def get_distributed_size(self) -> int:
        """Return the number of ranks."""
        return self.distributed.size

    def to_device(self, data: TorchData) -> TorchData:
        """Return nested data on this rank's device."""
        return to_device(data, self.device, self._warned)

    def prepare_model_for_inference(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model on this rank's device, in evaluation mode."""
        return model.to(self.device).eval()

    def output_path(self) -> Path:
        """Return the directory for the results of the present batches on this rank.

        After each checkpoint it is another one. What was written since the last checkpoint is
        removed before its batches are processed again.

        Raises:
            RuntimeError: `torch_batch_process` was called without `output_dir`, or no batch is
                being processed.
        """
        if self._output is None:
            raise RuntimeError(
                "`output_path()` must be called while batches are processed, with a directory for"
                " results, but there is none. Hint: give `output_dir` to `torch_batch_process`,"
                " and call `output_path()` in `process_batch` or `on_checkpoint_start`."
            )
        self._output.mkdir(parents=True, exist_ok=True)
        return self._output

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics, on the chief.

        Raises:
            RuntimeError: This rank is not the chief.
        """
        self.core.train.report_metrics(group, steps_completed, metrics)

    def wrap_reducer(
        self, reducer: MetricReducer | Callable[[list[Any]], Any], name: str | None = None
    ) -> MetricReducer:
        """Register a metric over all batches, which is reported at the end; return what to feed.

        Checkpoints hold what each rank has collected: `per_slot_reduce` must return plain values
        or tensors, and must not change the reducer.

        Args:
            reducer: The reducer, or a function that makes the metric of all collected values.
            name: The name of the metric; None if the reducer returns a dictionary of metrics.
        """
        return self._reducers.wrap(reducer, name, for_training=False, for_validation=True)

    def move_output(self, path: Path | None) -> None:
        """Have `output_path` return another directory."""
        self._output = path


class TorchBatchProcessor(ABC):
    """Processing of the batches of a data set: override `process_batch`, and `__init__` for setup.

    Args:
        context: Place of the processor.
    """

    @abstractmethod
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        """Load the model, and get ready."""

    @abstractmethod
    def process_batch(self, batch: TorchData, batch_idx: int) -> None:
        """Process a batch.

        Args:
            batch: What the data loader has made of the samples, where the loader has left it.
            batch_idx: The number of the batch in the whole data set, from 0. It is the same for
                any number of ranks.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027
        """Write what is still in memory, on every rank; after this, its batches are done."""

    def on_finish(self) -> None:  # noqa: B027
        """Finish, on every rank, after the last checkpoint.

        It is called again if the process is killed within.
        """
