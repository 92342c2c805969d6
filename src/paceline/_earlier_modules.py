"""Modules of earlier versions, by which pickles and scripts may refer to public names."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The modules that have the public names of an earlier module today.
_PRESENT_MODULES = {
    "paceline.core._attempt_history": ["paceline.core"],
    "paceline.messages.node_views": ["paceline.messages.nodes_and_slots"],
    "paceline.messages.nodes": ["paceline.messages.node_runners"],
    "paceline.messages.queue_views": ["paceline.messages.pools_and_queue"],
    "paceline.messages.resources": [
        f"paceline.messages.{name}"
        for name in (
            *("base", "checkpoints", "events", "experiments", "logs", "master_info", "metrics"),
            *("nodes_and_slots", "sign_ins", "states", "trials"),
        )
    ],
    "paceline.messages.status": ["paceline.messages.master_info"],
    "paceline.messages.times": ["paceline.messages.trials"],
    "paceline.messages.views": [
        f"paceline.messages.{name}"
        for name in ("configs", "experiments", "hyperparameters", "metrics", "pools_and_queue")
    ],
    "paceline.search._search_views": ["paceline.search"],
    "paceline.storage._storage_setting": ["paceline.storage"],
    "paceline.testing._fault_kinds": ["paceline.testing"],
    "paceline.train._preparing_functions": ["paceline.train"],
}


class _EarlierModules:
    """Finds them after all that is there; see `importlib.abc.MetaPathFinder` and `Loader`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _EarlierModules) if name in _PRESENT_MODULES else None  # type: ignore[arg-type] # as documented

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = module.__name__
        present = [import_module(each) for each in _PRESENT_MODULES[name]]

        def get(attribute: str) -> Any:
            for each in present:
                if hasattr(each, attribute):
                    return getattr(each, attribute)
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        vars(module)["__getattr__"] = get


sys.meta_path.append(_EarlierModules)
