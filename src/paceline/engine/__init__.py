"""The training engine: the loop and its parts, on which every front door stands."""

from paceline._seeds import mix_seed
from paceline.core import CHECKPOINT
from paceline.engine.batch_inference._inference_loop import BatchInference
from paceline.engine.checkpoints._background_saver import CheckpointSaver, Destination
from paceline.engine.checkpoints._best_validation import BestValidation
from paceline.engine.checkpoints._checkpoint_arguments import (
    checked_budget,
    checked_period,
    checked_rules,
)
from paceline.engine.checkpoints._continuous_saves import (
    CONTINUOUS,
    ContinuousPeriod,
    ContinuousSaves,
)
from paceline.engine.checkpoints._kept_checkpoints import KeptCheckpoints
from paceline.engine.checkpoints._state_of_earlier_run import EarlierState, asked_state
from paceline.engine.devices._data_to_device import (
    TorchData,
    data_length,
    mover_to,
    release_device_memory,
    to_device,
)
from paceline.engine.devices._device_and_process_group import (
    join_ranks,
    own_device,
    suitable_backend,
    use_own_device,
)
from paceline.engine.devices._precision import Precision, unwrapped_forward
from paceline.engine.devices._random_generators import (
    capture_random_state,
    isolated_randomness,
    restore_random_state,
    seed_everything,
)
from paceline.engine.formats._json_and_safetensors import StateFormatError, load_state, save_state
from paceline.engine.formats._objects_as_json import JsonReader, JsonWriter, ObjectFinder
from paceline.engine.formats._versioned_checkpoint import read_training, read_weights
from paceline.engine.gradients._clipping import clip_grad_norm_, clipping
from paceline.engine.gradients._gradient_sync import GradientSync
from paceline.engine.gradients._loss_weights import Accumulation
from paceline.engine.loaders._epoch_order import EpochOrder, shards_of_worker, shuffled_indices
from paceline.engine.loaders._node_data_lock import node_data_lock
from paceline.engine.loaders._same_data import check_same_data
from paceline.engine.loaders._sample_collation import collate_of, form_of, loader_of, split
from paceline.engine.loaders._sharded_data import ShardedData
from paceline.engine.loaders._worker_batches import WorkerBatch, worker_batches
from paceline.engine.metrics._explained_variance import ExplainedVariance
from paceline.engine.metrics._metric_reducers import MetricReducer, Reducer, ReducerSet
from paceline.engine.metrics._weighted_means import MAX_SKIPPED_STEPS, KeySetError, WeightedMeans
from paceline.engine.models._meta_device import is_on_meta, materialize
from paceline.engine.models._model_options import ModelOptions, check_shard_precision
from paceline.engine.optimizer_steps._loss_plan import LossPlan, Prediction, accuracy
from paceline.engine.optimizer_steps._stepper import ClipGrads, Stepper
from paceline.engine.parallel._data_parallel import DataParallel, default_data_parallel
from paceline.engine.parallel._flat_all_reduce import FlatReduction
from paceline.engine.parallel._fsdp import ShardUnits, check_whole
from paceline.engine.parallel._horovod import join_horovod
from paceline.engine.parallel._tensor_parallel import TensorPlan, check_plan
from paceline.engine.passes._pass_progress import NotedProgress, shown_pass
from paceline.engine.passes._pass_record import PassRecord
from paceline.engine.passes._pass_state import (
    capture_pass_state,
    checked_pass_state,
    join_pass_state,
    restore_pass_state,
    split_pass_state,
)
from paceline.engine.passes._pass_state_file import (
    load_pass_state,
    read_pass_state,
    save_pass_state,
    store_pass_state,
    write_pass_state,
)
from paceline.engine.passes._pass_statistics import (
    LocalMeans,
    PassResult,
    PassSeconds,
    reduced_statistics,
)
from paceline.engine.passes._pass_times import Measure, StepTimes, measured_pass
from paceline.engine.passes._passes import DataPosition, Pass
from paceline.engine.profiling._step_timeline import StepTimeline
from paceline.engine.profiling._step_timer import ProfilingWindow
from paceline.engine.profiling._torch_profiler import TraceProfiler
from paceline.engine.schedule._lr_scheduler import LRScheduler
from paceline.engine.schedule._lr_scheduler_state import load_scheduler
from paceline.engine.schedule._train_units import (
    Batch,
    Epoch,
    Position,
    Record,
    TrainUnit,
    checked_unit,
)
from paceline.engine.schedule._training_schedule import Schedule, StopReason
from paceline.engine.state._changed_settings import SettingChanges, built_settings
from paceline.engine.state._load_models import load_models
from paceline.engine.state._models_and_optimizers import ModelsAndOptimizers
from paceline.engine.state._rank_differences import RankCheck, compare_in_group
from paceline.engine.tensors._optimizer_parameters import all_parameters
from paceline.engine.tensors._stored_tensors import whole
from paceline.engine.train_functions._accelerate_options import accelerate
from paceline.engine.train_functions._checkpoint_reader import UserStateReader
from paceline.engine.train_functions._checkpoint_writer import Files
from paceline.engine.train_functions._prepared_loader import PreparedLoader
from paceline.engine.train_functions._prepared_models import (
    enable_reproducibility,
    full_state_dict,
    prepare_model,
    prepare_optimizer,
)
from paceline.engine.train_functions._rank_session import LooseSession, RankSession, loose_session
from paceline.engine.train_functions._ray_loader import RayDataset
from paceline.engine.training._deepspeed import (
    DeepSpeedState,
    DeepSpeedStepper,
    import_deepspeed,
    join_deepspeed,
)
from paceline.engine.training._driven_loop import DrivenLoop
from paceline.engine.training._fit_defaults import (
    FitDefaults,
    is_test_mode,
    precision_of,
    searched_length,
    searcher_of,
    unit_of,
)
from paceline.engine.training._loop_hooks import TrainsShard
from paceline.engine.training._registered_models import RegisteredModels
from paceline.engine.training._resumable_training import ResumableTraining
from paceline.engine.training._training_callbacks import TrainingCallbacks
from paceline.engine.training._training_state import (
    TrainingState,
    models_in,
    position_of,
    read_state,
)
from paceline.engine.training._validation_over_ranks import (
    MetricSums,
    batches_by_rank,
    evaluate_batches,
    evaluate_on_chief,
)
from paceline.engine.weights._export_onnx import export_onnx, require_onnx
from paceline.engine.weights._export_weights import ExportedWeights, export_dcp, export_weights
from paceline.engine.weights._load_weights_and_optimizer import load_optimizer_state, load_weights
from paceline.engine.weights._whole_and_sharded_tensors import gathered, outline_of, whole_model
from paceline.storage import CheckpointMismatchError

