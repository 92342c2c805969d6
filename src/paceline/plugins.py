"""Base classes of all plug points.

Where they stand inside Paceline may change; their place here stays. A package offers a subclass
by an entry point; `docs/plugins.md` shows each in a screenful.
"""

from paceline._cluster.master.executors import (
    AttemptStatus,
    CommandExecutor,
    Executor,
    ExecutorContext,
    Launch,
)
from paceline._cluster.master.starters.slurm_ssh_ray_starters import (
    RunnerOrder,
    Starter,
    StarterError,
)
from paceline.core import MetricPoint, TrackedRun, Tracker
from paceline.search import SearchConfig, SearchMethod
from paceline.storage import CheckpointStorage, ObjectStorage, StoredObject

__all__ = [
    "AttemptStatus",
    "CheckpointStorage",
    "CommandExecutor",
    "Executor",
    "ExecutorContext",
    "Launch",
    "MetricPoint",
    "ObjectStorage",
    "RunnerOrder",
    "SearchConfig",
    "SearchMethod",
    "Starter",
    "StarterError",
    "StoredObject",
    "TrackedRun",
    "Tracker",
]
