"""Imports by name: lazy names, entry points of installed packages, optional libraries."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered_points(group: str, own: Mapping[str, str]) -> "dict[str, EntryPoint]":
    """Return the entry points of a group, by name.

    Args:
        group: The group.
        own: Where Paceline's own classes are, by name.
    """
    # Late import: it takes a fifth of a script's start, and most scripts need no entry points.
    from importlib.metadata import EntryPoint, entry_points

    points = [EntryPoint(name, place, group) for name, place in own.items()]
    return {point.name: point for point in [*points, *entry_points(group=group)]}


def class_named(name: str, group: str, own: Mapping[str, type], base: type, field: str) -> Any:
    """Return a class for the master by name: Paceline's own class, or a package's.

    Args:
        name: The name.
        group: The group of entry points in which packages offer such classes.
        own: Paceline's own ones, by name.
        base: The base class that the class must have.
        field: The name of the user's setting, for messages.

    Raises:
        TypeError: The package that offers it names something else.
        ValueError: Nobody offers one of this name.
    """
    if name in own:
        return own[name]
    offered = offered_points(group, {})
    if name not in offered:
        names = ", ".join(sorted(own.keys() | offered.keys()))
        raise ValueError(
            f"`{field}` must be {names}, but got {name!r}. Hint: install the package that offers"
            " it into the environment of the master."
        )
    return loaded_class(offered[name], base)


def loaded_class(point: "EntryPoint", base: type) -> Any:
    """Return the class named by an entry point.

    Raises:
        ImportError: It cannot be imported.
        TypeError: It is no class of this kind.
    """
    kind = point.load()
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(
            f"The entry point {point.name!r} of {point.group!r} must be a class of"
            f" `{base.__name__}`, but {point.value} is {kind!r}."
        )
    return kind


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


def show_public_errors(package: str, names: Mapping[str, Any]) -> None:
    """Name the exceptions of a public package by the package, not by their private modules.

    Tracebacks show this name, and pickled exceptions hold it: modules may move.

    Args:
        package: Its name.
        names: Its names with their values; exceptions defined elsewhere keep their module.
    """
    for value in names.values():
        if (
            isinstance(value, type)
            and issubclass(value, BaseException)
            and value.__module__.startswith(f"{package}._")
        ):
            value.__module__ = package


def required_library(module: str, user: str, install: str) -> ModuleType:
    """Return a module of another library.

    Args:
        module: The module.
        user: Who needs it, for the message.
        install: The requirement for pip.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        # Missing dependency of the library: its own error is the useful one.
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"`{user}` needs the package `{library}`, which is not installed. Hint: pip install"
            f" '{install}'"
        ) from error
