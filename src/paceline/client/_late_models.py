"""Models of the master's API, each loaded at its first use: pydantic is slow to load."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import *  # noqa: F403
    from paceline._cluster.messages.master_models import *  # noqa: F403
    from paceline._cluster.messages.search_and_metric_models import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        for module in ("experiment_models", "master_models", "search_and_metric_models"):
            models = vars(import_module(f"paceline._cluster.messages.{module}"))
            if name in models:
                return models[name]
        raise AttributeError(f"The master's API has no model {name!r}.")
