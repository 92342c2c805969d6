"""Integrations with other libraries; each part is loaded on first use.

Importing this loads none of them.
"""

from typing import TYPE_CHECKING

from paceline._base.imports import late_names

if TYPE_CHECKING:
    from paceline.integrations._accelerate import (
        PacelineTracker,
        load_accelerator,
        save_accelerator,
    )
    from paceline.integrations._ignite import PacelineHandler
    from paceline.integrations._lightning import (
        PacelineLogger,
        lightning_trainer,
        prepare_lightning,
    )
    from paceline.integrations._trackers import MLflowTracker, TensorBoardTracker, WandbTracker
    from paceline.integrations._transformers import PacelineCallback, prepare_transformers

# The module of each name.
_PLACES = {
    "MLflowTracker": "_trackers",
    "PacelineCallback": "_transformers",
    "PacelineHandler": "_ignite",
    "PacelineLogger": "_lightning",
    "PacelineTracker": "_accelerate",
    "TensorBoardTracker": "_trackers",
    "WandbTracker": "_trackers",
    "lightning_trainer": "_lightning",
    "load_accelerator": "_accelerate",
    "prepare_lightning": "_lightning",
    "prepare_transformers": "_transformers",
    "save_accelerator": "_accelerate",
}

__all__ = [
    "MLflowTracker",
    "PacelineCallback",
    "PacelineHandler",
    "PacelineLogger",
    "PacelineTracker",
    "TensorBoardTracker",
    "WandbTracker",
    "lightning_trainer",
    "load_accelerator",
    "prepare_lightning",
    "prepare_transformers",
    "save_accelerator",
]


__getattr__ = late_names(__name__, _PLACES)


def __dir__() -> list[str]:
    return [*__all__]
