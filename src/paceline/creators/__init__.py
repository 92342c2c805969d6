"""The creators front door: hand over functions, and drive training pass by pass."""

from paceline.creators._binding import HookWorker
from paceline.creators._spec import BATCH_SIZE
from paceline.creators._trainer import PyTorchTrainer
from paceline.engine import Pass, StateFormatError
from paceline.storage import CheckpointCorruptError
from paceline.workers import (
    NodesDifferError,
    NotEnoughWorkersError,
    NotSendableError,
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
    "NotEnoughWorkersError",
    "NotSendableError",
    "Pass",
    "PyTorchTrainer",
    "ResourcesError",
    "StateFormatError",
    "TrainingFailedError",
    "WorkerFailedError",
    "WorkersLostError",
]
