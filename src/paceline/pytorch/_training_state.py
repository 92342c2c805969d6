"""The state of a training: captured for a checkpoint, read, and put back.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, and facts added by the trainer) and ``rank_<r>``
(generators, open metric sums, accumulated gradients in the middle of a window, buffers).
``docs/checkpoints.md`` lists every key.
"""

import logging
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline._base.arguments_and_errors import mix_seed
from paceline._training.engine.checkpoints.checkpoint_saver import BestValidation, Destination
from paceline._training.engine.checkpoints.models_and_optimizers import (
    ModelsAndOptimizers,
    own_buffers,
    restore_generators,
    summed_gradients,
)
from paceline._training.engine.checkpoints.resume_differences import (
    SettingChanges,
    check_identity,
    epoch_sizes,
    note_epoch_sizes,
)
from paceline._training.engine.checkpoints.sharded_state import StateInPieces
from paceline._training.engine.checkpoints.state_files import read_training, read_versioned_part
from paceline._training.engine.checkpoints.stored_tensors import whole
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.metric_reducers import ReducerSet
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.profiling import TraceProfiler
from paceline._training.engine.rank_differences import check_same_data
from paceline._training.engine.schedules import Position, scheduler_state, share_schedulers
from paceline._training.engine.weighted_means import MAX_SKIPPED_STEPS
from paceline.data._order_and_random_generators import (
    capture_random_state,
    restore_random_state,
    seed_everything,
    worker_shards,
)
from paceline.data._sharded_loader import ShardedData
from paceline.data._torch_loaders import mover_to
from paceline.pytorch._loop_agreement_and_reports import LoopHooks, RankWish, TrainingCallbacks
from paceline.pytorch._memory_checkpoints import Buffers, SmallState, begin_memory
from paceline.pytorch._training_checkpoints import EarlierState
from paceline.pytorch._training_fit import TrainingFit
from paceline.pytorch._training_loop import DrivenLoop, TrainingLoop
from paceline.storage._checkpoint_files import STATE_VERSION

if TYPE_CHECKING:
    from paceline.pytorch._trial_and_context import PyTorchTrialContext

logger = logging.getLogger(__name__)


