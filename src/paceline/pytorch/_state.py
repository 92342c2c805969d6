"""Content of a trainer's checkpoint: capture and restore.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, callbacks, seeds, how to build the trial) and
``rank_<r>`` (generators, open metric sums, accumulated gradients in the middle of a window,
buffers). ``docs/checkpoints.md`` lists every key.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.engine import (
    Position,
    SettingChanges,
    TrainingLoop,
    capture_random_state,
    load_buffers,
    load_gradients,
    own_buffers,
    restore_generators,
    scheduler_state,
    summed_gradients,
)
from paceline.pytorch._callbacks import PyTorchCallback
from paceline.pytorch._context import PyTorchTrialContext
from paceline.pytorch._stored import STATE_VERSION, read_part, read_training, read_weights
from paceline.pytorch._stored import CheckpointMismatchError as CheckpointMismatchError

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5


def shared_state(
    context: PyTorchTrialContext,
    loop: TrainingLoop,
    callbacks: Mapping[str, PyTorchCallback],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the parts that the chief stores for all ranks."""
    parts: dict[str, Any] = {}
    for index, model in enumerate(context.models):
        parts[f"model_{index}"] = dict(model.state_dict())
    for index, optimizer in enumerate(context.optimizers):
        parts[f"optimizer_{index}"] = optimizer.state_dict()
    schedulers = [entry.scheduler for entry in context.lr_schedulers]
    parts["training"] = {
        "version": STATE_VERSION,
        "paceline": _own_version(),
        "torch": str(torch.__version__),
        "position": loop.position._asdict(),
        "num_optimizer_steps": context.accumulation.num_steps,
        "last_validation": loop.last_validation,
        "num_models": len(context.models),
        "frozen": [_frozen(model) for model in context.models],
        "num_optimizers": len(context.optimizers),
        "optimizer_types": [type(optimizer).__name__ for optimizer in context.optimizers],
        "schedulers": [scheduler_state(scheduler) for scheduler in schedulers],
        "scheduler_types": [type(scheduler).__name__ for scheduler in schedulers],
        "scaler": None if context.scaler is None else context.scaler.state_dict(),
        "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
        **facts,
    }
    return parts


@cache
def _own_version() -> str:
    # Looking it up takes a millisecond, for which training would stand still each time.
    return version("paceline")


def trial_facts(trial: object, context: PyTorchTrialContext) -> dict[str, Any]:
    """Return what `load_trial_from_checkpoint_path` needs to build the trial again."""
    kind = type(trial)
    module, source = kind.__module__, None
    if module == "__main__":
        main = sys.modules["__main__"]
        source = Path(getattr(main, "__file__", None) or "a notebook").name
        # A program that was started by `python -m` can be imported by that name.
        module = getattr(getattr(main, "__spec__", None), "name", None) or module
    hparams, unstored = plain_hparams(context)
    return {
        "trial": {"class": f"{module}:{kind.__qualname__}", "source": source},
        "hparams": hparams,
        "unstored_hparams": unstored,
        "data_config": context.get_data_config(),
    }


