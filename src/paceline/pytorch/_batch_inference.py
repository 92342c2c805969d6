"""Batch inference progress in checkpoints, and the results belonging to them.

Also: progress in checkpoints.
"""

import logging
import os
import re
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from paceline import core, faults
from paceline._base.arguments_and_errors import check_count
from paceline._base.files import replacing_atomically
from paceline._training.engine.checkpoints.state_format import (
    StateFormatError,
    load_state,
    save_state,
)
from paceline._training.engine.devices import join_ranks, own_device
from paceline._training.engine.metric_reducers import MetricReducer, ReducerSet
from paceline._training.engine.rank_differences import check_same_data
from paceline.data._order_and_random_generators import seed_everything
from paceline.data._sharded_loader import ShardedData
from paceline.data._torch_loaders import TorchData, to_device

logger = logging.getLogger(__name__)


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

        After each checkpoint it is another one. Output written since the last checkpoint is
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
        """Register a metric over all batches, reported at the end; return the reducer to feed.

        Checkpoints hold each rank's collected values: `per_slot_reduce` must return plain values
        or tensors, and must not change the reducer.

        Args:
            reducer: The reducer, a function that makes the metric of all collected values, or a
                metric or `MetricCollection` of torchmetrics.
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
            batch: The data loader's batch of the samples, where the loader has left it.
            batch_idx: The number of the batch in the whole data set, from 0. It is the same for
                any number of ranks.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027
        """Write results still in memory, on every rank; the batches count as done afterwards."""

    def on_finish(self) -> None:  # noqa: B027
        """Finish, on every rank, after the last checkpoint.

        It is called again if the process is killed within.
        """


_MARKER = ".paceline-inference"
_COLLECTED = "collected"
_OTHER_RUN, _SOMETHING = "the results of another run", "something else"
_HINTS = {
    _OTHER_RUN: "name another directory. To go on with that run, give its run directory as"
    " `resume=`, such as 'paceline_runs/20260101-120000-name'.",
    _SOMETHING: "name another directory, or delete this one if nobody needs it.",
}
_BATCHES = re.compile(r"batches-(\d{10,})")


@dataclass(eq=False, repr=False)
class InferenceProgress:
    """Progress of batch inference: number of finished batches and the reducers' values.

    Every rank makes it and calls each of its methods.

    Args:
        context: The core context.
        reducers: The reducers.
        facts: The facts that must be the same in all attempts.
        output_dir: The directory for results, if there is one.

    Attributes:
        num_done: The number of batches that are finished, from the first one on.

    Raises:
        ValueError: Facts differ from an earlier attempt's, or the directory has results of
            another run, or lacks results of an earlier attempt.
    """

    context: core.Context
    reducers: ReducerSet
    facts: dict[str, Any]
    output_dir: Path | None

    def __post_init__(self) -> None:
        self.num_done = 0
        self._earlier: list[list[Any]] = []
        self._stored: str | None = None
        # The machines whose directories have results.
        self._machines: list[str] = []
        latest = self.context.distributed.broadcast(self.context.latest_checkpoint)
        if latest is None:
            self._output_id = self.context.distributed.broadcast(str(uuid4()))
            self._check_output()
            # First checkpoint stores the output ID, to tell these results from another run's.
            self.store()
        else:
            self._resume(latest)
            self._check_output()
        self._clean_output()

    @property
    def output_path(self) -> Path | None:
        """The directory for this rank's results of the next batches, or None."""
        if self.output_dir is None:
            return None
        name = f"batches-{self.num_done:010}"
        return self.output_dir / name / f"rank-{self.context.distributed.rank}"

    def store(self) -> None:
        """Store a checkpoint, and delete the previous checkpoint of this attempt."""
        metadata = {
            "steps_completed": self.num_done,
            "output_id": self._output_id,
            "output_machines": self._machines,
            "inference": self.facts,
        }
        rank = self.context.distributed.rank
        earlier = self._earlier if rank == 0 else []
        collected = [*earlier, self.reducers.shares(for_training=False)]
        with self.context.checkpoint.store_path(metadata, shard=True) as (path, uuid):
            try:
                save_state(collected, path, f"{_COLLECTED}_{rank}")
            except StateFormatError as error:
                problem = str(error).partition(" Hint:")[0]
                raise StateFormatError(
                    "What reducers collect in a batch inference must be plain values or tensors, as"
                    f" checkpoints hold it. {problem} Hint: give such values to `update`, or return"
                    " them from `per_slot_reduce`."
                ) from None
        # Checkpoints of earlier attempts stay: they may belong to another run.
        if rank == 0 and self._stored is not None:
            self.context.checkpoint.delete(self._stored)
        self._stored = uuid

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of all reducers over all finished batches."""
        own = self.reducers.shares(for_training=False)
        shares = [*self._earlier, *self.context.distributed.allgather(own)]
        return self.reducers.combined(shares, for_training=False)

    def _resume(self, uuid: str) -> None:
        metadata = self.context.checkpoint.get_metadata(uuid)
        if "inference" not in metadata:
            raise ValueError(
                f"The run must go on from a checkpoint of a batch inference, but {uuid} is another"
                " one. Hint: start it as a run of its own."
            )
        differing = [
            f"{name} was {value} and is {self.facts[name]}"
            for name, value in metadata["inference"].items()
            if self.facts.get(name) != value
        ]
        if differing:
            raise ValueError(
                "A batch inference must go on with what it was begun with, but"
                f" {', '.join(differing)}. Hint: start another run by `resume=None`."
            )
        self.num_done = metadata["steps_completed"]
        self._output_id = metadata["output_id"]
        self._machines = metadata["output_machines"]
        with self.context.checkpoint.restore_path(uuid) as path:
            names = sorted(path.glob(f"{_COLLECTED}_*.json"))
            self._earlier = [share for name in names for share in load_state(path, name.stem)]
        if self.context.distributed.rank == 0:
            logger.info("Going on after %d finished batches.", self.num_done)

    def _check_output(self) -> None:
        directory, gather = self.output_dir, self.context.distributed.allgather
        held, machine = None, None
        has_results = False
        if directory is not None:
            marker = directory / _MARKER
            known = marker.read_text() if marker.exists() else None
            machine, has_results = socket.gethostname(), known == self._output_id
            if known is not None and not has_results:
                held = _OTHER_RUN
            elif known is None and directory.exists() and _has_others(directory):
                held = _SOMETHING
        # Ranks of one machine see the directory at different times.
        found = gather((held, machine, has_results))
        for one, _, _ in found:
            if one is not None:
                raise ValueError(
                    "`output_dir` must be an empty or new directory, or that of the run that is"
                    f" resumed, but {str(directory)!r} holds {one}. Hint: {_HINTS[one]}"
                )
        here = {name: has_results for _, name, has_results in found if name is not None}
        if self.num_done:
            self._check_earlier_results(here, self._machines)
        self._machines = sorted({*self._machines, *here})

    def _check_earlier_results(self, here: Mapping[str, bool], earlier: Sequence[str]) -> None:
        """Check the output directory for the results of earlier attempts.

        Args:
            here: The machines of this attempt, with whether their directories have results.
            earlier: The machines of earlier attempts; none if they had no directory.
        """
        directory = str(self.output_dir)
        lacking = [name for name in earlier if not here.get(name, True)]
        if not here and earlier:
            problem = "none is given"
        elif here and not earlier:
            problem = f"they were made without one, and {directory!r} is given"
        elif lacking:
            where = f" on {', '.join(lacking)}" if len(here) > 1 else ""
            problem = f"{directory!r}{where} holds none"
        else:
            problem = None
        if problem is not None:
            raise ValueError(
                f"`output_dir` must hold the results of the {self.num_done} batches that are"
                f" finished, but {problem}. Hint: give what was given before; if the results are"
                " gone, `resume=None` processes all batches again."
            )
        elsewhere = [name for name in earlier if name not in here]
        if elsewhere and not all(here.values()) and self.context.distributed.rank == 0:
            logger.warning(
                "Results of earlier batches are in %r on %s.", directory, ", ".join(elsewhere)
            )

    def _clean_output(self) -> None:
        """Remove results of unfinished batches."""
        distributed, directory = self.context.distributed, self.output_dir
        # Local rank 0 cleans: the ranks of a machine share the directory.
        if directory is not None and distributed.local_rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with replacing_atomically(directory / _MARKER) as part:
                part.write_text(self._output_id)
            for path in directory.iterdir():
                batches = _BATCHES.fullmatch(path.name)
                if batches is not None and int(batches[1]) >= self.num_done:
                    shutil.rmtree(path)
        # Barrier: no rank may write results before the directory is clean.
        distributed.allgather(None)


def _has_others(directory: Path) -> bool:
    """Return whether a directory has files other than the marker or a partial marker."""
    return any(_MARKER not in path.name for path in directory.iterdir())


faults.register("inference.batch")


class BatchInference:
    """Attempt of a batch inference on this rank.

    Args:
        context: The core context.
        dataset: The data set.
        num_samples: Its length.
        batch_size: The number of samples of a batch.
        max_batches: Process only this many batches; None for all.
        loader_options: Further arguments of the `DataLoader`.

    Attributes:
        reducers: The collectors of metrics over all batches.
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
        make_processor: Callable[[], TorchBatchProcessor],
        move_output: Callable[[Path | None], None],
        device: torch.device,
        interval: int,
        output_dir: Path | None,
    ) -> bool:
        """Process the remaining batches; return True when done, False when preempted.

        Args:
            make_processor: Makes the processor of the batches.
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
                # Preemption after the last batch is ignored: nothing is left to resume.
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
        self, processor: TorchBatchProcessor, batches: Iterator[Any], start: int, end: int
    ) -> None:
        """Process this rank's batches among some in a row."""
        rank, size = self._context.distributed.rank, self._context.distributed.size
        numbers = range(start + rank, end, size)
        for number, batch in zip(numbers, islice(batches, len(numbers)), strict=True):
            self.reducers.batch = number
            faults.reach("inference.batch")
            processor.process_batch(batch, number)

    def _own_batches(self, num_done: int) -> Iterator[Any]:
        """Return this rank's share of the remaining batches."""
        first = num_done * self._batch_size
        if first >= self._num_samples:
            return iter(())
        left = Subset(self._dataset, range(first, self._num_samples))
        loader = DataLoader(left, batch_size=self._batch_size, **self._loader_options)
        rank, size = self._context.distributed.rank, self._context.distributed.size
        data = ShardedData(
            loader, num_shards=size, own_shards=range(rank, rank + 1), seed=self._context.seed
        )
        return data.iterate(0)

    def _report_progress(self, num_done: int) -> None:
        if self._context.distributed.rank == 0:
            self._context.train.report_progress(num_done / self._num_batches)
            logger.info("%d of %d batches are processed.", num_done, self._num_batches)

    def _finish(self, processor: TorchBatchProcessor, progress: InferenceProgress) -> None:
        metrics = progress.metrics()
        if metrics and self._context.distributed.rank == 0:
            self._context.train.report_validation_metrics(progress.num_done, metrics)
        processor.on_finish()


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
    counted in checkpoints. After an interruption, a run continues after them, with any number of
    ranks. See docs/batch-inference.md.

    Args:
        batch_processor_cls: The processor of the batches; each rank makes one.
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
        resume: The run to resume, see `core.init`.
        checkpoint_storage: Where checkpoints go, see `core.init`.
        device: Where this process computes: a GPU of its own by default, else the CPU.

    Returns:
        True if all batches are processed; False if the run was preempted and stored a checkpoint
        to resume from.

    Raises:
        TypeError: `batch_processor_cls` is no `TorchBatchProcessor`, or the data set has no length.
        ValueError: A number is below 1, an argument of the loader has no effect, the data sets of
            the ranks differ, the run was begun with another data set or batch size, or `output_dir`
            holds something else.
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
        check_same_data(context.distributed, {"inference": dataset}, can_be_off=False)
        inference = BatchInference(context, dataset, num_samples, batch_size, max_batches, kwargs)
        place = TorchBatchProcessorContext(
            context, own_device(context.distributed.local_rank, chosen=chosen), inference.reducers
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
