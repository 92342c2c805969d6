"""The creators front door: hand over functions, and drive training pass by pass."""

from paceline.creators._binding import HookWorker
from paceline.creators._errors import TrainingFailedError
from paceline.creators._passes import Pass
from paceline.creators._spec import BATCH_SIZE
from paceline.creators._trainer import PyTorchTrainer
from paceline.engine import StateFormatError
from paceline.storage import CheckpointCorruptError
from paceline.workers import (
    NodesDifferError,
    NotSendableError,
    ResourcesError,
    WorkerFailedError,
)

__all__ = [
    "BATCH_SIZE",
    "CheckpointCorruptError",
    "HookWorker",
    "NodesDifferError",
    "NotSendableError",
    "Pass",
    "PyTorchTrainer",
    "ResourcesError",
    "StateFormatError",
    "TrainingFailedError",
    "WorkerFailedError",
]
