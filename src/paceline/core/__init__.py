"""API for any training script: metrics, checkpoints, preemption, search, several ranks."""

from paceline.core._attempt_journal import (
    begin_journal,
    describe_error,
    end_journal,
    outcome_of,
    record_failed_end,
    record_metrics,
    record_start,
    record_store_state,
    record_time_spent,
)
from paceline.core._checkpoint_context import CheckpointContext
from paceline.core._checkpoint_failures import StoreFailures
from paceline.core._checkpoint_parts import (
    CheckpointParts,
    commit_checkpoint,
    delete_checkpoint,
)
from paceline.core._cluster_info import ClusterInfo, get_cluster_info
from paceline.core._control_file import ControlFile
from paceline.core._core_context import Context, has_context
from paceline.core._core_init import init
from paceline.core._distributed_context import DistributedContext
from paceline.core._earlier_run import resuming_by
from paceline.core._enums import (
    DownloadMode,
    EarlyExitReason,
    Outcome,
    PreemptMode,
    TensorboardMode,
)
from paceline.core._environment import describe_source
from paceline.core._errors import (
    CollectiveMismatchError,
    DistributedError,
    DistributedPeerError,
    DistributedTimeoutError,
    GivenUpError,
    InvalidHP,
    NonFiniteError,
    NotOfferedError,
    PreemptedError,
)
from paceline.core._joined_run import join_run
from paceline.core._journal_history import (
    MetricsRow,
    read_alerts,
    read_checkpoints,
    read_history,
    read_metrics,
)
from paceline.core._launched_place import LaunchedPlace, forget_launcher, launched_place
from paceline.core._metric_numbers import numbers_of
from paceline.core._new_run_storage import (
    is_storage_in_environment,
    storage_of_new_run,
)
from paceline.core._node_storage import NodeStorage
from paceline.core._open_run import OpenedRun, next_run_number, open_run
from paceline.core._preempt_context import PreemptContext, SignalWatch
from paceline.core._profiler_context import ProfilerContext
from paceline.core._report_checks import (
    RESERVED_GROUPS,
    check_judged,
    group_of_rank,
    searched_metrics,
)
from paceline.core._run_directories import local_directory, run_name
from paceline.core._run_summaries import (
    RUNS_DIRECTORY,
    RunState,
    RunSummary,
    list_runs,
    moved_storage,
    newest_run_named,
    restorable_checkpoint,
    storage_at,
    summarize_run,
)
from paceline.core._run_time_shares import time_shares_of_run
from paceline.core._search_decision import DECISION_TIMEOUT_S, SearchDecision
from paceline.core._searcher_context import SearcherContext, SearcherOperation
from paceline.core._send_to_trackers import TrackingGroup
from paceline.core._sharded_checkpoint_checks import failing_together
from paceline.core._shared_storage import check_shared_storage
from paceline.core._storage_argument import GivenStorage, check_given_storage, given_storage
from paceline.core._time_account import (
    CHECKPOINT,
    LOST,
    OTHER,
    TRAINING,
    VALIDATION,
    TimeAccount,
    TimeEvent,
)
from paceline.core._tracker import MetricPoint, TrackedRun, Tracker
from paceline.core._tracker_registry import as_trackers, tracker_named, tracker_names
from paceline.core._train_context import TrainContext
from paceline.core._unfinished_checkpoints import discard_unfinished
from paceline.journal import TrialInfo

__all__ = [
    "CHECKPOINT",
    "DECISION_TIMEOUT_S",
    "LOST",
    "OTHER",
    "RESERVED_GROUPS",
    "RUNS_DIRECTORY",
    "TRAINING",
    "VALIDATION",
    "CheckpointContext",
    "CheckpointParts",
    "ClusterInfo",
    "CollectiveMismatchError",
    "Context",
    "ControlFile",
    "DistributedContext",
    "DistributedError",
    "DistributedPeerError",
    "DistributedTimeoutError",
    "DownloadMode",
    "EarlyExitReason",
    "GivenStorage",
    "GivenUpError",
    "InvalidHP",
    "LaunchedPlace",
    "MetricPoint",
    "MetricsRow",
    "NodeStorage",
    "NonFiniteError",
    "NotOfferedError",
    "OpenedRun",
    "Outcome",
    "PreemptContext",
    "PreemptMode",
    "PreemptedError",
    "ProfilerContext",
    "RunState",
    "RunSummary",
    "SearchDecision",
    "SearcherContext",
    "SearcherOperation",
    "SignalWatch",
    "StoreFailures",
    "TensorboardMode",
    "TimeAccount",
    "TimeEvent",
    "TrackedRun",
    "Tracker",
    "TrackingGroup",
    "TrainContext",
    "TrialInfo",
    "as_trackers",
    "begin_journal",
    "check_given_storage",
    "check_judged",
    "check_shared_storage",
    "commit_checkpoint",
    "delete_checkpoint",
    "describe_error",
    "describe_source",
    "discard_unfinished",
    "end_journal",
    "failing_together",
    "forget_launcher",
    "get_cluster_info",
    "given_storage",
    "group_of_rank",
    "has_context",
    "init",
    "is_storage_in_environment",
    "join_run",
    "launched_place",
    "list_runs",
    "local_directory",
    "moved_storage",
    "newest_run_named",
    "next_run_number",
    "numbers_of",
    "open_run",
    "outcome_of",
    "read_alerts",
    "read_checkpoints",
    "read_history",
    "read_metrics",
    "record_failed_end",
    "record_metrics",
    "record_start",
    "record_store_state",
    "record_time_spent",
    "restorable_checkpoint",
    "resuming_by",
    "run_name",
    "searched_metrics",
    "storage_at",
    "storage_of_new_run",
    "summarize_run",
    "time_shares_of_run",
    "tracker_named",
    "tracker_names",
]
