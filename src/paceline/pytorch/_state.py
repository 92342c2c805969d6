"""What a checkpoint of a trainer holds, and how it is put back.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, callbacks, seeds) and ``rank_<r>`` (generators, open
metric sums, accumulated gradients in the middle of a window, buffers of ranks other than 0).
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.engine import (
    Position,
    TrainingLoop,
    capture_random_state,
    load_state,
    restore_random_state,
)
from paceline.pytorch._callbacks import PyTorchCallback
from paceline.pytorch._context import PyTorchTrialContext

logger = logging.getLogger(__name__)

STATE_VERSION = 1


class CheckpointMismatchError(ValueError):
    """Raised when a checkpoint does not fit the trial."""


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
    parts["training"] = {
        "version": STATE_VERSION,
        "position": loop.position._asdict(),
        "num_optimizer_steps": context.accumulation.num_steps,
        "last_validation": loop.last_validation,
        "num_models": len(context.models),
        "num_optimizers": len(context.optimizers),
        "schedulers": [_plain(entry.scheduler.state_dict()) for entry in context.lr_schedulers],
        "scaler": None if context.scaler is None else context.scaler.state_dict(),
        "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
        **facts,
    }
    return parts


def rank_state(context: PyTorchTrialContext, loop: TrainingLoop) -> dict[str, Any]:
    """Return what this rank alone knows."""
    state: dict[str, Any] = {
        "random": capture_random_state(),
        "means": loop.means.state(),
        "stream": loop.data.stream_state(),
        "gradients": None,
        "buffers": None,
    }
    if loop.position.batches % context.accumulation.frequency:
        state["gradients"] = [
            [None if p.grad is None else p.grad for p in model.parameters()]
            for model in context.models
        ]
    if context.distributed.rank:
        state["buffers"] = [dict(model.named_buffers()) for model in context.models]
    return state


def read_state(path: Path, rank: int) -> dict[str, Any]:
    """Return all parts of a stored state, with this rank's own as "rank".

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state of this version.
    """
    if not (path / "training.json").exists():
        raise CheckpointMismatchError(
            "The checkpoint must hold a trainer's state, but has no training.json. Hint: restore"
            " other checkpoints by `core` yourself."
        )
    training = load_state(path, "training")
    if training["version"] != STATE_VERSION:
        raise CheckpointMismatchError(
            f"The trainer's state must have version {STATE_VERSION}, but has {training['version']}."
        )
    own = f"rank_{rank}" if (path / f"rank_{rank}.json").exists() else "rank_0"
    parts = {"training": training, "rank": load_state(path, own)}
    for kind in ("model", "optimizer"):
        for index in range(training[f"num_{kind}s"]):
            parts[f"{kind}_{index}"] = load_state(path, f"{kind}_{index}")
    return parts


def restore_shared(
    parts: dict[str, Any],
    context: PyTorchTrialContext,
    callbacks: Mapping[str, PyTorchCallback],
) -> None:
    """Put back models, optimizers, schedulers, scaler and callbacks.

    Raises:
        CheckpointMismatchError: Numbers or names differ; the message says which.
    """
    training = parts["training"]
    for kind, present in (("model", context.models), ("optimizer", context.optimizers)):
        if training[f"num_{kind}s"] != len(present):
            raise CheckpointMismatchError(
                f"The checkpoint holds {training[f'num_{kind}s']} {kind}s, but the trial wraps"
                f" {len(present)}."
            )
    for index, model in enumerate(context.models):
        _load_model(model, parts[f"model_{index}"], index)
    for index, optimizer in enumerate(context.optimizers):
        optimizer.load_state_dict(parts[f"optimizer_{index}"])
    if len(training["schedulers"]) != len(context.lr_schedulers):
        raise CheckpointMismatchError(
            f"The checkpoint holds {len(training['schedulers'])} schedulers, but the trial wraps"
            f" {len(context.lr_schedulers)}."
        )
    for entry, state in zip(context.lr_schedulers, training["schedulers"], strict=True):
        entry.scheduler.load_state_dict(state)
    if context.scaler is not None and training["scaler"] is not None:
        context.scaler.load_state_dict(training["scaler"])
    for name, callback in callbacks.items():
        if name in training["callbacks"]:
            callback.load_state_dict(training["callbacks"][name])


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
        if own["buffers"] is not None:
            _load_buffers(context, own["buffers"])
        if own["gradients"] is not None:
            _load_gradients(context, own["gradients"])
    elif own["gradients"] is not None:
        logger.warning(
            "The checkpoint lies within an aggregation window and another number of ranks goes on:"
            " the window's gradients begin anew."
        )
    restore_random_state(own["random"])


def position_of(parts: dict[str, Any]) -> Position:
    """Return the position of a stored state."""
    return Position(**parts["training"]["position"])


def _load_model(model: torch.nn.Module, state: dict[str, Any], index: int) -> None:
    present = model.state_dict().keys()
    missing, unknown = sorted(present - state.keys()), sorted(state.keys() - present)
    if missing or unknown:
        raise CheckpointMismatchError(
            f"The checkpoint is of another model {index}: it lacks {missing[:5]} and has"
            f" {unknown[:5]} besides."
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointMismatchError(
            f"The checkpoint is of another model {index}: {error}"
        ) from error


def _load_buffers(context: PyTorchTrialContext, stored: list[dict[str, Any]]) -> None:
    for model, buffers in zip(context.models, stored, strict=True):
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _load_gradients(context: PyTorchTrialContext, stored: list[list[Any]]) -> None:
    for model, gradients in zip(context.models, stored, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a scheduler builds anew by itself and no safe format can hold."""
    return {
        name: value
        for name, value in state.items()
        if not callable(value) and name not in ("_schedulers", "anneal_func")
    }
