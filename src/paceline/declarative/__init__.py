"""Front door for config objects: describe a run, then build and train the run."""

from paceline._base.imports import show_public_errors
from paceline.declarative._config_classes import (
    Config,
    InferenceConfig,
    LossTrackerParameters,
    ModelParameters,
    ParallelizationConfig,
    PretrainingConfig,
    TrainingConfig,
)
from paceline.declarative._config_object import OptionContainer
from paceline.declarative._losses import (
    LossTracker,
    MarginLoss,
    NegativeCosineSimilarity,
    SymmetricNegativeCosineSimilarity,
    TotalVariationLoss,
)
from paceline.declarative._run_yaml import RunFileError, load_run
from paceline.declarative._trainer_and_tester import Tester, Trainer

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
