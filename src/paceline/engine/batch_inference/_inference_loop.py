"""Batch inference: the batches of a data set, processed once each by all ranks together."""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from paceline import core, faults
from paceline.engine.batch_inference._inference_progress import InferenceProgress
from paceline.engine.devices._random_generators import seed_everything
from paceline.engine.loaders._sharded_data import ShardedData
from paceline.engine.metrics._metric_reducers import ReducerSet

logger = logging.getLogger(__name__)

faults.register("inference.batch")


class ProcessesBatches(Protocol):
    """What processes batches of a data set."""

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        """Process a batch."""

    def on_checkpoint_start(self) -> None:
        """Write what is still in memory."""

    def on_finish(self) -> None:
        """Finish after the last checkpoint."""


class BatchInference:
    """One attempt of a batch inference on this rank.

    Args:
        context: The core context.
        dataset: The data set.
        num_samples: Its length.
        batch_size: The number of samples of a batch.
        max_batches: Process only this many batches; None for all.
        loader_options: Further arguments of the `DataLoader`.

    Attributes:
        reducers: What collects metrics over all batches.
    """

    def __init__(
        self,
        context: core.Context,
        dataset: Dataset[Any],
        num_samples: int,
        batch_size: int,
        max_batches: int | None,
        loader_options: dict[str, Any],
    ) -> None:
        self._context = context
        self._dataset = dataset
        self._batch_size = batch_size
        num_batches = -(-num_samples // batch_size)
        self._num_batches = min(num_batches, max_batches or num_batches)
        self._num_samples = min(num_samples, self._num_batches * batch_size)
        self._loader_options = loader_options
        self.reducers = ReducerSet()
        self._facts = {"samples": num_samples, "batch_size": batch_size}

    def run(
        self,
        make_processor: Callable[[], ProcessesBatches],
        move_output: Callable[[Path | None], None],
        device: torch.device,
        interval: int,
        output_dir: Path | None,
    ) -> bool:
        """Process what is left, and tell whether that is done.

        Args:
            make_processor: Makes what processes the batches.
            move_output: Called with the directory for results of the next batches.
            device: Where this process computes.
            interval: The number of batches of each rank from one checkpoint to the next.
            output_dir: The directory for results.

        Raises:
            ValueError: The directory is no absolute path under a master.
        """
        if device.type == "cuda":
            torch.cuda.set_device(device)
        seed_everything(self._context.seed)
        self._context.preempt.watch_signals()
        with torch.no_grad():
            processor = make_processor()
            self._check_output(output_dir)
            progress = InferenceProgress(self._context, self.reducers, self._facts, output_dir)
            batches = self._own_batches(progress.num_done)
            step = interval * self._context.distributed.size
            while progress.num_done < self._num_batches:
                move_output(progress.output_path)
                end = min(progress.num_done + step, self._num_batches)
                self._process(processor, batches, progress.num_done, end)
                processor.on_checkpoint_start()
                move_output(None)
                progress.num_done = end
                progress.store()
                self._report_progress(end)
                if end < self._num_batches and self._context.preempt.should_preempt():
                    return False
            self._finish(processor, progress)
        return True

    def _check_output(self, directory: Path | None) -> None:
        info = self._context.info
        is_relative = directory is not None and not directory.is_absolute()
        if is_relative and info is not None and info.cluster_id:
            raise ValueError(
                "`output_dir` must be an absolute path under a master, which deletes the attempt's"
                f" directory afterwards, but got {str(directory)!r}."
            )

    def _process(
        self, processor: ProcessesBatches, batches: Iterator[Any], start: int, end: int
    ) -> None:
        """Process this rank's batches among some in a row."""
        rank, size = self._context.distributed.rank, self._context.distributed.size
        numbers = range(start + rank, end, size)
        for number, batch in zip(numbers, islice(batches, len(numbers)), strict=True):
            self.reducers.batch = number
            faults.reach("inference.batch")
            processor.process_batch(batch, number)

    def _own_batches(self, num_done: int) -> Iterator[Any]:
        """Return this rank's batches of those that are left."""
        first = num_done * self._batch_size
        if first >= self._num_samples:
            return iter(())
        left = Subset(self._dataset, range(first, self._num_samples))
        loader = DataLoader(left, batch_size=self._batch_size, **self._loader_options)
        rank, size = self._context.distributed.rank, self._context.distributed.size
        data = ShardedData(
            loader,
            num_shards=size,
            own_shards=range(rank, rank + 1),
            seed=self._context.seed,
        )
        return data.iterate(0)

    def _report_progress(self, num_done: int) -> None:
        if self._context.distributed.rank == 0:
            self._context.train.report_progress(num_done / self._num_batches)
            logger.info("%d of %d batches are processed.", num_done, self._num_batches)

    def _finish(self, processor: ProcessesBatches, progress: InferenceProgress) -> None:
        metrics = progress.metrics()
        if metrics and self._context.distributed.rank == 0:
            self._context.train.report_validation_metrics(progress.num_done, metrics)
        processor.on_finish()
