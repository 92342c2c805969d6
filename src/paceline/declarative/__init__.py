"""Front door for config objects: describe a run, then build and train the run."""

from paceline._base.imports import show_public_errors
from paceline.declarative._config_object import (
    Config,
    InferenceConfig,
    LossTrackerParameters,
    ModelParameters,
    OptionContainer,
    ParallelizationConfig,
    PretrainingConfig,
    TrainingConfig,
)
from paceline.declarative._losses import (
    LossTracker,
    MarginLoss,
    NegativeCosineSimilarity,
    SymmetricNegativeCosineSimilarity,
    TotalVariationLoss,
)
from paceline.declarative._trainer_and_tester import RunFileError, Tester, Trainer, load_run

__all__ = [
    "Config",
    "InferenceConfig",
    "LossTracker",
    "LossTrackerParameters",
    "MarginLoss",
    "ModelParameters",
    "NegativeCosineSimilarity",
    "OptionContainer",
    "ParallelizationConfig",
    "PretrainingConfig",
    "RunFileError",
    "SymmetricNegativeCosineSimilarity",
    "Tester",
    "TotalVariationLoss",
    "Trainer",
    "TrainingConfig",
    "load_run",
]

show_public_errors(__name__, globals())
