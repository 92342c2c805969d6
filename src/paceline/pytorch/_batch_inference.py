"""Batch inference over a data set, by any number of ranks, resumed after an interruption."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from paceline import core
from paceline._argument_checks import check_count
from paceline.engine import BatchInference, join_ranks, own_device
from paceline.pytorch._batch_processor import TorchBatchProcessor, TorchBatchProcessorContext

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
    _check_batch_inference(
        batch_processor_cls, batch_size, max_batches, checkpoint_interval, kwargs
    )
    num_samples = _length_for_inference(dataset)
    chosen = None if device is None else torch.device(device)
    distributed = join_ranks(distributed_context, chosen)
    with core.init(
        distributed=distributed, name=name, resume=resume, checkpoint_storage=checkpoint_storage
    ) as context:
        inference = BatchInference(context, dataset, num_samples, batch_size, max_batches, kwargs)
        place = TorchBatchProcessorContext(
            context,
            own_device(context.distributed.local_rank, chosen=chosen),
            inference.reducers,
        )
        return inference.run(
            lambda: batch_processor_cls(place),
            place.move_output,
            place.device,
            checkpoint_interval,
            None if output_dir is None else Path(output_dir),
        )


def _check_batch_inference(
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


def _length_for_inference(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"`dataset` must have `__len__` and `__getitem__`, but {type(dataset).__name__} has"
            " not. Hint: batches are divided among the ranks by their numbers."
        )
    return len(dataset)