__all__ = [
    "CHECKPOINT",
    "CONTINUOUS",
    "MAX_SKIPPED_STEPS",
    "Accumulation",
    "Batch",
    "BatchInference",
    "BestValidation",
    "CheckpointMismatchError",
    "CheckpointSaver",
    "ClipGrads",
    "ContinuousPeriod",
    "ContinuousSaves",
    "DataParallel",
    "DataPosition",
    "DeepSpeedState",
    "DeepSpeedStepper",
    "Destination",
    "DrivenLoop",
    "EarlierState",
    "Epoch",
    "EpochOrder",
    "ExplainedVariance",
    "ExportedWeights",
    "Files",
    "FitDefaults",
    "FlatReduction",
    "GradientSync",
    "JsonReader",
    "JsonWriter",
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
    "ModelsAndOptimizers",
    "NotedProgress",
    "ObjectFinder",
    "Pass",
    "PassRecord",
    "PassResult",
    "PassSeconds",
    "Position",
    "Precision",
    "Prediction",
    "PreparedLoader",
    "ProfilingWindow",
    "RankCheck",
    "RankSession",
    "RayDataset",
    "Record",
    "Reducer",
    "ReducerSet",
    "RegisteredModels",
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
    "TrainingCallbacks",
    "TrainingState",
    "TrainsShard",
    "UserStateReader",
    "WeightedMeans",
    "WorkerBatch",
    "accelerate",
    "accuracy",
    "all_parameters",
    "asked_state",
    "batches_by_rank",
    "built_settings",
    "capture_pass_state",
    "capture_random_state",
    "check_plan",
    "check_same_data",
    "check_shard_precision",
    "check_whole",
    "checked_budget",
    "checked_pass_state",
    "checked_period",
    "checked_rules",
    "checked_unit",
    "clip_grad_norm_",
    "clipping",
    "collate_of",
    "compare_in_group",
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
    "node_data_lock",
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
    "worker_batches",
    "write_pass_state",
]
