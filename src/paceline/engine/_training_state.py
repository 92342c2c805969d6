"""The state of a training: captured for a checkpoint, read, and put back.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, and facts that whoever trains adds) and ``rank_<r>``
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

from paceline.engine._epoch_sizes import epoch_sizes, note_epoch_sizes
from paceline.engine._loop import TrainingLoop
from paceline.engine._overlap import plain_model
from paceline.engine._randomness import capture_random_state
from paceline.engine._rank_state import (
    load_buffers,
    load_gradients,
    own_buffers,
    restore_generators,
    summed_gradients,
)
from paceline.engine._schedulers import scheduler_state
from paceline.engine._settings import SettingChanges
from paceline.engine._stepper import Stepper
from paceline.engine._stored_state import (
    STATE_VERSION,
    CheckpointMismatchError,
    read_part,
    read_training,
    read_weights,
)
from paceline.engine._units import Position

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5


class CollectsMetrics(Protocol):
    """What collects metrics of its own over the batches."""

    def storable_state(self) -> list[dict[str, Any] | None]:
        """Return what was collected, as far as a checkpoint can hold it."""

    def load_state(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Take up what `storable_state` returned."""


class TrainingState:
    """The state of one training on this rank.

    Args:
        stepper: The models and optimizers.
        schedulers: The schedulers of the optimizers.
        collected: What collects metrics over the batches.
        rank: This rank; the chief stores what all share.
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
        """Return the parts of a checkpoint that this rank stores.

        Args:
            loop: The loop.
            facts: What the chief adds to "training".
        """
        parts = self._shared(loop, facts) if self._rank == 0 else {}
        return {**parts, f"rank_{self._rank}": self._own(loop)}

    def restore_shared(
        self, parts: Mapping[str, Any], loop: TrainingLoop, changes: SettingChanges
    ) -> None:
        """Put back what all ranks share, with changes of settings.

        Raises:
            CheckpointMismatchError: Numbers, names, shapes or types differ, or an epoch was begun
                that the present data do not have; the message says which.
        """
        training = parts["training"]
        note_epoch_sizes(changes, training, loop.position, loop.data.order(loop.position.epochs))
        stepper, schedulers = self._stepper, self._schedulers
        _check_number("optimizer", training["num_optimizers"], len(stepper.optimizers))
        _check_number("scheduler", len(training["schedulers"]), len(schedulers))
        _check_types("optimizer", training.get("optimizer_types"), stepper.optimizers)
        _check_types("scheduler", training.get("scheduler_types"), schedulers)
        models = self._models()
        restore_models(parts, models)
        for model, frozen in zip(models, training.get("frozen", ()), strict=False):
            _freeze(model, frozen)
        for index, optimizer in enumerate(stepper.optimizers):
            _load_optimizer(optimizer, parts[f"optimizer_{index}"], index, changes)
        for index, (scheduler, state) in enumerate(
            zip(schedulers, training["schedulers"], strict=True)
        ):
            changes.load_scheduler(scheduler, state, index)
        _restore_scaler(stepper.scaler, training["scaler"])
        stepper.accumulation.num_steps = training["num_optimizer_steps"]
        num_steps = training.get("optimizer_steps", ())
        for optimizer, number in zip(stepper.optimizers, num_steps, strict=False):
            stepper.num_steps_of[id(optimizer)] = number
        loop.last_validation = training["last_validation"]

    def restore_own(
        self, parts: Mapping[str, Any], loop: TrainingLoop, *, is_same_size: bool
    ) -> None:
        """Put back what this rank alone knew.

        The generators come last, as all else may draw from them.
        """
        own = parts["rank"]
        loop.data.load_stream_state(own.get("stream"))
        if loop.position.batch_in_epoch:
            loop.open_epoch()
        if is_same_size:
            loop.means.load_state(own["means"], self._stepper.device)
            if "reducers" in own:
                self._collected.load_state(own["reducers"])
        elif not own["means"].get("is_empty", True):
            logger.warning(
                "Another number of ranks goes on from the checkpoint: the metrics since the last"
                " report before it are left out of the next one."
            )
        for model, buffers in zip(self._models(), own["buffers"] or (), strict=False):
            load_buffers(model, buffers)
        if _gradients(own) is not None:
            load_gradients(self._stepper.parameters(), _gradients(own))
        self.restore_generators(parts, loop.position.batches)

    def restore_generators(self, parts: Mapping[str, Any], num_batches: int) -> None:
        """Put back the generators; a rank that was not there draws numbers of its own."""
        random, seed = parts["rank"]["random"], parts["training"]["seed"]
        restore_generators(random, seed=seed, num_steps=num_batches, rank=self._rank)

    def _models(self) -> list[torch.nn.Module]:
        return [plain_model(model) for model in self._stepper.models]

    def _shared(self, loop: TrainingLoop, facts: Mapping[str, Any]) -> dict[str, Any]:
        stepper, models = self._stepper, self._models()
        optimizers = stepper.optimizers
        parts: dict[str, Any] = {}
        for index, model in enumerate(models):
            parts[f"model_{index}"] = dict(model.state_dict())
        for index, optimizer in enumerate(optimizers):
            parts[f"optimizer_{index}"] = optimizer.state_dict()
        parts["training"] = {
            "version": STATE_VERSION,
            "paceline": _own_version(),
            "torch": str(torch.__version__),
            "position": loop.position._asdict(),
            "num_optimizer_steps": stepper.accumulation.num_steps,
            "optimizer_steps": [stepper.num_steps_of.get(id(each), 0) for each in optimizers],
            "last_validation": loop.last_validation,
            "num_models": len(models),
            "frozen": [_frozen(model) for model in models],
            "num_optimizers": len(optimizers),
            "optimizer_types": [type(optimizer).__name__ for optimizer in optimizers],
            "schedulers": [scheduler_state(scheduler) for scheduler in self._schedulers],
            "scheduler_types": [type(scheduler).__name__ for scheduler in self._schedulers],
            "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
            **epoch_sizes(loop.data.order(loop.position.epochs)),
            **facts,
        }
        return parts

    def _own(self, loop: TrainingLoop) -> dict[str, Any]:
        state: dict[str, Any] = {
            "random": capture_random_state(),
            "means": loop.means.state(),
            "reducers": self._collected.storable_state(),
            "stream": loop.data.stream_state(),
            "gradients": None,
            "buffers": [own_buffers(each, is_chief=self._rank == 0) for each in self._models()],
        }
        # In the middle of a window, and wherever a trial leaves some for a later batch.
        parameters = self._stepper.parameters()
        if any(parameter.grad is not None for parameter in parameters):
            state["gradients"] = [parameter.grad for parameter in parameters]
        return state


def read_state(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Return all parts of a stored state, with what this rank takes up for itself as "rank".

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or a newer one.
        CheckpointCorruptError: A file cannot be read.
    """
    training = read_training(path)
    if training["world_size"] == world_size:
        own = read_part(path, f"rank_{rank}", training)
    else:
        own = read_part(path, "rank_0", training)
        stored = range(training["world_size"]) if rank == 0 else ()
        by_rank = (_gradients(read_part(path, f"rank_{each}", training)) for each in stored)
        own |= {"random": None, "gradients": summed_gradients(by_rank)}
    parts = {"training": training, "rank": own}
    for index in range(training["num_models"]):
        parts[f"model_{index}"] = read_weights(path, training, index)
    for index in range(training["num_optimizers"]):
        parts[f"optimizer_{index}"] = read_part(path, f"optimizer_{index}", training)
    return parts


