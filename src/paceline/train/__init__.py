"""The train-function front door: your loop stays yours, on as many workers as you like.

Importing this loads no torch.
"""

from typing import TYPE_CHECKING

from paceline._base.imports import late_names, show_public_errors
from paceline._training.workers.pickled_calls import NotSendableError
from paceline._training.workers.worker_failures import (
    NodesDifferError,
    NotEnoughWorkersError,
    RanksDifferError,
    ResourcesError,
    RunDirectoryError,
    StepsDifferError,
    TrainingFailedError,
    WorkerFailedError,
    WorkersLostError,
)
from paceline.train._results import IncompleteCheckpointError, Report, Results
from paceline.train._run_protocol import Checkpoint
from paceline.train._stepwise_and_class_runs import RunIterator, StepwiseRun
from paceline.train._train_functions import (
    accelerate,
    backward,
    cross_rank,
    enable_reproducibility,
    full_state_dict,
    get_dataset,
    get_dataset_shard,
    get_datasets,
    get_device,
    in_worker,
    load_checkpoint,
    local_rank,
    media,
    node_rank,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    report,
    restore_random_state,
    save_checkpoint,
    should_preempt,
    verify_steps,
    world_rank,
    world_size,
)
from paceline.train._trainer import ClassWorkers, Trainer
from paceline.train._trainer_arguments import CheckpointStrategy, ElasticConfig, TorchConfig
from paceline.train._training_callbacks import (
    JsonLinesCallback,
    PrintCallback,
    ProgressCallback,
    TensorBoardCallback,
    TrainingCallback,
)

if TYPE_CHECKING:
    from paceline.train._search import SearchResults, TrialResult, search
    from paceline.train._study import Study, StudyTrial

__all__ = [
    "Checkpoint",
    "CheckpointStrategy",
    "ClassWorkers",
    "ElasticConfig",
    "IncompleteCheckpointError",
    "JsonLinesCallback",
    "NodesDifferError",
    "NotEnoughWorkersError",
    "NotSendableError",
    "PrintCallback",
    "ProgressCallback",
    "RanksDifferError",
    "Report",
    "ResourcesError",
    "Results",
    "RunDirectoryError",
    "RunIterator",
    "SearchResults",
    "StepsDifferError",
    "StepwiseRun",
    "Study",
    "StudyTrial",
    "TensorBoardCallback",
    "TorchConfig",
    "Trainer",
    "TrainingCallback",
    "TrainingFailedError",
    "TrialResult",
    "WorkerFailedError",
    "WorkersLostError",
    "accelerate",
    "backward",
    "cross_rank",
    "enable_reproducibility",
    "full_state_dict",
    "get_dataset",
    "get_dataset_shard",
    "get_datasets",
    "get_device",
    "in_worker",
    "load_checkpoint",
    "local_rank",
    "media",
    "node_rank",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "report",
    "restore_random_state",
    "save_checkpoint",
    "search",
    "should_preempt",
    "verify_steps",
    "world_rank",
    "world_size",
]

show_public_errors(__name__, globals())

# Workers and most drivers search nothing.
__getattr__ = late_names(
    __name__,
    {
        "SearchResults": "_search",
        "Study": "_study",
        "StudyTrial": "_study",
        "TrialResult": "_search",
        "search": "_search",
    },
)


def __dir__() -> list[str]:
    return [*__all__]
