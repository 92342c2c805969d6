"""Training that resumes: data, loop, callbacks and checkpoints of registered parts."""

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline._base.arguments_and_errors import mix_seed
from paceline._training.engine.checkpoints.capture_and_restore import own_buffers
from paceline._training.engine.checkpoints.checkpoint_saver import BestValidation, Destination
from paceline._training.engine.checkpoints.resume_differences import SettingChanges
from paceline._training.engine.lr_schedulers import share_schedulers
from paceline._training.engine.profiling import TraceProfiler
from paceline._training.engine.rank_differences import check_same_data
from paceline._training.engine.schedules import Position
from paceline._training.engine.weighted_means import MAX_SKIPPED_STEPS
from paceline.data._order_and_random_generators import (
    capture_random_state,
    restore_random_state,
    seed_everything,
    worker_shards,
)
from paceline.data._sharded_loader import ShardedData
from paceline.data._torch_loaders import mover_to
from paceline.pytorch._loop_agreement import LoopHooks, RankWish
from paceline.pytorch._memory_checkpoints import Buffers, SmallState, begin_memory
from paceline.pytorch._training_callbacks import TrainingCallbacks
from paceline.pytorch._training_fit import TrainingFit
from paceline.pytorch._training_loop import DrivenLoop
from paceline.pytorch._training_state import (
    EarlierState,
    TrainingState,
    has_same_size,
    position_of,
    read_state,
)

if TYPE_CHECKING:
    from paceline.pytorch._trial_and_context import PyTorchTrialContext

logger = logging.getLogger(__name__)


# Hooks that are called with the directory in which the files of a checkpoint are.
_HOOKS_WITH_FILES = ("on_checkpoint_end", "on_checkpoint_write_end")