def restore_models(parts: Mapping[str, Any], models: Sequence[torch.nn.Module]) -> None:
    """Put back the models alone.

    Raises:
        CheckpointMismatchError: Numbers, names or shapes differ; the message says which.
    """
    _check_number("model", parts["training"]["num_models"], len(models))
    for index, model in enumerate(models):
        _load_model(model, parts[f"model_{index}"], index)


def position_of(parts: dict[str, Any]) -> Position:
    """Return the position of a stored state."""
    return Position(**parts["training"]["position"])


@cache
def _own_version() -> str:
    # Looking it up takes a millisecond, for which training would stand still each time.
    return version("paceline")


# ---- what must fit ---------------------------------------------------------------------------


def _check_number(kind: str, num_stored: int, num_present: int) -> None:
    if num_stored != num_present:
        raise CheckpointMismatchError(
            f"The checkpoint must hold as many {kind}s as the trial wraps, but it holds"
            f" {num_stored}, and the trial wraps {num_present}. Hint: go on with the trial that"
            " stored it."
        )


def _check_types(kind: str, stored: list[str] | None, present: Sequence[Any]) -> None:
    for index, (expected, found) in enumerate(zip(stored or [], present, strict=False)):
        if type(found).__name__ != expected:
            raise CheckpointMismatchError(
                f"The checkpoint's {kind} {index} must be of the same type as the trial's, but it"
                f" is a {expected}, and the trial's is a {type(found).__name__}."
            )


