"""The train-function front door: your loop stays yours, on as many workers as you like.

Importing this loads no torch.
"""

from typing import TYPE_CHECKING

from paceline._late_names import late_names
from paceline.train._accelerate import (
    accelerate,
    backward,
    enable_reproducibility,
    full_state_dict,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from paceline.train._checkpoint import Checkpoint
from paceline.train._config import CheckpointStrategy, ElasticConfig, TorchConfig
from paceline.train._dataset_functions import get_dataset, get_dataset_shard, get_datasets
from paceline.train._errors import IncompleteCheckpointError, RunDirectoryError
from paceline.train._results import Report, Results
from paceline.train._run_callbacks import (
    JsonLinesCallback,
    PrintCallback,
    ProgressCallback,
    TensorBoardCallback,
    TrainingCallback,
)
from paceline.train._run_iterator import RunIterator
from paceline.train._stepwise_run import StepwiseRun
from paceline.train._train_functions import (
    cross_rank,
    get_device,
    in_worker,
    load_checkpoint,
    local_rank,
    node_rank,
    report,
    restore_random_state,
    save_checkpoint,
    should_preempt,
    world_rank,
    world_size,
)
from paceline.train._trainer import Trainer
from paceline.train._trainer_workers import ClassWorkers
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

if TYPE_CHECKING:
    from paceline.train._search_function import search
    from paceline.train._search_results import SearchResults, TrialResult

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
    "StepwiseRun",
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
    "node_rank",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "report",
    "restore_random_state",
    "save_checkpoint",
    "search",
    "should_preempt",
    "world_rank",
    "world_size",
]

# Workers and most drivers search nothing.
__getattr__ = late_names(
    __name__,
    {
        "SearchResults": "_search_results",
        "TrialResult": "_search_results",
        "search": "_search_function",
    },
)


def __dir__() -> list[str]:
    return [*__all__]
