"""Batch inference over a data set, by any number of ranks, resumed after an interruption."""

import logging
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from paceline import core, faults
from paceline._argument_checks import check_count
from paceline.engine import ReducerSet, ShardedData, join_ranks, own_device, seed_everything
from paceline.pytorch._batch_processor import TorchBatchProcessor, TorchBatchProcessorContext
from paceline.pytorch._batch_progress import BatchProgress

logger = logging.getLogger(__name__)

faults.register("inference.batch")

_REFUSED = ("shuffle", "sampler", "batch_sampler", "batch_size", "drop_last")


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Dataset[Any],
    batch_size: int = 1,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: core.DistributedContext | None = None,
    *,
    output_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    resume: str | os.PathLike[str] | None = "auto",
    checkpoint_storage: Any = None,
    device: torch.device | str | None = None,
) -> bool:
    """Process a data set batch by batch, once each, by all ranks together.

    The ranks take turns: batch ``i`` goes to the rank ``i % world_size``. Finished batches are
    counted in checkpoints. After an interruption, a run goes on behind them, with any number of
    ranks. See docs/batch-inference.md.

    Args:
        batch_processor_cls: What processes the batches; each rank makes one.
        dataset: The data set, with a length, the same on all ranks.
        batch_size: The number of samples of a batch; the last one may have fewer.
        max_batches: Process only this many batches; all by default.
        checkpoint_interval: The number of batches of each rank from one checkpoint to the next.
        dataloader_kwargs: Further arguments of the `DataLoader`.
        distributed_context: The place among several ranks; found from the environment by default.
        output_dir: The directory for results, see `TorchBatchProcessorContext.output_path`; all
            ranks of a machine must see it. It must be new or empty at first, and an absolute path
            under a master.
        name: The run's name, see `core.init`.
        resume: The run to go on with, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
        device: Where this process computes: a GPU of its own by default, else the CPU.

    Returns:
        True if all batches are processed; False if the run was preempted and stored a checkpoint
        to go on from.

    Raises:
        TypeError: `batch_processor_cls` is no `TorchBatchProcessor`, or the data set has no length.
        ValueError: A number is below 1, an argument of the loader has no effect, the run was begun
            with another data set or batch size, or `output_dir` holds something else.
    """
    kwargs = dict(dataloader_kwargs or {})
    _check(batch_processor_cls, batch_size, max_batches, checkpoint_interval, kwargs)
    num_samples = _length(dataset)
    chosen = None if device is None else torch.device(device)
    distributed = join_ranks(distributed_context, chosen)
    with core.init(
        distributed=distributed, name=name, resume=resume, checkpoint_storage=checkpoint_storage
    ) as context:
        inference = _Inference(context, dataset, num_samples, batch_size, max_batches, kwargs)
        place = own_device(context.distributed.local_rank, chosen=chosen)
        return inference.run(batch_processor_cls, place, checkpoint_interval, output_dir)


class _Inference:
    """One attempt of a batch inference on this rank."""

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
        self._reducers = ReducerSet()
        self._facts = {"samples": num_samples, "batch_size": batch_size}

    def run(
        self,
        processor_class: type[TorchBatchProcessor],
        device: torch.device,
        interval: int,
        output_dir: str | os.PathLike[str] | None,
    ) -> bool:
        """Process what is left, and tell whether that is done."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        seed_everything(self._context.seed)
        self._context.preempt.watch_signals()
        place = TorchBatchProcessorContext(self._context, device, self._reducers)
        with torch.no_grad():
            processor = processor_class(place)
            output = None if output_dir is None else self._checked_output(Path(output_dir))
            progress = BatchProgress(self._context, self._reducers, self._facts, output)
            batches = self._own_batches(progress.num_done)
            step = interval * self._context.distributed.size
            while progress.num_done < self._num_batches:
                place.move_output(progress.output_path)
                end = min(progress.num_done + step, self._num_batches)
                self._process(processor, batches, progress.num_done, end)
                processor.on_checkpoint_start()
                place.move_output(None)
                progress.num_done = end
                progress.store()
                self._report_progress(end)
                if end < self._num_batches and self._context.preempt.should_preempt():
                    return False
            self._finish(processor, progress)
        return True

    def _checked_output(self, directory: Path) -> Path:
        info = self._context.info
        if info is not None and info.cluster_id and not directory.is_absolute():
            raise ValueError(
                "`output_dir` must be an absolute path under a master, which deletes the attempt's"
                f" directory afterwards, but got {str(directory)!r}."
            )
        return directory

    def _process(
        self, processor: TorchBatchProcessor, batches: Iterator[Any], start: int, end: int
    ) -> None:
        """Process this rank's batches among some in a row."""
        rank, size = self._context.distributed.rank, self._context.distributed.size
        numbers = range(start + rank, end, size)
        for number, batch in zip(numbers, islice(batches, len(numbers)), strict=True):
            self._reducers.batch = number
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

    def _finish(self, processor: TorchBatchProcessor, progress: BatchProgress) -> None:
        metrics = progress.metrics()
        if metrics and self._context.distributed.rank == 0:
            self._context.train.report_validation_metrics(progress.num_done, metrics)
        processor.on_finish()


def _check(
    processor_class: object,
    batch_size: int,
    max_batches: int | None,
    checkpoint_interval: int,
    loader_options: Mapping[str, Any],
) -> None:
    if not (isinstance(processor_class, type) and issubclass(processor_class, TorchBatchProcessor)):
        raise TypeError(
            "`batch_processor_cls` must be a subclass of TorchBatchProcessor, but got"
            f" {processor_class!r}."
        )
    numbers = {"batch_size": batch_size, "checkpoint_interval": checkpoint_interval}
    if max_batches is not None:
        numbers["max_batches"] = max_batches
    for name, value in numbers.items():
        check_count(name, value)
    refused = [name for name in _REFUSED if name in loader_options]
    if refused:
        raise ValueError(
            "`dataloader_kwargs` must not say which samples are in a batch, but has"
            f" {', '.join(refused)}. Hint: all samples are processed in the order of the data set;"
            " `batch_size` is an argument of its own."
        )


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"`dataset` must have `__len__` and `__getitem__`, but {type(dataset).__name__} has"
            " not. Hint: batches are divided among the ranks by their numbers."
        )
    return len(dataset)
