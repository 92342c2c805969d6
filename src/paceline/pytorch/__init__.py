"""The Trial class front door: the trainer takes over the loop, the model and the step stay yours.

In the making: what is here works and is tested, but the surface is not complete yet. Still to come
are `train_for`, `configure_profiler`, automatic mixed precision, overlapped data parallelism,
reading the stop signal on a GPU without waiting for it, `load_trial_from_checkpoint_path`,
`launch`, the mapping of older configs, progress on a terminal, and retention.
"""

from paceline.engine import Batch, Epoch, Record, TrainUnit
from paceline.pytorch import samplers
from paceline.pytorch._callbacks import PyTorchCallback
from paceline.pytorch._context import PyTorchTrialContext
from paceline.pytorch._data import DataLoader, TorchData, data_length, to_device
from paceline.pytorch._init import init
from paceline.pytorch._reducers import MetricReducer, Reducer
from paceline.pytorch._result import Result
from paceline.pytorch._schedulers import LRScheduler
from paceline.pytorch._state import CheckpointMismatchError
from paceline.pytorch._trainer import Trainer
from paceline.pytorch._trial import PyTorchTrial
from paceline.pytorch.samplers import adapt_batch_sampler

__all__ = [
    "Batch",
    "CheckpointMismatchError",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Record",
    "Reducer",
    "Result",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "adapt_batch_sampler",
    "data_length",
    "init",
    "samplers",
    "to_device",
]
