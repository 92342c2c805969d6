"""The master's memory: tables, metrics in columns, and log files."""

from paceline.master.store import _tables as tables
from paceline.master.store._columns import Summary, tagged
from paceline.master.store._configs import config_of
from paceline.master.store._copy import check_copy, copy_database
from paceline.master.store._curves import Curve, cut_curve, read_curve, sample_curve
from paceline.master.store._database import (
    Database,
    DatabaseDamagedError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    Transaction,
)
from paceline.master.store._experiment_list import (
    Condition,
    ExperimentQuery,
    Listed,
    count_rows,
    json_path,
    list_rows,
)
from paceline.master.store._ids import keep_ids, new_id
from paceline.master.store._kept_counts import (
    ARCHIVED,
    ATTEMPTS,
    CHECKPOINTS,
    EXPERIMENTS,
    POINTS,
    TRIALS,
    checkpoint_sizes,
    number_by_state,
    numbers_of,
)
from paceline.master.store._known import (
    KnownFiles,
    adopt_contexts,
    note_context,
    open_copy,
    read_known_files,
    read_version,
)
from paceline.master.store._log_lines import LogFilter, StoredLine, log_levels
from paceline.master.store._log_merge import merge_lines
from paceline.master.store._logs import LogStore
from paceline.master.store._measured import measure_checkpoints
from paceline.master.store._metric_names import all_metric_names, metric_names
from paceline.master.store._metrics import (
    Conflict,
    MetricRow,
    add_metrics,
    has_points_beyond,
    iter_points,
    metric_at,
    read_rows,
    read_series,
    read_summary,
    trim_summaries,
)
from paceline.master.store._paging import Order, Place
from paceline.master.store._pieces import Selection
from paceline.master.store._samples import sample_trials
from paceline.master.store._smoothing import smooth_at
from paceline.master.store._time_marks import add_time_mark, time_shares
from paceline.master.store._views import (
    attempt_views,
    checkpoint_views,
    decode_cursor,
    encode_cursor,
    experiment_views,
    trial_views,
)

__all__ = [
    "ARCHIVED",
    "ATTEMPTS",
    "CHECKPOINTS",
    "Condition",
    "Conflict",
    "Curve",
    "Database",
    "DatabaseDamagedError",
    "DatabaseUnavailableError",
    "DatabaseVersionError",
    "EXPERIMENTS",
    "ExperimentQuery",
    "KnownFiles",
    "Listed",
    "LogFilter",
    "LogStore",
    "MetricRow",
    "Order",
    "POINTS",
    "Place",
    "Selection",
    "StoredLine",
    "Summary",
    "TRIALS",
    "Transaction",
    "add_metrics",
    "add_time_mark",
    "adopt_contexts",
    "all_metric_names",
    "attempt_views",
    "check_copy",
    "checkpoint_sizes",
    "checkpoint_views",
    "config_of",
    "copy_database",
    "count_rows",
    "cut_curve",
    "decode_cursor",
    "encode_cursor",
    "experiment_views",
    "has_points_beyond",
    "iter_points",
    "json_path",
    "keep_ids",
    "list_rows",
    "log_levels",
    "measure_checkpoints",
    "merge_lines",
    "metric_at",
    "metric_names",
    "new_id",
    "note_context",
    "number_by_state",
    "numbers_of",
    "open_copy",
    "read_curve",
    "read_known_files",
    "read_rows",
    "read_series",
    "read_summary",
    "read_version",
    "sample_curve",
    "sample_trials",
    "smooth_at",
    "tables",
    "tagged",
    "time_shares",
    "trial_views",
    "trim_summaries",
]
