"""The Trial class front door: the trainer takes over the loop; model and step stay yours."""

from paceline._base.imports import show_public_errors
from paceline._training.engine.checkpoints.weight_exports import (
    ExportedWeights,
    export_dcp,
    export_weights,
)
from paceline._training.engine.checkpoints.weights_from_checkpoints import (
    load_optimizer_state,
    load_weights,
)
from paceline._training.engine.fsdp_and_tensor_parallel import clip_grad_norm_
from paceline._training.engine.lr_schedulers import LRScheduler
from paceline._training.engine.metric_reducers import MetricReducer, Reducer
from paceline._training.engine.schedules import Batch, Epoch, Record, TrainUnit
from paceline._training.engine.weighted_means import KeySetError
from paceline._training.workers.worker_failures import RanksDifferError, StepsDifferError
from paceline.core._exceptions import NonFiniteError
from paceline.data._torch_loaders import TorchData, to_device
from paceline.pytorch import samplers
from paceline.pytorch._batch_inference import TorchBatchProcessor, torch_batch_process
from paceline.pytorch._init_and_launch import (
    init,
    launch,
    load_trial_from_checkpoint_path,
    load_weights_from_checkpoint_path,
)
from paceline.pytorch._trainer import Preempted, Result, Trainer
from paceline.pytorch._trial_and_context import (
    DataLoader,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
)
from paceline.storage._checkpoint_errors import CheckpointMismatchError

__all__ = [
    "Batch",
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
    "StepsDifferError",
    "TorchBatchProcessor",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "clip_grad_norm_",
    "export_dcp",
    "export_weights",
    "init",
    "launch",
    "load_optimizer_state",
    "load_trial_from_checkpoint_path",
    "load_weights",
    "load_weights_from_checkpoint_path",
    "samplers",
    "to_device",
    "torch_batch_process",
]

show_public_errors(__name__, globals())
