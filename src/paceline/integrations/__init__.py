"""Other libraries together with Paceline; each part is loaded when it is asked for.

Importing this loads none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.integrations._ray_tune import TrainTrainable, to_trainable
    from paceline.integrations._ray_tune_creators import PyTorchTrainable, as_trainable

# The module of each name.
_PLACES = {
    "PyTorchTrainable": "_ray_tune_creators",
    "TrainTrainable": "_ray_tune",
    "as_trainable": "_ray_tune_creators",
    "to_trainable": "_ray_tune",
}

__all__ = [
    "PyTorchTrainable",
    "TrainTrainable",
    "as_trainable",
    "to_trainable",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'paceline.integrations' has no attribute {name!r}")
    return getattr(import_module(f"paceline.integrations.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__]
