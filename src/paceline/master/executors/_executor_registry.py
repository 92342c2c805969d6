"""The executors that a master may use, by name: this machine's own, and those of packages."""

from paceline._entry_points import loaded_class, offered_points
from paceline.master.executors._base import Executor
from paceline.master.executors._local import LocalExecutor

ENTRY_POINTS = "paceline.executors"
"""The group of entry points: the name of each is that of an executor, its object the class."""

_OWN: dict[str, type[Executor]] = {"local": LocalExecutor}


def executor_named(name: str) -> type[Executor]:
    """Return the class of an executor.

    Raises:
        TypeError: The package that offers it names something else than an `Executor`.
        ValueError: Nobody offers one of this name.
    """
    if name in _OWN:
        return _OWN[name]
    offered = offered_points(ENTRY_POINTS, {})
    if name not in offered:
        names = ", ".join(sorted(_OWN.keys() | offered.keys()))
        raise ValueError(
            f"`executor` must be {names}, but got {name!r}. Hint: install the package that offers"
            " it into the environment of the master."
        )
    kind: type[Executor] = loaded_class(offered[name], Executor)
    return kind