class ResumableTraining(TrainingFit, LoopHooks):
    """The data, loop, callbacks and checkpoints of registered parts.

    Subclasses train on a shard and evaluate data; they name the further parts of a checkpoint.

    Args:
        parts: The registered parts.
        callbacks: The callbacks.

    Attributes:
        is_built: Whether the data and the loop were built.
        validates_batches: Whether validation goes by batches, so that its data is divided among the
            ranks.
    """

    # Type of the captured state: back ends with states of their own override the attribute.
    state_type = TrainingState
    needs_whole_batches = False

    def __init__(
        self, parts: "PyTorchTrialContext", callbacks: TrainingCallbacks, *, validates_batches: bool
    ) -> None:
        super().__init__(parts.core, partial(callbacks.tell, "on_checkpoint_upload_end"))
        self.is_built = False
        self.validates_batches = validates_batches
        self.has_schedulers = False
        self.to_device: Callable[[Any], Any] = lambda data: data
        if parts.moves_data:
            self.to_device = mover_to(parts.device, parts.warned_types)
        self._parts = parts
        self._callbacks = callbacks
        self._keeps_batches = callbacks.overrides("on_training_workload_end")
        self._batch_metrics: list[dict[str, Any]] = []

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models being trained."""
        return self._parts.stepper.models

    @property
    def tracer(self) -> TraceProfiler | None:
        """The profiler for traces, or None."""
        return self._parts.tracer

    # ---- parts of a subclass -------------------------------------------------------------

    @abstractmethod
    def make_loaders(self) -> tuple[Any, Any]:
        """Return a new loader of the training data and a new loader of the validation data."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the chief's additional entries of a checkpoint."""

    @abstractmethod
    def changed_facts(self, training: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
        """Return the names of changed facts, with their values in a checkpoint and now.

        Args:
            training: The checkpoint's state that all ranks share.

        Raises:
            CheckpointMismatchError: One was changed that must stay.
        """

    @abstractmethod
    def run_validation(
        self, data: ShardedData | None, loader: Any, limit: int | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the metrics of validation data, and this rank's metrics of each batch.

        Args:
            data: The data in shards, if it is divided among the ranks.
            loader: The loader of the data.
            limit: At most so many batches of this rank; None for all.
        """

    # ---- building and restoring ----------------------------------------------------------

    def open(self, state: EarlierState | None = None) -> None:
        """Build the data and the loop at first, or anew from a stored state.

        Args:
            state: The state; by default the newest one of the run, if it has one.
        """
        if self.is_built and state is None:
            self._reenter()
            return
        self.close()
        # Later the chief alone knows of new ones.
        latest = self._core.distributed.broadcast(self._core.latest_checkpoint)
        if state is None and latest is not None:
            state = EarlierState(latest)
        self._build(state)
        self.is_built = True

    def _build(self, state: EarlierState | None) -> None:
        parts = self._parts
        stored = None if state is None else self._read(state)
        uuid = None if state is None else state.uuid
        self.checkpoints.latest = uuid or ""
        self.checkpoints.begin_series()
        position = Position() if stored is None else position_of(stored)
        # Settings as built are cached here, before training changes them.
        parts.built  # noqa: B018
        self._callbacks.start(position.batches, uuid)
        seed = self._seed = parts.get_trial_seed() if stored is None else stored["training"]["seed"]
        stepper, grid = parts.stepper, parts.stepper.grid
        data = self._build_data()
        self.has_schedulers = bool(parts.lr_schedulers)
        self.loop = parts.loop = DrivenLoop(self._core, self, data, stepper, position)
        if uuid is not None and self._core.checkpoint.is_in_memory(uuid):
            # The state must still be stored, for example if training is preempted here.
            self.loop.last_checkpoint = None
        self.loop.means.max_in_a_row = 1 if stepper.scaler is None else MAX_SKIPPED_STEPS
        schedulers = [entry.scheduler for entry in parts.lr_schedulers]
        self._state = self.state_type(
            stepper, schedulers, parts.reducers, self._core.distributed.rank
        )
        if stored is not None:
            self._restore(stored)
        elif grid.data_rank:
            # Models are alike by now; from here on ranks with other samples draw other numbers.
            seed_everything(seed, grid.data_rank)
        parts.num_epoch_batches = self.loop.num_epoch_batches(position.epochs)
        self._callbacks.tell("on_training_start")
        if stored is not None and stored["rank"]["random"] is not None:
            # Generators restored again: their stored state already includes the hooks' draws.
            restore_random_state(stored["rank"]["random"])

    def _build_data(self) -> ShardedData:
        """Make the data of training and of validation, and return the former."""
        parts, grid = self._parts, self._parts.stepper.grid
        own = worker_shards(parts.num_shards, grid.data_rank, grid.data_size)
        if not own:
            logger.warning(
                "Rank %d idles: a global batch has %d shard(s) for %d ranks.",
                self._core.distributed.rank,
                parts.num_shards,
                grid.data_size,
            )
        loader, self._validation_loader = self.make_loaders()
        self._check_same_data({"training": loader, "validation": self._validation_loader})
        data = ShardedData(
            loader,
            num_shards=parts.num_shards,
            own_shards=own,
            seed=self._seed,
            joins_shards=parts.stepper.is_divided,
            drops_rest=self.needs_whole_batches,
        )
        self._validation_data = self._data_to_validate(self._validation_loader, own)
        return data

    def _check_same_data(self, loaders: Mapping[str, Any]) -> None:
        check = self._parts.stepper.rank_check
        if check.compares_data:
            check_same_data(self._core.distributed, loaders, can_be_off=check.is_on)

    def _read(self, state: EarlierState) -> dict[str, Any]:
        storage = state.storage or self._core.checkpoint
        with storage.restore_path(state.uuid) as path:
            stored = self._read_files(Path(path))
        self._parts.num_shards = stored["training"]["num_shards"]
        return stored

    def _read_files(self, path: Path) -> dict[str, Any]:
        stepper, distributed = self._parts.stepper, self._core.distributed
        return read_state(
            path,
            distributed.rank,
            distributed.size,
            is_sharded=stepper.is_sharded,
            tensor_size=stepper.grid.tensor_size,
        )

    def _restore(self, stored: dict[str, Any]) -> None:
        parts, size = self._parts, self._core.distributed.size
        self._callbacks.tell("on_checkpoint_load_start", stored)
        training = stored["training"]
        changed = self.changed_facts(training)
        changes = SettingChanges(training["built"], parts.built)
        for name, then, now in changed:
            changes.note(name, then, now)
        self._state.restore_shared(stored, self.loop, changes)
        self._callbacks.load_state(training["callbacks"], changes.warn)
        if self._core.distributed.rank == 0:
            changes.tell()
        self.best_validation = BestValidation.of_state(training)
        self.piece_end = training.get("piece_end")
        for entry in parts.lr_schedulers:
            optimizer = entry.scheduler.optimizer
            entry.go_on(parts.stepper.num_steps_of.get(id(optimizer), 0))
        is_same_size = has_same_size(training, size, parts.stepper.grid.tensor_size)
        self._state.restore_own(stored, self.loop, is_same_size=is_same_size)

    def _reenter(self) -> None:
        """Call the startup hooks again when training resumes after `close`."""
        if not self._callbacks.has_started:
            self._callbacks.start(self.loop.position.batches, None)
            self._callbacks.tell("on_training_start")

    def close(self) -> None:
        """Wait for the checkpoint being stored, and run the shutdown hooks."""
        with self._callbacks.stop():
            error = sys.exc_info()[1]
            self.checkpoints.finish(error)
            if error is None and self._parts.loop is not None:
                self._parts.loop.end()

    # ---- for the loop --------------------------------------------------------------------

    def after_batch(self, position: Position) -> None:
        """Step the schedulers counted in batches or optimizer steps."""
        num_steps_of = self._parts.stepper.num_steps_of
        self._share_manual_schedulers()
        for entry in self._parts.lr_schedulers:
            entry.after_batch(position, num_steps_of.get(id(entry.scheduler.optimizer), 0))

    def _share_manual_schedulers(self) -> None:
        """Have ranks without samples of a batch keep up with schedulers that its code steps."""
        accumulation = self._parts.stepper.accumulation
        manual = [e.scheduler for e in self._parts.lr_schedulers if e.is_manual()]
        if manual and self.leaves_out_ranks():
            share_schedulers(manual, self._core.distributed, is_idle=accumulation.is_idle)

    def leaves_out_ranks(self) -> bool:
        """Tell whether some rank has no samples of the present batch, but of others."""
        parts = self._parts
        has_others = parts.num_shards >= parts.stepper.grid.data_size
        return has_others and not parts.stepper.accumulation.is_even

    def epoch_started(self, epoch: int) -> None:
        """Call the callbacks."""
        self._parts.num_epoch_batches = self.loop.num_epoch_batches(epoch)
        self._callbacks.tell("on_training_epoch_start", epoch)

    def epoch_ended(self, epoch: int) -> None:
        """Step the schedulers counted in epochs, and call the callbacks."""
        for entry in self._parts.lr_schedulers:
            entry.after_epoch(epoch)
        self._callbacks.tell("on_training_epoch_end", epoch)

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report training metrics and progress."""
        reducers = self._parts.reducers
        reported: dict[str, Any] = {
            **metrics,
            **reducers.reduce(self._core.distributed, for_training=True),
        }
        reducers.reset()
        self._report_training(position, reported)
        batches, self._batch_metrics = self._batch_metrics, []
        self._callbacks.tell("on_training_workload_end", reported, batches)

    def validate(self, position: Position) -> bool:
        """Validate, report, and return whether the result deserves a checkpoint."""
        self.progress.update(position)
        self.progress.note("validating")
        with self.evaluating(self._parts.reducers):
            metrics = self._validate()
        return self._report_validation(position, metrics)

    def _validate(self) -> dict[str, Any]:
        callbacks = self._callbacks
        callbacks.tell("on_validation_start")
        if self.validates_batches:
            callbacks.tell("on_validation_epoch_start")
        metrics, outputs = self.run_validation(
            self._validation_data, self._validation_loader, self.validation_limit
        )
        if self.validates_batches:
            callbacks.tell("on_validation_epoch_end", outputs)
        callbacks.tell("on_validation_end", metrics)
        return metrics

    def evaluate(self, loader: Any) -> dict[str, Any]:
        """Return metrics of other data than the validation data.

        Raises:
            ValueError: Ranks that share them have other ones.
        """
        if self.validates_batches:
            self._check_same_data({"evaluated": loader})
        with self.evaluating(self._parts.reducers):
            data = self._data_to_validate(loader, self.loop.data.own_shards)
            return self.run_validation(data, loader, None)[0]

    def _data_to_validate(self, loader: Any, own_shards: range) -> ShardedData | None:
        """Return a loader's data in shards, or None for evaluation as a whole."""
        if not self.validates_batches:
            return None
        return ShardedData(
            loader,
            num_shards=self._parts.num_shards,
            own_shards=own_shards,
            seed=mix_seed(self._seed, 1),
        )

    def save(self) -> None:
        """Capture the state and store it in the background, unless this position is saved."""
        if self.loop.last_checkpoint == self.loop.position:
            return
        with self.loop.saving():
            self.checkpoints.settle()
            parts = self._captured()
            reads_files = any(map(self._callbacks.overrides, _HOOKS_WITH_FILES))
            self.checkpoints.save(
                parts, self._begin_part(), self._checkpoint_written, reads_files=reads_files
            )

    def keep_in_memory(self, every: float | None) -> None:
        """Save states to memory between checkpoints; see `MemoryCheckpoints`."""
        self.checkpoints.memory = memory = begin_memory(self._core, every)
        self.loop.boundaries = None
        if memory is not None:
            hooks = ("on_checkpoint_save_start", *_HOOKS_WITH_FILES)
            has_hooks = any(map(self._callbacks.overrides, hooks))
            memory.note_boundaries(self._parts.stepper, self, has_hooks=has_hooks)
            self.loop.boundaries = memory.boundaries

    def small_state(self, buffers: Buffers) -> SmallState:
        """Return what is small of this rank's state; it may refer to what changes later.

        Raises:
            OSError: Reports before this state would be lost with this process.
        """
        if not self._core.checkpoint.are_reports_written():
            raise OSError("reports wait for space on the disk of the run")
        loop, optimizers = self.loop, self._parts.stepper.optimizers
        own = {"random": capture_random_state(), "gradients": None, **self._state.own_of_loop(loop)}
        training = {**self._state.counts(loop), **self._validation_facts()}
        if self._core.distributed.rank == 0:
            training["callbacks"] = self._callbacks.state()
        groups = [
            [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
            for each in optimizers
        ]
        return SmallState(own, training, groups, buffers)

    def captured_at(self, by_rank: Sequence[SmallState]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a checkpoint's parts and metadata: own weights, and small states of all ranks.

        Raises:
            ValueError: An optimizer has other parameter groups now.
        """
        loop, mine, chief = self.loop, by_rank[self._core.distributed.rank], by_rank[0]
        present, loop.position = loop.position, position_of({"training": mine.training})
        try:
            parts, metadata = self._state.whole(loop, self._all_facts()), self._metadata()
        finally:
            loop.position = present
        parts["training"] |= mine.training | {"callbacks": chief.training["callbacks"]}
        for index, groups in enumerate(mine.groups):
            for group, then in zip(
                parts[f"optimizer_{index}"]["param_groups"], groups, strict=True
            ):
                group.update(then)
        for index, buffers in enumerate(chief.buffers):
            model = parts[f"model_{index}"]
            model.update({name: each for name, each in buffers.items() if name in model})
        for rank, state in enumerate(by_rank):
            names = (own_buffers(model, is_chief=rank == 0) for model in self._parts.models)
            pairs = zip(names, state.buffers, strict=True)
            own = [{name: buffers[name] for name in each} for each, buffers in pairs]
            parts[f"rank_{rank}"] = {**state.own, "buffers": own}
        return parts, metadata

    def serve_memory(self, wish: RankWish) -> None:
        """Save the state to memory unless this position is stored, or give the memory up."""
        memory = self.checkpoints.memory
        assert memory is not None
        if wish is RankWish.DROP:
            memory.drop()
            self.checkpoints.memory = None
        elif self.loop.last_checkpoint != self.loop.position:
            with memory.paced(), self.loop.saving(in_memory=True):
                memory.save(self._captured(), self._metadata(), self._checkpoint_written)

    def _captured(self) -> dict[str, Any]:
        """Return the parts of a checkpoint stored by this rank."""
        is_chief = self._core.distributed.rank == 0
        parts = self._state.capture(self.loop, self._all_facts() if is_chief else {})
        if is_chief:
            self._callbacks.tell("on_checkpoint_save_start", parts)
        return parts

    def _begin_part(self) -> Destination:
        """Begin this rank's part of a checkpoint; return where the captured state goes."""
        return self.checkpoints.begin_next(self._metadata())

    def _metadata(self) -> dict[str, Any]:
        return {
            "steps_completed": self.loop.position.batches,
            "num_shards": self._parts.num_shards,
            "seed": self._seed,
        }

    def _validation_facts(self) -> dict[str, Any]:
        return {**self.best_validation.state(), "piece_end": self.piece_end}

    def _all_facts(self) -> dict[str, Any]:
        """Return all entries of a checkpoint besides the registered parts' state."""
        return {
            "seed": self._seed,
            "num_shards": self._parts.num_shards,
            "world_size": self._core.distributed.size,
            **self._validation_facts(),
            "built": self._parts.built,
            "callbacks": self._callbacks.state(),
            **self.facts(),
        }

    def _checkpoint_written(self, path: Path) -> None:
        if self._core.distributed.rank == 0:
            for hook in _HOOKS_WITH_FILES:
                self._callbacks.tell(hook, str(path))
