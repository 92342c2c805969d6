"""Training of one trial: the loop hooks of a `PyTorchTrial`."""

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.engine import (
    BestValidation,
    Destination,
    EarlierState,
    LoopTraining,
    Position,
    ShardedData,
    TraceProfiler,
    TrainingLoop,
    TrainingState,
    TrainsShard,
    has_same_size,
    mix_seed,
    mover_to,
    position_of,
    read_state,
    restore_random_state,
    seed_everything,
    shards_of_worker,
)
from paceline.pytorch._callbacks import PyTorchCallback
from paceline.pytorch._resume_checks import changes_since
from paceline.pytorch._trial import PyTorchTrial
from paceline.pytorch._trial_context import PyTorchTrialContext
from paceline.pytorch._trial_state import restore_callbacks, trial_facts
from paceline.pytorch._validation import Validator

logger = logging.getLogger(__name__)


class Training(LoopTraining):
    """A trial's data, loop, callbacks and checkpoints; it may be run piece by piece.

    Args:
        trial: The trial.
        context: The context that the trial was made with.
        validator: How the trial validates.
    """

    # What a back end with states of its own overrides.
    state_type = TrainingState
    needs_whole_batches = False

    def __init__(
        self, trial: PyTorchTrial, context: PyTorchTrialContext, validator: Validator
    ) -> None:
        self._callbacks = trial.build_callbacks()
        super().__init__(context.core, partial(_tell_stored, self._callbacks.values()))
        self.has_schedulers = False
        self.to_device: Callable[[Any], Any] = lambda data: data
        if context.moves_data:
            self.to_device = mover_to(context.device, context.warned_types)
        self._trial = trial
        self._train_batch = trial.train_batch
        self._context = context
        self._validator = validator
        self._entered: list[PyTorchCallback] = []
        self._batch_metrics: list[dict[str, Any]] = []
        validator.keeps_outputs = any(
            type(callback).on_validation_epoch_end is not PyTorchCallback.on_validation_epoch_end
            for callback in self._callbacks.values()
        )
        self._keeps_batches = any(
            type(callback).on_training_workload_end is not PyTorchCallback.on_training_workload_end
            for callback in self._callbacks.values()
        )

    # ---- building and restoring ----------------------------------------------------------

    def build(self, state: EarlierState | None) -> None:
        """Build the data and the loop, from a stored state or from the start."""
        parts = None if state is None else self._read(state)
        self.checkpoints.latest = "" if state is None else state.uuid
        self.checkpoints.begin_series()
        position = Position() if parts is None else position_of(parts)
        schedulers = [entry.scheduler for entry in self._context.lr_schedulers]
        self._built = self._context.built
        if self._callbacks:
            self._enter(position, None if state is None else state.uuid)
        context, distributed = self._context, self._core.distributed
        seed = context.get_trial_seed() if parts is None else parts["training"]["seed"]
        self._seed = seed
        grid = context.stepper.grid
        own = shards_of_worker(context.num_shards, grid.data_rank, grid.data_size)
        if not own:
            logger.warning(
                "Rank %d idles: a global batch has %d shard(s) for %d ranks.",
                distributed.rank,
                context.num_shards,
                grid.data_size,
            )
        data = ShardedData(
            self._trial.build_training_data_loader(),
            num_shards=context.num_shards,
            own_shards=own,
            seed=seed,
            joins_shards=context.stepper.is_divided,
            drops_rest=self.needs_whole_batches,
        )
        self._validation_loader = self._trial.build_validation_data_loader()
        self._validation_data = self._data_to_validate(self._validation_loader, own)
        self.has_schedulers = bool(context.lr_schedulers)
        self.loop = context.loop = TrainingLoop(self._core, self, data, context.stepper, position)
        self._state = self.state_type(
            context.stepper, schedulers, context.reducers, distributed.rank
        )
        if parts is not None:
            self._restore(parts)
        elif grid.data_rank:
            # Models are alike by now; from here on ranks with other samples draw other numbers.
            seed_everything(seed, grid.data_rank)
        context.num_epoch_batches = self.loop.num_epoch_batches(position.epochs)
        for callback in self._callbacks.values():
            callback.on_training_start()
        if parts is not None and parts["rank"]["random"] is not None:
            # What a hook has drawn was drawn in the beginning too.
            restore_random_state(parts["rank"]["random"])

    def _read(self, state: EarlierState) -> dict[str, Any]:
        storage = state.storage or self._core.checkpoint
        with storage.restore_path(state.uuid) as path:
            parts = self._read_files(Path(path))
        self._context.num_shards = parts["training"]["num_shards"]
        return parts

    def _read_files(self, path: Path) -> dict[str, Any]:
        return read_state(
            path,
            self._core.distributed.rank,
            self._core.distributed.size,
            is_sharded=self._context.stepper.is_sharded,
            tensor_size=self._context.stepper.grid.tensor_size,
        )

    def _restore(self, parts: dict[str, Any]) -> None:
        context = self._context
        for callback in self._callbacks.values():
            callback.on_checkpoint_load_start(parts)
        training = parts["training"]
        changes = changes_since(training, context)
        self._state.restore_shared(parts, self.loop, changes)
        if self._callbacks or training["callbacks"]:
            restore_callbacks(self._callbacks, training["callbacks"])
        if self._core.distributed.rank == 0:
            changes.tell()
        self.best_validation = BestValidation.of_state(training)
        self.piece_end = training.get("piece_end")
        for entry in context.lr_schedulers:
            optimizer = entry.scheduler.optimizer
            entry.num_seen_steps = context.stepper.num_steps_of.get(id(optimizer), 0)
        size, grid = self._core.distributed.size, context.stepper.grid
        is_same_size = has_same_size(training, size, grid.tensor_size)
        self._state.restore_own(parts, self.loop, is_same_size=is_same_size)

    def _enter(self, position: Position, checkpoint: str | None) -> None:
        for callback in self._callbacks.values():
            self._entered.append(callback)
            callback.on_trial_startup(position.batches, checkpoint)

    def reenter(self) -> None:
        """Tell the callbacks that training goes on after `close`."""
        if not self._entered:
            self._enter(self.loop.position, None)
            for callback in self._callbacks.values():
                callback.on_training_start()

    def close(self) -> None:
        """Wait for the checkpoint that is being stored, and run the shutdown hooks."""
        entered, self._entered = self._entered, []
        with ExitStack() as stack:
            for callback in entered:
                stack.callback(callback.on_trial_shutdown)
            error = sys.exc_info()[1]
            self.checkpoints.finish(error)
            if error is None and self._context.loop is not None:
                self._context.loop.end()

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models of the trial."""
        return self._context.stepper.models

    @property
    def tracer(self) -> TraceProfiler | None:
        """What the trial's context traces with."""
        return self._context.tracer

    # ---- the door ------------------------------------------------------------------------

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on one shard and return its metrics."""
        self._context.reducers.batch = position.batches
        return self._train_shard(data, position.epochs, position.batches)

    def plain_training(self) -> TrainsShard:
        """Return what trains the next shards: `train_batch` itself, where it needs nothing else."""
        is_bare = self._context.stepper.computes_in_fp32 and not self._keeps_batches
        return self._train_batch if is_bare else self._train_shard

    def metrics_of(self, returned: Any) -> Mapping[str, Any]:
        """Return the metrics that a shard's training returned."""
        if isinstance(returned, torch.Tensor):
            return {"loss": returned}
        if not isinstance(returned, Mapping):
            raise TypeError(
                "`train_batch` must return a dictionary of metrics or a tensor, but returned a"
                f" {type(returned).__name__}."
            )
        return returned

    def _train_shard(self, data: Any, epochs: int, batches: int) -> Mapping[str, Any]:
        if self._context.stepper.computes_in_fp32:
            returned = self._train_batch(data, epochs, batches)
        else:
            with self._context.stepper.autocast():
                returned = self._train_batch(data, epochs, batches)
        metrics = returned if type(returned) is dict else self.metrics_of(returned)
        if self._keeps_batches:
            self._batch_metrics.append(
                {k: v.detach().clone() if hasattr(v, "detach") else v for k, v in metrics.items()}
            )
        return metrics

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""
        return self._trial.get_batch_length(data)

    def after_batch(self, position: Position) -> None:
        """Step the schedulers that count batches or optimizer steps."""
        num_steps_of = self._context.stepper.num_steps_of
        for entry in self._context.lr_schedulers:
            entry.after_batch(position, num_steps_of.get(id(entry.scheduler.optimizer), 0))

    def epoch_started(self, epoch: int) -> None:
        """Tell the callbacks."""
        self._context.num_epoch_batches = self.loop.num_epoch_batches(epoch)
        for callback in self._callbacks.values():
            callback.on_training_epoch_start(epoch)

    def epoch_ended(self, epoch: int) -> None:
        """Step the schedulers that count epochs, and tell the callbacks."""
        for entry in self._context.lr_schedulers:
            entry.after_epoch(epoch)
        for callback in self._callbacks.values():
            callback.on_training_epoch_end(epoch)

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report training metrics and progress."""
        reported: dict[str, Any] = {
            **metrics,
            **self._context.reducers.reduce(self._core.distributed, for_training=True),
        }
        self._context.reducers.reset()
        self._report_training(position, reported)
        batches, self._batch_metrics = self._batch_metrics, []
        for callback in self._callbacks.values():
            callback.on_training_workload_end(reported, batches)

    def validate(self, position: Position) -> bool:
        """Validate, report, and judge."""
        self.progress.update(position)
        self.progress.note("validating")
        with self.evaluating(self._context.reducers):
            metrics = self._validate()
        return self._report_validation(position, metrics)

    def _validate(self) -> dict[str, Any]:
        callbacks, is_by_batch = self._callbacks.values(), self._validator.is_by_batch
        for callback in callbacks:
            callback.on_validation_start()
            if is_by_batch:
                callback.on_validation_epoch_start()
        limit = self.validation_limit
        outcome = self._validator.run(self._validation_data, self._validation_loader, limit)
        if is_by_batch:
            for callback in callbacks:
                callback.on_validation_epoch_end(outcome.outputs)
        for callback in callbacks:
            callback.on_validation_end(outcome.metrics)
        return outcome.metrics

    def evaluate(self, loader: Any) -> dict[str, Any]:
        """Return the metrics of other data than those of validation."""
        with self.evaluating(self._context.reducers):
            data = self._data_to_validate(loader, self.loop.data.own_shards)
            return self._validator.run(data, loader, None).metrics

    def _data_to_validate(self, loader: Any, own_shards: range) -> ShardedData | None:
        """Return a loader's data in shards; None if the trial evaluates the loader as a whole."""
        if not self._validator.is_by_batch:
            return None
        return ShardedData(
            loader,
            num_shards=self._context.num_shards,
            own_shards=own_shards,
            seed=mix_seed(self._seed, 1),
        )

    def save(self, position: Position) -> None:
        """Store this rank's part of a checkpoint in the background."""
        self.checkpoints.settle()
        rank = self._core.distributed.rank
        parts = self._state.capture(self.loop, self._facts() if rank == 0 else {})
        if rank == 0:
            for callback in self._callbacks.values():
                callback.on_checkpoint_save_start(parts)
        metadata = {
            "steps_completed": position.batches,
            "num_shards": self._context.num_shards,
            "seed": self._seed,
        }
        self.checkpoints.save(parts, metadata, self._checkpoint_written, self._begin_part)

    def _begin_part(self, destination: Destination) -> Destination:
        """Store what must be stored while training stands still, and return where the rest goes."""
        return destination

    def _facts(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the state of the engine."""
        context = self._context
        return {
            "seed": self._seed,
            "num_shards": context.num_shards,
            "world_size": self._core.distributed.size,
            **self.best_validation.state(),
            "piece_end": self.piece_end,
            "built": context.built,
            "callbacks": {name: each.state_dict() for name, each in self._callbacks.items()},
            **trial_facts(self._trial, context),
        }

    # ---- small parts ---------------------------------------------------------------------

    def _checkpoint_written(self, path: Path) -> None:
        if self._core.distributed.rank:
            return
        for callback in self._callbacks.values():
            callback.on_checkpoint_end(str(path))
            callback.on_checkpoint_write_end(str(path))


def _tell_stored(callbacks: Collection[PyTorchCallback], uuid: str) -> None:
    for callback in callbacks:
        callback.on_checkpoint_upload_end(uuid)
