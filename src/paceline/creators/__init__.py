"""The creators front door: hand over functions, and drive training pass by pass."""

from importlib import import_module
from typing import Any

from paceline.core import NonFiniteError
from paceline.creators._function_parameters import HookWorker
from paceline.creators._pytorch_trainer import PyTorchTrainer
from paceline.creators._replica_spec import BATCH_SIZE
from paceline.engine import Pass, StateFormatError
from paceline.storage import CheckpointCorruptError
from paceline.workers import (
    NodesDifferError,
    NotEnoughWorkersError,
    NotSendableError,
    RanksDifferError,
    ResourcesError,
    TrainingFailedError,
    WorkerFailedError,
    WorkersLostError,
)

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
    "TrainingFailedError",
    "WorkerFailedError",
    "WorkersLostError",
]


def __getattr__(name: str) -> Any:
    # It loads Ray.
    if name == "PyTorchTrainable":
        return import_module("paceline.integrations").PyTorchTrainable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
