"""Names that a package loads when somebody asks for them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: Its name.
        places: The module within the package that has each name.
    """

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return load
