"""The Trial class front door: the trainer takes over the loop; model and step stay yours."""

from paceline.core import NonFiniteError
from paceline.engine import (
    Batch,
    CheckpointMismatchError,
    Epoch,
    ExportedWeights,
    KeySetError,
    LRScheduler,
    MetricReducer,
    Record,
    Reducer,
    TrainUnit,
    clip_grad_norm_,
    export_dcp,
    export_weights,
    is_test_mode,
    load_optimizer_state,
    load_weights,
)
from paceline.pytorch import samplers
from paceline.pytorch._batch_inference import torch_batch_process
from paceline.pytorch._batch_processor import TorchBatchProcessor, TorchBatchProcessorContext
from paceline.pytorch._batches_and_loaders import DataLoader, TorchData, data_length, to_device
from paceline.pytorch._from_checkpoint import (
    CheckpointLoadContext,
    load_trial_from_checkpoint_path,
    load_weights_from_checkpoint_path,
)
from paceline.pytorch._launch import launch
from paceline.pytorch._pytorch_callback import PyTorchCallback
from paceline.pytorch._pytorch_trial import PyTorchTrial
from paceline.pytorch._result import Result
from paceline.pytorch._trial_context import PyTorchTrialContext
from paceline.pytorch._trial_init import init
from paceline.pytorch._trial_trainer import Preempted, Trainer
from paceline.pytorch.samplers import adapt_batch_sampler
from paceline.workers import RanksDifferError

__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "CheckpointMismatchError",
    "DataLoader",
    "Epoch",
    "ExportedWeights",
    "KeySetError",
    "LRScheduler",
    "MetricReducer",
    "NonFiniteError",
    "Preempted",
    "PyTorchCallback",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "RanksDifferError",
    "Record",
    "Reducer",
    "Result",
    "TorchBatchProcessor",
    "TorchBatchProcessorContext",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "adapt_batch_sampler",
    "clip_grad_norm_",
    "data_length",
    "export_dcp",
    "export_weights",
    "init",
    "is_test_mode",
    "launch",
    "load_optimizer_state",
    "load_trial_from_checkpoint_path",
    "load_weights",
    "load_weights_from_checkpoint_path",
    "samplers",
    "to_device",
    "torch_batch_process",
]
