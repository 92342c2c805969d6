"""State of a training in a checkpoint: captured, read from an earlier run, and restored.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, and facts added by the trainer) and ``rank_<r>``
(generators, open metric sums, accumulated gradients in the middle of a window, buffers).
``docs/checkpoints.md`` lists every key.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import core
from paceline._base.run_directory import RunDirectory
from paceline._training.engine.checkpoints.capture_and_restore import (
    ModelsAndOptimizers,
    restore_generators,
    summed_gradients,
)
from paceline._training.engine.checkpoints.resume_differences import (
    SettingChanges,
    check_identity,
    epoch_sizes,
    note_epoch_sizes,
)
from paceline._training.engine.checkpoints.state_format import (
    StateInPieces,
    read_training,
    read_versioned_part,
)
from paceline._training.engine.checkpoints.tensor_reader import whole
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.lr_schedulers import scheduler_state
from paceline._training.engine.metric_reducers import ReducerSet
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.schedules import Position
from paceline.core._read_runs import newest_run_named, restorable_checkpoint
from paceline.pytorch._training_loop import TrainingLoop
from paceline.storage._checkpoint_errors import STATE_VERSION
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._storage_from_url import checkpoint_at

logger = logging.getLogger(__name__)


_FINISHED = (core.RunState.COMPLETED, core.RunState.RUNNING)


class EarlierState(NamedTuple):
    """Checkpoint to begin from, with its storage; None means the run's own storage."""

    uuid: str
    storage: CheckpointStorage | None = None


def state_at(place: str) -> EarlierState:
    """Return the state named by a checkpoint's UUID in the run, or by a path or URL."""
    if "/" not in place:
        return EarlierState(place)
    storage, uuid = checkpoint_at(place)
    return EarlierState(uuid, storage)


def earlier_state(
    core_context: core.Context, resume: str | os.PathLike[str]
) -> EarlierState | None:
    """Return the newest state of an earlier run, the same on every rank.

    Args:
        core_context: The context of the new run.
        resume: "auto" for the newest run of the same name, unless it is completed; a run directory;
            or the URL of a checkpoint.

    Returns:
        None if there is no such run or it has no checkpoint.

    Raises:
        NotARunDirectoryError: The directory is none.
        CheckpointCorruptError: All its checkpoints are damaged.
    """
    if isinstance(resume, str) and "://" in resume:
        return state_at(resume)
    path, state = None, None
    if core_context.distributed.rank == 0:
        path = _newest(core_context) if resume == "auto" else Path(resume)
        if path is not None:
            storage, uuid = restorable_checkpoint(path)
            state = EarlierState(uuid, storage) if uuid is not None else None
    path, state = core_context.distributed.broadcast((path, state))
    if state is None:
        logger.info("There is no state of an earlier run to begin with.")
    else:
        logger.info("Beginning with the state of %s.", path)
    return state


def asked_state(
    core_context: core.Context, latest_checkpoint: str | None, resume: str | os.PathLike[str] | None
) -> EarlierState | None:
    """Return the state requested by the user, or None for the run's own latest state.

    Args:
        core_context: The context of the run.
        latest_checkpoint: A checkpoint of the run, or the path or URL of one.
        resume: See `earlier_state`; it is for a new run without a master.
    """
    if latest_checkpoint is not None:
        return state_at(latest_checkpoint)
    is_new = core_context.latest_checkpoint is None and core_context.info is None
    return earlier_state(core_context, resume) if resume is not None and is_new else None


def _newest(core_context: core.Context) -> Path | None:
    own = RunDirectory(core_context.run_dir).read_info()
    run = newest_run_named(core_context.run_dir.parent, own.name, before=own)
    if run is None or core.summarize_run(run.path).state in _FINISHED:
        return None
    return run.path


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
        """Return the state of this rank alone, besides generators and tensors."""
        return {
            "means": loop.means.state(),
            "reducers": self._collected.storable_state(),
            "stream": loop.data.stream_state(),
        }

    def whole(self, loop: TrainingLoop, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts shared by all ranks, from any rank with undivided models."""
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
