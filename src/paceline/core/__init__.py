"""API for any training script: metrics, checkpoints, preemption, search, several ranks."""

from paceline._base.exceptions import CollectiveMismatchError
from paceline._base.imports import show_public_errors
from paceline._base.run_directory import TrialInfo
from paceline.core._arguments import DownloadMode, EarlyExitReason, PreemptMode, TensorboardMode
from paceline.core._checkpoint_context import CheckpointContext
from paceline.core._cluster_info import ClusterInfo, get_cluster_info
from paceline.core._core_context import Context, init
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import (
    DistributedError,
    DistributedPeerError,
    DistributedTimeoutError,
    InvalidHP,
    NonFiniteError,
    NotOfferedError,
    PreemptedError,
)
from paceline.core._launcher_place import launched_place
from paceline.core._media import MediaReports, MediaRow, read_media
from paceline.core._preemption_and_search import PreemptContext, SearcherContext, SearcherOperation
from paceline.core._profiler_context import ProfilerContext
from paceline.core._read_runs import (
    MetricsRow,
    RunState,
    RunSummary,
    list_runs,
    read_checkpoints,
    read_history,
    read_metrics,
    summarize_run,
    time_shares_of_run,
)
from paceline.core._trackers import MetricPoint, TrackedRun, Tracker, TrackingGroup
from paceline.core._train_context import TrainContext

__all__ = [
    "CheckpointContext",
    "ClusterInfo",
    "CollectiveMismatchError",
    "Context",
    "DistributedContext",
    "DistributedError",
    "DistributedPeerError",
    "DistributedTimeoutError",
    "DownloadMode",
    "EarlyExitReason",
    "InvalidHP",
    "MediaReports",
    "MediaRow",
    "MetricPoint",
    "MetricsRow",
    "NonFiniteError",
    "NotOfferedError",
    "PreemptContext",
    "PreemptMode",
    "PreemptedError",
    "ProfilerContext",
    "RunState",
    "RunSummary",
    "SearcherContext",
    "SearcherOperation",
    "TensorboardMode",
    "TrackedRun",
    "Tracker",
    "TrackingGroup",
    "TrainContext",
    "TrialInfo",
    "get_cluster_info",
    "init",
    "launched_place",
    "list_runs",
    "read_checkpoints",
    "read_history",
    "read_media",
    "read_metrics",
    "summarize_run",
    "time_shares_of_run",
]

show_public_errors(__name__, globals())
