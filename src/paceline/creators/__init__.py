"""The creators front door: hand over functions, and drive training pass by pass."""

from importlib import import_module
from typing import Any

from paceline._base.imports import show_public_errors
from paceline._training.engine.checkpoints.state_format import StateFormatError
from paceline._training.workers.pickled_calls import NotSendableError
from paceline._training.workers.worker_failures import (
    NodesDifferError,
    NotEnoughWorkersError,
    RanksDifferError,
    ResourcesError,
    StepsDifferError,
    TrainingFailedError,
    WorkerFailedError,
    WorkersLostError,
)
from paceline.core._exceptions import NonFiniteError
from paceline.creators._creator_arguments import BATCH_SIZE, HookWorker
from paceline.creators._passes import Pass
from paceline.creators._pytorch_trainer import PyTorchTrainer
from paceline.storage._checkpoint_errors import CheckpointCorruptError

__all__ = [
    "BATCH_SIZE",
    "CheckpointCorruptError",
    "HookWorker",
    "NodesDifferError",
    "NonFiniteError",
    "NotEnoughWorkersError",
    "NotSendableError",
    "Pass",
    "PyTorchTrainer",
    "RanksDifferError",
    "ResourcesError",
    "StateFormatError",
    "StepsDifferError",
    "TrainingFailedError",
    "WorkerFailedError",
    "WorkersLostError",
]

show_public_errors(__name__, globals())


def __getattr__(name: str) -> Any:
    # Lazy import: this module loads Ray.
    if name == "PyTorchTrainable":
        return import_module("paceline.creators._ray_tune").PyTorchTrainable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
