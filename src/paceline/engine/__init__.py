"""The training engine: the loop and its parts, on which every front door stands."""

from paceline._seeds import mix_seed
from paceline.engine._accelerated_parts import accelerate
from paceline.engine._accumulation import Accumulation
from paceline.engine._batch_inference import BatchInference
from paceline.engine._best_validation import BestValidation
from paceline.engine._changed_settings import SettingChanges, built_settings
from paceline.engine._checkpoint_settings import checked_budget, checked_period, checked_rules
from paceline.engine._clipping import clip_grad_norm_, clipping
from paceline.engine._continuous_saves import CONTINUOUS, ContinuousPeriod, ContinuousSaves
from paceline.engine._data_parallel import DataParallel, default_data_parallel
from paceline.engine._deepspeed import (
    DeepSpeedState,
    DeepSpeedStepper,
    import_deepspeed,
    join_deepspeed,
)
from paceline.engine._device import (
    TorchData,
    data_length,
    mover_to,
    release_device_memory,
    to_device,
)
from paceline.engine._earlier_state import EarlierState, asked_state
from paceline.engine._experiment_config import (
    FitDefaults,
    is_test_mode,
    precision_of,
    searched_length,
    searcher_of,
    unit_of,
)
from paceline.engine._explained_variance import ExplainedVariance
from paceline.engine._export import ExportedWeights, export_dcp, export_weights
from paceline.engine._gradient_sync import GradientSync
from paceline.engine._horovod import join_horovod
from paceline.engine._joined_batches import JoinedBatch, joined_batches
from paceline.engine._kept_checkpoints import KeptCheckpoints
from paceline.engine._loop_hooks import TrainsShard
from paceline.engine._loss_plan import LossPlan, Prediction, accuracy
from paceline.engine._meta_device import is_on_meta, materialize
from paceline.engine._metrics import KeySetError, NonFiniteError, WeightedMeans
from paceline.engine._model_options import ModelOptions, check_shard_precision
from paceline.engine._onnx import export_onnx, require_onnx
from paceline.engine._order import EpochOrder, shards_of_worker, shuffled_indices
from paceline.engine._pass_progress import NotedProgress, shown_pass
from paceline.engine._pass_record import PassRecord
from paceline.engine._pass_state import (
    capture_pass_state,
    checked_pass_state,
    join_pass_state,
    restore_pass_state,
    split_pass_state,
)
from paceline.engine._pass_state_file import (
    load_pass_state,
    read_pass_state,
    save_pass_state,
    store_pass_state,
    write_pass_state,
)
from paceline.engine._pass_statistics import LocalMeans, PassResult, reduced_statistics
from paceline.engine._pass_times import Measure, StepTimes, measured_pass
from paceline.engine._passes import DataPosition, Pass
from paceline.engine._plain_objects import ObjectFinder, Reader, Writer
from paceline.engine._precision import Precision, unwrapped_forward
from paceline.engine._prepared_loader import PreparedLoader
from paceline.engine._prepared_models import (
    enable_reproducibility,
    full_state_dict,
    prepare_model,
    prepare_optimizer,
)
from paceline.engine._process_group import join_ranks, own_device, suitable_backend, use_own_device
from paceline.engine._randomness import (
    capture_random_state,
    isolated_randomness,
    restore_random_state,
    seed_everything,
)
from paceline.engine._rank_session import LooseSession, RankSession, loose_session
from paceline.engine._ray_loader import RayDataset
from paceline.engine._reducers import MetricReducer, Reducer, ReducerSet
from paceline.engine._reduction import FlatReduction
from paceline.engine._resumable_training import ResumableTraining
from paceline.engine._sample_forms import Collate, form_of, loader_of, split
from paceline.engine._saver import CheckpointSaver, Destination
from paceline.engine._schedule import Schedule, StopReason
from paceline.engine._schedulers import load_scheduler
from paceline.engine._sharded_data import ShardedData
from paceline.engine._sharding import ShardUnits, check_whole
from paceline.engine._state_format import StateFormatError, load_state, save_state
from paceline.engine._stepped_scheduler import LRScheduler
from paceline.engine._stepper import ClipGrads, Stepper
from paceline.engine._stored_state import CheckpointMismatchError, read_training, read_weights
from paceline.engine._stored_tensors import whole
from paceline.engine._tensor_plan import TensorPlan, check_plan
from paceline.engine._time_account import CHECKPOINT
from paceline.engine._timeline import StepTimeline
from paceline.engine._timing import ProfilingWindow
from paceline.engine._traces import TraceProfiler
from paceline.engine._train_units import Batch, Epoch, Position, Record, TrainUnit, checked_unit
from paceline.engine._trained_objects import TrainedObjects, load_models
from paceline.engine._trained_parts import TrainedParts
from paceline.engine._training_callbacks import TrainingCallbacks
from paceline.engine._training_state import TrainingState, models_in, position_of, read_state
from paceline.engine._user_state_reader import UserStateReader
from paceline.engine._user_state_writer import Files
from paceline.engine._validation import (
    MetricSums,
    batches_by_rank,
    evaluate_batches,
    evaluate_on_chief,
)
from paceline.engine._weight_sources import load_optimizer_state, load_weights
from paceline.engine._whole_tensors import gathered, outline_of, whole_model

