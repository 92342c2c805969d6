"""The master's memory: tables, metrics in columns, and log files."""

from paceline.master.store import _tables as tables
from paceline.master.store._api_models import (
    attempt_views,
    checkpoint_views,
    decode_cursor,
    encode_cursor,
    experiment_view,
    trial_view,
)
from paceline.master.store._attempt_environments import (
    drop_unused_environments,
    read_environment,
    store_environment,
)
from paceline.master.store._attempt_members import (
    Member,
    num_slots_of,
    read_members,
    slots_by_node,
    stored_members,
)
from paceline.master.store._chart_series import Curve, cut_curve, read_curve, sample_curve
from paceline.master.store._checkpoint_metrics import measure_checkpoints
from paceline.master.store._cluster_id import read_cluster_id, settle_cluster_id
from paceline.master.store._database import (
    Database,
    DatabaseDamagedError,
    DatabaseVersionError,
    Transaction,
)
from paceline.master.store._database_copy import check_copy, copy_database
from paceline.master.store._database_engine import DatabaseReader, load_json
from paceline.master.store._database_files import DatabaseLostError, DatabaseUnavailableError
from paceline.master.store._encoded_experiments import encode_experiments
from paceline.master.store._encoded_trials import LISTED_TRIAL_COLUMNS, encode_trials
from paceline.master.store._encoding_cache import EncodingCache
from paceline.master.store._experiment_list import (
    Condition,
    ExperimentQuery,
    Listed,
    count_rows,
    json_path,
    list_rows,
)
from paceline.master.store._ids import keep_ids, new_id, raise_ids
from paceline.master.store._log_file import num_damaged_lines
from paceline.master.store._log_filter import LogFilter, StoredLine, log_levels
from paceline.master.store._log_merge import merge_lines
from paceline.master.store._metric_names import all_metric_names, metric_names, num_metric_names
from paceline.master.store._metric_rows import (
    Conflict,
    MetricRow,
    add_metrics,
    has_points_beyond,
    iter_points,
    metric_at,
    read_rows,
    read_series,
)
from paceline.master.store._paging import Order, Place
from paceline.master.store._point_encoding import tagged
from paceline.master.store._read_only_connections import open_read_only, read_version
from paceline.master.store._recovery_rows import (
    ALL,
    ENDED,
    GONE,
    LASTING,
    NEW,
    OF_ATTEMPTS,
    RECORDED,
    RECORDS_BEGUN,
    RecordedRow,
    are_records_begun,
    begin_records,
    decode_row,
    encode_row,
    forget_recorded,
    marks_of_running,
    note_experiment,
    primary_key,
    rows_of_change,
    rows_of_experiment,
    watch_rows,
)
from paceline.master.store._referenced_files import (
    KnownFiles,
    adopt_contexts,
    note_context,
    read_known_files,
)
from paceline.master.store._request_keys import once
from paceline.master.store._row_counts import (
    ARCHIVED,
    ATTEMPTS,
    CHECKPOINTS,
    EXPERIMENTS,
    POINTS,
    TRIALS,
    checkpoint_sizes,
    num_waiting,
    number_by_state,
    numbers_of,
)
from paceline.master.store._series_reader import Selection
from paceline.master.store._series_smoothing import smooth_at
from paceline.master.store._series_summaries import Summary, read_summary, trim_summaries
from paceline.master.store._stored_configs import config_of
from paceline.master.store._time_marks import add_time_mark, time_shares
from paceline.master.store._trial_logs import LogStore
from paceline.master.store._trial_samples import sample_trials
from paceline.master.store._wal_damage import find_log_damage

__all__ = [
    "ALL",
    "ARCHIVED",
    "ATTEMPTS",
    "CHECKPOINTS",
    "Condition",
    "Conflict",
    "Curve",
    "Database",
    "DatabaseDamagedError",
    "DatabaseLostError",
    "DatabaseReader",
    "DatabaseUnavailableError",
    "DatabaseVersionError",
    "ENDED",
    "EXPERIMENTS",
    "EncodingCache",
    "LISTED_TRIAL_COLUMNS",
    "encode_experiments",
    "encode_trials",
    "ExperimentQuery",
    "GONE",
    "KnownFiles",
    "LASTING",
    "Listed",
    "LogFilter",
    "LogStore",
    "Member",
    "MetricRow",
    "NEW",
    "OF_ATTEMPTS",
    "Order",
    "POINTS",
    "Place",
    "RECORDED",
    "RECORDS_BEGUN",
    "RecordedRow",
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
    "are_records_begun",
    "begin_records",
    "check_copy",
    "checkpoint_sizes",
    "checkpoint_views",
    "config_of",
    "copy_database",
    "count_rows",
    "cut_curve",
    "decode_cursor",
    "decode_row",
    "drop_unused_environments",
    "encode_cursor",
    "encode_row",
    "experiment_view",
    "find_log_damage",
    "forget_recorded",
    "has_points_beyond",
    "iter_points",
    "json_path",
    "keep_ids",
    "list_rows",
    "load_json",
    "log_levels",
    "marks_of_running",
    "measure_checkpoints",
    "merge_lines",
    "metric_at",
    "metric_names",
    "new_id",
    "note_context",
    "note_experiment",
    "num_damaged_lines",
    "num_metric_names",
    "num_slots_of",
    "num_waiting",
    "number_by_state",
    "numbers_of",
    "once",
    "open_read_only",
    "primary_key",
    "raise_ids",
    "read_cluster_id",
    "read_curve",
    "read_known_files",
    "read_members",
    "read_environment",
    "read_rows",
    "read_series",
    "read_summary",
    "read_version",
    "rows_of_change",
    "rows_of_experiment",
    "sample_curve",
    "sample_trials",
    "settle_cluster_id",
    "slots_by_node",
    "smooth_at",
    "store_environment",
    "stored_members",
    "tables",
    "tagged",
    "time_shares",
    "trial_view",
    "trim_summaries",
    "watch_rows",
]
