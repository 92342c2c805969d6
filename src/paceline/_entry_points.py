"""Classes that installed packages offer by entry points, beside Paceline's own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def offered_points(group: str, own: Mapping[str, str]) -> "dict[str, EntryPoint]":
    """Return the entry points of a group, by name.

    Args:
        group: The group.
        own: Where Paceline's own classes are, by name.
    """
    # It takes a fifth of the time that a script needs to begin, and most scripts need none.
    from importlib.metadata import EntryPoint, entry_points

    points = [EntryPoint(name, place, group) for name, place in own.items()]
    return {point.name: point for point in [*points, *entry_points(group=group)]}


def loaded_class(point: "EntryPoint", base: type) -> Any:
    """Return the class that an entry point names.

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
