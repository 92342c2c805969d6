"""The starters that a pool may name: Paceline's own, and those of packages."""

from paceline._entry_points import loaded_class, offered_points
from paceline.master.starters._base import Starter
from paceline.master.starters._slurm import SlurmStarter
from paceline.master.starters._ssh import SshStarter

ENTRY_POINTS = "paceline.starters"

_OWN: dict[str, type[Starter]] = {"slurm": SlurmStarter, "ssh": SshStarter}


def starter_named(name: str) -> type[Starter]:
    """Return the class of a starter.

    Raises:
        TypeError: The package that offers it names something else than a `Starter`.
        ValueError: Nobody offers one of this name.
    """
    if name in _OWN:
        return _OWN[name]
    offered = offered_points(ENTRY_POINTS, {})
    if name not in offered:
        names = ", ".join(sorted(_OWN.keys() | offered.keys()))
        raise ValueError(
            f"`starter` must be {names}, but got {name!r}. Hint: install the package that offers"
            " it into the environment of the master."
        )
    kind: type[Starter] = loaded_class(offered[name], Starter)
    return kind