def _load_model(model: torch.nn.Module, state: dict[str, Any], index: int) -> None:
    present = model.state_dict()
    missing, unknown = sorted(present.keys() - state.keys()), sorted(state.keys() - present.keys())
    shapes = [
        f"{name!r} is {list(state[name].shape)} there and {list(value.shape)} here"
        for name, value in present.items()
        if name in state and _shape(value) not in (None, _shape(state[name]))
    ]
    problems = [f"it lacks {_some(missing)}"] if missing else []
    problems += [f"it has {_some(unknown)} besides"] if unknown else []
    problems += [", ".join(shapes[:_NUM_SHOWN]) + _more(shapes)] if shapes else []
    if problems:
        raise CheckpointMismatchError(
            f"The checkpoint is of another model {index}: {'; '.join(problems)}. Hint: go on with"
            " the model that was trained."
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointMismatchError(
            f"The checkpoint is of another model {index}: {error}"
        ) from error


def _some(names: list[str]) -> str:
    return f"{names[:_NUM_SHOWN]}{_more(names)}"


def _more(names: list[str]) -> str:
    num_more = len(names) - _NUM_SHOWN
    return f" and {num_more} more" if num_more > 0 else ""


def _shape(value: Any) -> Any:
    """Return a tensor's shape; None where there is none to compare, as before a first batch."""
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return value.shape


def _frozen(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained at present."""
    return [name for name, value in model.named_parameters() if not value.requires_grad]


def _freeze(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Have just these parameters not trained, as a hook may have frozen or thawed some since."""
    changed = sorted({*names} ^ {*_frozen(model)})
    for name, parameter in model.named_parameters():
        if name in changed:
            parameter.requires_grad_(name not in names)
    if changed:
        logger.info("Frozen or thawed, as they were when the checkpoint was stored: %s", changed)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], index: int, changes: SettingChanges
) -> None:
    stored = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if stored != present:
        raise CheckpointMismatchError(
            f"The checkpoint's optimizer {index} must have the parameter groups of the trial's, but"
            f" they hold {stored} parameters, and the trial's hold {present}."
        )
    try:
        changed = changes.in_optimizer(state, index)
    except ValueError as error:
        raise CheckpointMismatchError(str(error)) from error
    optimizer.load_state_dict(changed)


def _restore_scaler(scaler: Any, state: dict[str, Any] | None) -> None:
    if scaler is not None and state is not None:
        scaler.load_state_dict(state)
    elif scaler is not None or state is not None:
        logger.warning(
            "The checkpoint has %s gradient scaler, and the trial has %s: training goes on with"
            " another precision.",
            "no" if state is None else "a",
            "none" if scaler is None else "one",
        )


def _gradients(own: Mapping[str, Any]) -> list[Any] | None:
    """Return a rank's gradients; an early version kept those of models only, model by model."""
    stored = own["gradients"]
    if stored is not None and any(isinstance(gradients, list) for gradients in stored):
        return [gradient for gradients in stored for gradient in gradients]
    gradients: list[Any] | None = stored
    return gradients
