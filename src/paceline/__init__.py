"""Train PyTorch models from a notebook to a cluster without rewriting the script.

Importing this package is cheap: its parts, such as `paceline.core`, load at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core._arguments import InvalidHP
    from paceline.core._process_environment import ClusterInfo, get_cluster_info
    from paceline.core._run_frames import read_metrics, runs

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"

_NAMES_IN_CORE = frozenset({"ClusterInfo", "InvalidHP", "get_cluster_info"})
_FRAMES = frozenset({"read_metrics", "runs"})
_PARTS = frozenset(
    {
        "client",
        "config",
        "core",
        "creators",
        "declarative",
        "faults",
        "integrations",
        "plugins",
        "pytorch",
        "search",
        "testing",
        "train",
    }
)

__all__ = [
    "LOG_FORMAT",
    "ClusterInfo",
    "InvalidHP",
    "__version__",
    "core",
    "get_cluster_info",
    "read_metrics",
    "runs",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES_IN_CORE:
        return getattr(import_module("paceline.core"), name)
    if name in _FRAMES:
        return getattr(import_module("paceline.core._run_frames"), name)
    if name in _PARTS:
        try:
            return import_module(f"paceline.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"paceline.{name}":
                raise
    if name == "__version__":
        from importlib.metadata import version

        # Kept, as reading the metadata takes a while.
        return globals().setdefault(name, version("paceline"))
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