__all__ = [
    "CHECKPOINT",
    "CONTINUOUS",
    "Accumulation",
    "Batch",
    "BatchInference",
    "BestValidation",
    "CheckpointMismatchError",
    "CheckpointSaver",
    "ClipGrads",
    "Collate",
    "ContinuousPeriod",
    "ContinuousSaves",
    "DataParallel",
    "DataPosition",
    "DeepSpeedState",
    "DeepSpeedStepper",
    "Destination",
    "EarlierState",
    "Epoch",
    "EpochOrder",
    "ExplainedVariance",
    "ExportedWeights",
    "Files",
    "FitDefaults",
    "FlatReduction",
    "GradientSync",
    "JoinedBatch",
    "KeptCheckpoints",
    "KeySetError",
    "LRScheduler",
    "LocalMeans",
    "LooseSession",
    "LossPlan",
    "Measure",
    "MetricReducer",
    "MetricSums",
    "ModelOptions",
    "NonFiniteError",
    "NotedProgress",
    "ObjectFinder",
    "Pass",
    "PassRecord",
    "PassResult",
    "Position",
    "Precision",
    "Prediction",
    "PreparedLoader",
    "ProfilingWindow",
    "RankSession",
    "RayDataset",
    "Reader",
    "Record",
    "Reducer",
    "ReducerSet",
    "ResumableTraining",
    "Schedule",
    "SettingChanges",
    "ShardUnits",
    "ShardedData",
    "StateFormatError",
    "StepTimeline",
    "StepTimes",
    "Stepper",
    "StopReason",
    "TensorPlan",
    "TorchData",
    "TraceProfiler",
    "TrainUnit",
    "TrainedObjects",
    "TrainedParts",
    "TrainingCallbacks",
    "TrainingState",
    "TrainsShard",
    "UserStateReader",
    "WeightedMeans",
    "Writer",
    "accelerate",
    "accuracy",
    "asked_state",
    "batches_by_rank",
    "built_settings",
    "capture_pass_state",
    "capture_random_state",
    "check_plan",
    "check_shard_precision",
    "check_whole",
    "checked_budget",
    "checked_pass_state",
    "checked_period",
    "checked_rules",
    "checked_unit",
    "clip_grad_norm_",
    "clipping",
    "data_length",
    "default_data_parallel",
    "enable_reproducibility",
    "evaluate_batches",
    "evaluate_on_chief",
    "export_dcp",
    "export_onnx",
    "export_weights",
    "form_of",
    "full_state_dict",
    "gathered",
    "import_deepspeed",
    "is_on_meta",
    "is_test_mode",
    "isolated_randomness",
    "join_deepspeed",
    "join_horovod",
    "join_pass_state",
    "join_ranks",
    "joined_batches",
    "load_models",
    "load_optimizer_state",
    "load_pass_state",
    "load_scheduler",
    "load_state",
    "load_weights",
    "loader_of",
    "loose_session",
    "materialize",
    "measured_pass",
    "mix_seed",
    "models_in",
    "mover_to",
    "outline_of",
    "own_device",
    "position_of",
    "precision_of",
    "prepare_model",
    "prepare_optimizer",
    "read_pass_state",
    "read_state",
    "read_training",
    "read_weights",
    "reduced_statistics",
    "release_device_memory",
    "require_onnx",
    "restore_pass_state",
    "restore_random_state",
    "save_pass_state",
    "save_state",
    "searched_length",
    "searcher_of",
    "seed_everything",
    "shards_of_worker",
    "shown_pass",
    "shuffled_indices",
    "split",
    "split_pass_state",
    "store_pass_state",
    "suitable_backend",
    "to_device",
    "unit_of",
    "unwrapped_forward",
    "use_own_device",
    "whole",
    "whole_model",
    "write_pass_state",
]
