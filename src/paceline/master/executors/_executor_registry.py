"""The executors that a master may use, by name: this machine's own, and those of packages."""

from paceline._entry_points import class_named
from paceline.master.executors._executor_base import Executor
from paceline.master.executors._local_executor import LocalExecutor

ENTRY_POINTS = "paceline.executors"
"""The group of entry points: the name of each is that of an executor, its object the class."""

_OWN: dict[str, type[Executor]] = {"local": LocalExecutor}
# What starts runners for a pool, which users of other systems look for here.
STARTERS = ("kubernetes", "ray", "slurm", "ssh")


def executor_named(name: str) -> type[Executor]:
    """Return the class of an executor.

    Raises:
        TypeError: The package that offers it names something else than an `Executor`.
        ValueError: Nobody offers one of this name.
    """
    if name in STARTERS:
        raise ValueError(
            f"`executor` must be local or that of a package, but got {name!r}, which starts the"
            f" runners of a pool. Hint: name it in a file of pools (`starter: {name}`) and use"
            " `paceline up --pool-file FILE`; see docs/clusters.md."
        )
    kind: type[Executor] = class_named(name, ENTRY_POINTS, _OWN, Executor, "executor")
    return kind