def plain_hparams(context: PyTorchTrialContext) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the hyperparameters that a checkpoint holds, and the names of the others."""
    try:
        given = context.get_hparams()
    except ValueError:
        return None, []
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    return plain, sorted(given.keys() - plain.keys())


def rank_state(context: PyTorchTrialContext, loop: TrainingLoop) -> dict[str, Any]:
    """Return what this rank alone knows."""
    state: dict[str, Any] = {
        "random": capture_random_state(),
        "means": loop.means.state(),
        "reducers": context.reducers.storable_state(),
        "stream": loop.data.stream_state(),
        "gradients": None,
        "buffers": [
            own_buffers(model, is_chief=context.distributed.rank == 0) for model in context.models
        ],
    }
    # In the middle of a window, and wherever a trial leaves some for a later batch.
    parameters = context.stepper.parameters()
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


def restore_shared(
    parts: dict[str, Any],
    context: PyTorchTrialContext,
    callbacks: Mapping[str, PyTorchCallback],
    changes: SettingChanges,
) -> None:
    """Put back models, optimizers, schedulers, scaler and callbacks, with changes of settings.

    Raises:
        CheckpointMismatchError: Numbers, names, shapes or types differ; the message says which.
    """
    training = parts["training"]
    schedulers = [entry.scheduler for entry in context.lr_schedulers]
    _check_number("optimizer", training["num_optimizers"], len(context.optimizers))
    _check_number("scheduler", len(training["schedulers"]), len(schedulers))
    _check_types("optimizer", training.get("optimizer_types"), context.optimizers)
    _check_types("scheduler", training.get("scheduler_types"), schedulers)
    restore_models(parts, context)
    for model, frozen in zip(context.models, training.get("frozen", ()), strict=False):
        _freeze(model, frozen)
    for index, optimizer in enumerate(context.optimizers):
        _load_optimizer(optimizer, parts[f"optimizer_{index}"], index, changes)
    for index, (scheduler, state) in enumerate(
        zip(schedulers, training["schedulers"], strict=True)
    ):
        changes.load_scheduler(scheduler, state, index)
    _restore_scaler(context.scaler, training["scaler"])
    _restore_callbacks(callbacks, training["callbacks"])


def restore_models(parts: Mapping[str, Any], context: PyTorchTrialContext) -> None:
    """Put back the models alone.

    Raises:
        CheckpointMismatchError: Numbers, names or shapes differ; the message says which.
    """
    _check_number("model", parts["training"]["num_models"], len(context.models))
    for index, model in enumerate(context.models):
        _load_model(model, parts[f"model_{index}"], index)


def restore_rank(
    parts: dict[str, Any],
    context: PyTorchTrialContext,
    loop: TrainingLoop,
    *,
    is_same_size: bool,
) -> None:
    """Put back what this rank alone knew; the generators last, as all else may draw from them."""
    own = parts["rank"]
    if is_same_size:
        loop.means.load_state(own["means"], context.device)
        if "reducers" in own:
            context.reducers.load_state(own["reducers"])
    elif not own["means"].get("is_empty", True):
        logger.warning(
            "Another number of ranks goes on from the checkpoint: the metrics since the last report"
            " before it are left out of the next one."
        )
    for model, buffers in zip(context.models, own["buffers"] or (), strict=False):
        load_buffers(model, buffers)
    if _gradients(own) is not None:
        load_gradients(context.stepper.parameters(), _gradients(own))
    restore_generators(
        own["random"],
        seed=parts["training"]["seed"],
        num_steps=loop.position.batches,
        rank=context.distributed.rank,
    )


def position_of(parts: dict[str, Any]) -> Position:
    """Return the position of a stored state."""
    return Position(**parts["training"]["position"])


# ---- what must fit ---------------------------------------------------------------------------


def _check_number(kind: str, num_stored: int, num_present: int) -> None:
    if num_stored != num_present:
        raise CheckpointMismatchError(
            f"The checkpoint must hold as many {kind}s as the trial wraps, but it holds"
            f" {num_stored}, and the trial wraps {num_present}. Hint: go on with the trial that"
            " stored it."
        )


def _check_types(kind: str, stored: list[str] | None, present: list[Any]) -> None:
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


def _restore_callbacks(
    callbacks: Mapping[str, PyTorchCallback], states: Mapping[str, dict[str, Any]]
) -> None:
    for name, callback in callbacks.items():
        if name in states:
            callback.load_state_dict(states[name])
        elif type(callback).load_state_dict is not PyTorchCallback.load_state_dict:
            logger.warning("The checkpoint has no state of the callback %r: it begins anew.", name)
    for name in states.keys() - callbacks.keys():
        if states[name]:
            logger.warning("The checkpoint has a state of %r, which is no callback now.", name)


# ---- small parts -----------------------------------------------------------------------------


def _gradients(own: Mapping[str, Any]) -> list[Any] | None:
    """Return a rank's gradients; an early version kept those of models only, model by model."""
    stored = own["gradients"]
    if stored is not None and any(isinstance(gradients, list) for gradients in stored):
        return [gradient for gradients in stored for gradient in gradients]
    gradients: list[Any] | None = stored
    return gradients


def _is_plain(value: Any) -> bool:
    """Tell whether a hyperparameter can be stored."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value is None or isinstance(value, (bool, int, float, str)) or is_scalar