class TrainingState:
    """State of a training on this rank: captured for checkpoints and restored.

    Args:
        stepper: The models and optimizers.
        schedulers: The schedulers of the optimizers.
        collected: The collectors of metrics over the batches.
        rank: This rank; the chief stores the shared part.
    """

    def __init__(
        self, stepper: Stepper, schedulers: Sequence[Any], collected: ReducerSet, rank: int
    ) -> None:
        self._stepper = stepper
        self._schedulers = schedulers
        self._collected = collected
        self._rank = rank

    def capture(self, loop: TrainingLoop, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a checkpoint to be stored by this rank.

        Args:
            loop: The loop.
            facts: The chief's additions to "training".
        """
        is_divided, objects = self._stepper.is_divided, self._objects()
        shared = self._shared(objects, loop, facts) if self._rank == 0 or is_divided else {}
        own: Any = self._own(objects, loop)
        if self._rank and is_divided:
            shared = {
                name: StateInPieces(part, name, is_whole=False) for name, part in shared.items()
            }
            # Own parts of a tensor-parallel group: pieces of the same tensors, under one name.
            first = self._stepper.grid.first_rank
            own = StateInPieces(own, f"rank_{first}", first)
        return {**shared, f"rank_{self._rank}": own}

    def restore_shared(
        self, parts: Mapping[str, Any], loop: TrainingLoop, changes: SettingChanges
    ) -> None:
        """Restore the state shared by all ranks, with changed settings applied.

        Raises:
            CheckpointMismatchError: Numbers, names, shapes or types differ, or an epoch was begun
                that the present data do not have; the message says which.
        """
        training, stepper = parts["training"], self._stepper
        check_identity(
            training.get("data"),
            loop.data.identity,
            is_within_epoch=loop.position.batch_in_epoch > 0,
            warn=changes.warn,
        )
        epoch = loop.position.epochs
        is_begun = loop.position.batch_in_epoch > 0
        order = loop.data.order(epoch) if is_begun else loop.data.known_order(epoch)
        note_epoch_sizes(changes, training, loop.position, order)
        in_files = {"models": models_in(parts), "optimizers": _numbered(parts, "optimizer")}
        self._objects().load_shared_state({**training, **in_files}, changes)
        stepper.accumulation.num_steps = training["num_optimizer_steps"]
        num_steps = training["optimizer_steps"]
        for optimizer, number in zip(stepper.optimizers, num_steps, strict=False):
            stepper.num_steps_of[id(optimizer)] = number
        loop.last_validation = training["last_validation"]

    def restore_own(
        self, parts: Mapping[str, Any], loop: TrainingLoop, *, is_same_size: bool
    ) -> None:
        """Restore this rank's own state.

        The generators come last, as all else may draw from them.
        """
        own = parts["rank"]
        loop.data.load_stream_state(own["stream"])
        if loop.position.batch_in_epoch:
            loop.open_epoch()
        if is_same_size:
            loop.means.load_state(own["means"], self._stepper.device)
            self._collected.load_state(own["reducers"])
        elif not own["means"]["is_empty"] and self._stepper.grid.rank == 0:
            logger.warning(
                "Another number of ranks goes on from the checkpoint: the metrics since the last"
                " report before it are left out of the next one."
            )
        sharded = parts.get("gradients", {}).get("gradients")
        self._objects().load_own_state({**own, "sharded_gradients": sharded})
        self.restore_generators(parts, loop.position.batches)

    def restore_generators(self, parts: Mapping[str, Any], num_batches: int) -> None:
        """Restore the generators; a rank without stored state gets newly seeded generators."""
        random, seed = parts["rank"]["random"], parts["training"]["seed"]
        # The ranks of a tensor-parallel group draw the same numbers.
        rank = self._stepper.grid.data_rank
        restore_generators(random, seed=seed, num_steps=num_batches, rank=rank)

    def _objects(self) -> ModelsAndOptimizers:
        stepper = self._stepper
        return ModelsAndOptimizers(
            rank=self._rank,
            data_rank=stepper.grid.data_rank,
            has_sums=stepper.is_sharded,
            models=[plain_model(model) for model in stepper.models],
            optimizers=stepper.optimizers,
            schedulers=self._schedulers,
            scaler=stepper.scaler,
            parameters=stepper.parameters(),
            bases=stepper.bases,
        )

    def _shared(
        self, objects: ModelsAndOptimizers, loop: TrainingLoop, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        stepper, state = self._stepper, objects.shared_state()
        models, optimizers = state.pop("models"), state.pop("optimizers")
        gradients, tensor_size = state.pop("sharded_gradients"), stepper.grid.tensor_size
        parts: dict[str, Any] = {f"model_{index}": each for index, each in enumerate(models)}
        parts |= {f"optimizer_{index}": each for index, each in enumerate(optimizers)}
        if gradients is not None:
            parts["gradients"] = {"gradients": gradients}
        identity = loop.data.identity
        parts["training"] = {
            "version": STATE_VERSION,
            "paceline": _own_version(),
            "torch": str(torch.__version__),
            "num_models": len(models),
            "num_optimizers": len(optimizers),
            **({"has_gradients": gradients is not None} if stepper.is_sharded else {}),
            **({"tensor_parallel_size": tensor_size} if tensor_size > 1 else {}),
            **state,
            **self.counts(loop),
            **epoch_sizes(loop.data.known_order(loop.position.epochs)),
            **({} if identity is None else {"data": identity}),
            **facts,
        }
        return parts

    def _own(self, objects: ModelsAndOptimizers, loop: TrainingLoop) -> dict[str, Any]:
        return {**objects.own_state(), **self.own_of_loop(loop)}

    def counts(self, loop: TrainingLoop) -> dict[str, Any]:
        """Return what each batch changes of the state shared by all ranks, besides tensors."""
        stepper = self._stepper
        return {
            "position": loop.position._asdict(),
            "num_optimizer_steps": stepper.accumulation.num_steps,
            "optimizer_steps": [stepper.num_steps_of.get(id(o), 0) for o in stepper.optimizers],
            "last_validation": loop.last_validation,
            "schedulers": [scheduler_state(scheduler) for scheduler in self._schedulers],
            "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
        }

    def own_of_loop(self, loop: TrainingLoop) -> dict[str, Any]:
        """Return what belongs to this rank alone, besides generators and tensors."""
        return {
            "means": loop.means.state(),
            "reducers": self._collected.storable_state(),
            "stream": loop.data.stream_state(),
        }

    def whole(self, loop: TrainingLoop, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts that all ranks share, from any rank whose models are not divided."""
        return self._shared(self._objects(), loop, facts)


def read_state(
    path: Path, rank: int, world_size: int, *, is_sharded: bool = False, tensor_size: int = 1
) -> dict[str, Any]:
    """Return all parts of a stored state; this rank's own part is under "rank".

    Args:
        path: The checkpoint's directory.
        rank: This rank.
        world_size: The number of ranks that resume from it.
        is_sharded: Whether their models are sharded.
        tensor_size: The ranks of a tensor-parallel group.

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or of an unknown version.
        CheckpointCorruptError: A file cannot be read.
    """
    training = read_training(path)
    is_same_size = has_same_size(training, world_size, tensor_size)
    stored_size, data_rank = training.get("tensor_parallel_size", 1), rank // tensor_size
    if stored_size != tensor_size:
        # The ranks of a group know the same, however many they are.
        rank = data_rank * stored_size
    own = read_versioned_part(path, f"rank_{rank if is_same_size else 0}", training)
    sums: list[torch.Tensor | None] | None = None
    if not is_same_size:
        # States of generators do not fit another number of ranks: new ones are seeded.
        own["random"] = None
    if not is_same_size or (is_sharded and "has_gradients" not in training):
        # The chief stands for all ranks, unless each takes its part of the sum.
        takes_sum = data_rank == 0 or is_sharded
        stored = range(0, training["world_size"], stored_size) if takes_sum else ()
        by_rank = (
            whole(read_versioned_part(path, f"rank_{each}", training)["gradients"])
            for each in stored
        )
        own["gradients"], sums = None, summed_gradients(by_rank)
    parts = {"training": training, "rank": own}
    for index in range(training["num_models"]):
        parts[f"model_{index}"] = read_versioned_part(path, f"model_{index}", training)
    for index in range(training["num_optimizers"]):
        parts[f"optimizer_{index}"] = read_versioned_part(path, f"optimizer_{index}", training)
    if training.get("has_gradients"):
        parts["gradients"] = read_versioned_part(path, "gradients", training)
    if sums is not None:
        # A parameter has gradients of one of the two kinds.
        sharded = parts.get("gradients", {}).get("gradients", [None] * len(sums))
        merged = [one if other is None else other for one, other in zip(sums, sharded, strict=True)]
        parts["gradients"] = {"gradients": merged}
    return parts


def has_same_size(training: Mapping[str, Any], world_size: int, tensor_size: int) -> bool:
    """Tell whether as many ranks had other samples each as in this training.

    Args:
        training: The part "training" of a stored state.
        world_size: The number of ranks now.
        tensor_size: The ranks of a tensor-parallel group now.
    """
    stored_size: int = training["world_size"] // training.get("tensor_parallel_size", 1)
    return stored_size == world_size // tensor_size


def models_in(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the models of a stored state."""
    return _numbered(parts, "model")


def position_of(parts: dict[str, Any]) -> Position:
    """Return the position of a stored state."""
    return Position(**parts["training"]["position"])


def _numbered(parts: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [parts[f"{name}_{index}"] for index in range(parts["training"][f"num_{name}s"])]


@cache
def _own_version() -> str:
    # Looking it up takes a millisecond, for which training would stand still each time.
    return version("paceline")


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
        """Return the parts of a checkpoint that this rank stores."""
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
