"""Other libraries together with Paceline; each part is loaded when it is asked for.

Importing this loads none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.integrations._lightning import lightning_trainer, prepare_lightning
    from paceline.integrations._mlflow import MLflowTracker
    from paceline.integrations._ray_tune import TrainTrainable, to_trainable
    from paceline.integrations._ray_tune_creators import PyTorchTrainable, as_trainable
    from paceline.integrations._tensorboard import TensorBoardTracker
    from paceline.integrations._wandb import WandbTracker

# The module of each name.
_PLACES = {
    "MLflowTracker": "_mlflow",
    "PyTorchTrainable": "_ray_tune_creators",
    "TensorBoardTracker": "_tensorboard",
    "TrainTrainable": "_ray_tune",
    "WandbTracker": "_wandb",
    "as_trainable": "_ray_tune_creators",
    "lightning_trainer": "_lightning",
    "prepare_lightning": "_lightning",
    "to_trainable": "_ray_tune",
}

__all__ = [
    "MLflowTracker",
    "PyTorchTrainable",
    "TensorBoardTracker",
    "TrainTrainable",
    "WandbTracker",
    "as_trainable",
    "lightning_trainer",
    "prepare_lightning",
    "to_trainable",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'paceline.integrations' has no attribute {name!r}")
    return getattr(import_module(f"paceline.integrations.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
