"""The starters that a pool may name: Paceline's own, and those of packages."""

from paceline._entry_points import class_named
from paceline.master.starters._kubernetes_starter import KubernetesStarter
from paceline.master.starters._ray_starter import RayStarter
from paceline.master.starters._slurm_starter import SlurmStarter
from paceline.master.starters._ssh_starter import SshStarter
from paceline.master.starters._starter_base import Starter

ENTRY_POINTS = "paceline.starters"

_OWN: dict[str, type[Starter]] = {
    "kubernetes": KubernetesStarter,
    "ray": RayStarter,
    "slurm": SlurmStarter,
    "ssh": SshStarter,
}


def starter_named(name: str) -> type[Starter]:
    """Return the class of a starter.

    Raises:
        TypeError: The package that offers it names something else than a `Starter`.
        ValueError: Nobody offers one of this name.
    """
    kind: type[Starter] = class_named(name, ENTRY_POINTS, _OWN, Starter, "starter")
    return kind
