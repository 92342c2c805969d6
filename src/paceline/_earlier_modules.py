"""Private modules of earlier versions, by which pickles may refer to public names."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The package that has the public names of a module today.
_PACKAGES = {
    "paceline.core._attempt_history": "paceline.core",
    "paceline.search._search_views": "paceline.search",
    "paceline.testing._fault_kinds": "paceline.testing",
    "paceline.train._preparing_functions": "paceline.train",
}


class _EarlierModules:
    """Finds them after all that is there; see `importlib.abc.MetaPathFinder` and `Loader`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, _EarlierModules) if name in _PACKAGES else None  # type: ignore[arg-type] # as documented

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        package = import_module(_PACKAGES[module.__name__])
        vars(module)["__getattr__"] = lambda name: getattr(package, name)


sys.meta_path.append(_EarlierModules)
