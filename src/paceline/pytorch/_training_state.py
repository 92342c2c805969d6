"""The state of a training: captured for a checkpoint, read, and put back.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, and facts added by the trainer) and ``rank_<r>``
(generators, open metric sums, accumulated gradients in the middle of a window, buffers).
``docs/checkpoints.md`` lists every key.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline._training.engine.checkpoints.models_and_optimizers import (
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
from paceline._training.engine.checkpoints.sharded_state import StateInPieces
from paceline._training.engine.checkpoints.state_files import (
    read_training,
    read_versioned_part,
)
from paceline._training.engine.checkpoints.stored_tensors import whole
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.schedules import Position
from paceline.pytorch._training_loop import TrainingLoop
from paceline.storage._checkpoint_files import STATE_VERSION

logger = logging.getLogger(__name__)


class CollectsMetrics(Protocol):
    """Interface of a collector of metrics over batches."""

    def storable_state(self) -> list[dict[str, Any] | None]:
        """Return the collected values as far as a checkpoint can hold them."""

    def load_state(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore the values returned by `storable_state`."""


class TrainingState:
    """State of a training on this rank: captured for checkpoints and restored.

    Args:
        stepper: The models and optimizers.
        schedulers: The schedulers of the optimizers.
        collected: The collectors of metrics over the batches.
        rank: This rank; the chief stores the shared part.
    """

    def __init__(
        self,
        stepper: Stepper,
        schedulers: Sequence[Any],
        collected: CollectsMetrics,
        rank: int,
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
            "position": loop.position._asdict(),
            "num_optimizer_steps": stepper.accumulation.num_steps,
            "optimizer_steps": [stepper.num_steps_of.get(id(o), 0) for o in stepper.optimizers],
            "last_validation": loop.last_validation,
            "num_models": len(models),
            "num_optimizers": len(optimizers),
            **({"has_gradients": gradients is not None} if stepper.is_sharded else {}),
            **({"tensor_parallel_size": tensor_size} if tensor_size > 1 else {}),
            **state,
            **epoch_sizes(loop.data.known_order(loop.position.epochs)),
            **({} if identity is None else {"data": identity}),
            **facts,
        }
        return parts

    def _own(self, objects: ModelsAndOptimizers, loop: TrainingLoop) -> dict[str, Any]:
        return {
            **objects.own_state(),
            "means": loop.means.state(),
            "reducers": self._collected.storable_state(),
            "stream": loop.data.stream_state(),
        }


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
