"""Train PyTorch models from a notebook to a cluster without rewriting the script.

Importing this package is cheap: its parts, such as `paceline.core`, load at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline._one_line import (
        Audio,
        File,
        Histogram,
        Html,
        Image,
        Run,
        Table,
        Video,
        finish,
        init,
        log,
    )
    from paceline.core._cluster_info import ClusterInfo, get_cluster_info
    from paceline.core._exceptions import InvalidHP
    from paceline.core._run_frames import read_metrics, runs

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"

# The module of each name.
_PLACES = {
    **dict.fromkeys(("ClusterInfo", "InvalidHP", "get_cluster_info"), "core"),
    **dict.fromkeys(("read_metrics", "runs"), "core._run_frames"),
    **dict.fromkeys(("Audio", "File", "Histogram", "Html", "Image", "Table"), "_one_line"),
    **dict.fromkeys(("Run", "Video", "finish", "init", "log"), "_one_line"),
}
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
    "Audio",
    "ClusterInfo",
    "File",
    "Histogram",
    "Html",
    "Image",
    "InvalidHP",
    "Run",
    "Table",
    "Video",
    "__version__",
    "core",
    "finish",
    "get_cluster_info",
    "init",
    "log",
    "read_metrics",
    "runs",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"paceline.{_PLACES[name]}"), name)
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
