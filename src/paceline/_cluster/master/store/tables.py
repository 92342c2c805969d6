"""Tables of experiments, trials, attempts, metrics, nodes and the master itself."""

import json
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    select,
    text,
)

from paceline._cluster.master.store.reach import (
    DEFAULT_PROJECT,
    FIRST_USER,
    current_project,
    current_user,
)
from paceline._cluster.master.store.user_tables import Id, metadata


class ScalarColumn(TypeDecorator[Any]):
    """Any JSON value, numbers included, as text.

    A bare number in a column of type JSON becomes one of SQLite's own, whose last digit may differ.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        """Encode a value."""
        return None if value is None else json.dumps(value, allow_nan=False)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """Decode a value."""
        return None if value is None else json.loads(value)


# Row per (trial, attempt, group, key): the summary, and the newest points up to a full
# chunk. Points lie in columns: steps as int64, times and float values as float64.
series = Table(
    "series",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("trial_id", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("group", String, nullable=False),
    Column("key", String, nullable=False),
    Column("num_points", BigInteger, nullable=False),
    Column("num_numbers", BigInteger, nullable=False),
    Column("sum", Float),
    Column("min", Float),
    Column("max", Float),
    Column("last", ScalarColumn),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("kind", String, nullable=False),
    Column("steps", LargeBinary, nullable=False),
    Column("times", LargeBinary, nullable=False),
    Column("value_bytes", LargeBinary, nullable=False),
    UniqueConstraint("trial_id", "attempt", "group", "key"),
)

chunks = Table(
    "chunks",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("series_id", ForeignKey("series.id"), nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("kind", String, nullable=False),
    Column("steps", LargeBinary, nullable=False),
    Column("times", LargeBinary, nullable=False),
    Column("value_bytes", LargeBinary, nullable=False),
    # Holds all that says where points lie, so that no chunk is touched before it is read.
    Index("ix_chunks_series", "series_id", "first_step", "last_step"),
)

# The metrics that the trials of an experiment reported, kept by a trigger as well.
metric_names = Table(
    "metric_names",
    metadata,
    Column("experiment_id", BigInteger, primary_key=True, autoincrement=False),
    Column("group", String, primary_key=True),
    Column("key", String, primary_key=True),
    Index("ix_metric_names", "group", "key"),
    sqlite_with_rowid=False,
)


# The search's input log: applying `input` to the state before it gave `operations`.
search_inputs = Table(
    "search_inputs",
    metadata,
    Column("experiment_id", ForeignKey("experiments.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("input", JSON, nullable=False),
    Column("operations", JSON, nullable=False),
)

# The newest snapshot of each search and how many inputs it includes.
search_snapshots = Table(
    "search_snapshots",
    metadata,
    Column("experiment_id", ForeignKey("experiments.id"), primary_key=True),
    Column("num_inputs", Integer, nullable=False),
    Column("snapshot", JSON, nullable=False),
)

# Rung views of searches as JSON, with the number of search inputs included.
search_views = Table(
    "search_views",
    metadata,
    Column("experiment_id", ForeignKey("experiments.id"), primary_key=True),
    Column("num_inputs", Integer, nullable=False),
    Column("view", LargeBinary, nullable=False),
)


# Files of trials: media, saved files and artifacts. Their content lies below `files` in the home.
run_files = Table(
    "run_files",
    metadata,
    Column("trial_id", ForeignKey("trials.id"), primary_key=True),
    Column("path", String, primary_key=True),
    Column("experiment_id", BigInteger, nullable=False),
    Column("digest", String, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("media_type", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("ix_run_files_digest", "digest"),
    Index("ix_run_files_experiment", "experiment_id"),
    sqlite_with_rowid=False,
)

# Media as reported; `files` names rows of `run_files` by their path.
media = Table(
    "media",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("trial_id", ForeignKey("trials.id"), nullable=False),
    Column("experiment_id", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("group", String, nullable=False),
    Column("name", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("steps_completed", BigInteger, nullable=False),
    Column("time", Float, nullable=False),
    Column("files", JSON, nullable=False),
    Column("value", ScalarColumn),
    Index("ix_media_trial", "trial_id", "group", "name", "steps_completed", "id"),
    Index("ix_media_experiment", "experiment_id"),
)

# What clients of other trackers keep here, in the form in which they ask for it: projects, runs,
# artifacts, registered models. `kind` begins with the client.
documents = Table(
    "documents",
    metadata,
    Column("kind", String, primary_key=True),
    Column("parent", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("content", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("changed_at", Float, nullable=False),
    # Of the run's experiment; goes with it.
    Column("experiment_id", BigInteger),
    # Of what belongs to no experiment.
    Column("project_id", BigInteger, nullable=False, default=current_project,
           server_default=str(DEFAULT_PROJECT)),
    Index("ix_documents_experiment", "experiment_id"),
    sqlite_with_rowid=False,
)  # fmt: skip


SCHEMA_VERSION = 23
FIRST_SCHEMA_VERSION = 13
"""Schema version of the first release: no later one takes an older database."""


meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", String, nullable=False),
)

VERSION = select(meta.c.value).where(meta.c.key == "schema_version")

experiments = Table(
    "experiments",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("name", String, nullable=False),
    Column("state", String, nullable=False),
    Column("config", JSON, nullable=False),
    Column("submitted_config", Text),
    Column("context_digest", String),
    Column("warnings", JSON, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("progress", Float, nullable=False, default=0.0),
    Column("best_trial_id", BigInteger),
    Column("best_metric", Float),
    Column("error", Text),
    Column("parent_trial_id", BigInteger),
    # How the search ended: null while it may still create trials.
    Column("search_end", String),
    Column("retention_done", Boolean, nullable=False, default=False),
    # Run id and run directory of a run made without a master.
    Column("external_id", String, unique=True),
    Column("external_path", String),
    # Texts editable by users; description and labels start with the values of the configuration.
    Column("description", Text, nullable=False, default="", server_default=""),
    Column("labels", JSON, nullable=False, default=list, server_default="[]"),
    Column("notes", Text, nullable=False, default="", server_default=""),
    Column("is_archived", Boolean, nullable=False, default=False, server_default=false()),
    Column("forked_from", BigInteger),
    # The sum of its trials' counts.
    Column("num_records_lost", BigInteger, nullable=False, default=0, server_default="0"),
    # Null takes the configuration's value; a null place means the order of arrival. See
    # `pools.py` in `scheduling`.
    Column("priority", Integer),
    Column("weight", Float),
    Column("queue_place", Float),
    # Lease of a live-reported run made without a master: seconds of allowed silence;
    # null means no limit.
    Column("report_lease_s", Float),
    # Null takes the configuration's value; 0 is no limit.
    Column("max_slots", Integer),
    # The commit of its code and the uncommitted changes, as the submitter reported them.
    Column("source", JSON(none_as_null=True)),
    Column("owner", String, nullable=False, default=current_user, server_default=FIRST_USER),
    Column("project_id", BigInteger, nullable=False, default=current_project,
           server_default=str(DEFAULT_PROJECT)),
    Index("ix_experiments_state", "state"),
    Index("ix_experiments_project", "project_id", "state", "is_archived"),
    Index("ix_experiments_owner", "owner"),
    Index("ix_experiments_retention", "retention_done"),
    # The orders of the list, among those that are archived and those that are not.
    Index("ix_experiments_archived", "is_archived"),
    Index("ix_experiments_name", "is_archived", text("name COLLATE NOCASE")),
    # A search reads it in place of rows, which are large.
    Index("ix_experiments_texts", "name", "description", "labels"),
    Index("ix_experiments_created", "is_archived", "created_at"),
    Index("ix_experiments_ended", "is_archived", "ended_at"),
    Index("ix_experiments_best", "is_archived", "best_metric"),
    Index("ix_experiments_progress", "is_archived", "progress"),
)  # fmt: skip

trials = Table(
    "trials",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("experiment_id", ForeignKey("experiments.id"), nullable=False),
    Column("request_id", String, nullable=False),
    Column("state", String, nullable=False),
    Column("hparams", JSON, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("restarts", Integer, nullable=False, default=0),
    Column("num_attempts", Integer, nullable=False, default=0),
    Column("steps_completed", BigInteger, nullable=False, default=0),
    Column("progress", Float),
    Column("status", Text),
    # Null stands for NaN too: a NaN is never the best.
    Column("best_metric", Float),
    Column("best_step", BigInteger),
    Column("latest_metric", ScalarColumn),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("stop_reason", String),
    Column("error", Text),
    Column("source_checkpoint", String),
    Column("uses_operations", Boolean, nullable=False, default=False),
    Column("target_length", BigInteger),
    Column("operations_closed", Boolean, nullable=False, default=False),
    # Records of its journals that were damaged, or that could not be stored.
    Column("num_records_lost", BigInteger, nullable=False, default=0, server_default="0"),
    # Run metadata set by the user's code, and the newest alerts.
    Column("metadata", JSON),
    Column("alerts", JSON),
    # Attempts that followed a transient error; the kind of error of `error`.
    Column("retries", Integer, nullable=False, default=0, server_default="0"),
    Column("error_kind", String),
    # It pauses until its search has it train further.
    Column("is_waiting", Boolean, nullable=False, default=False, server_default=false()),
    UniqueConstraint("experiment_id", "request_id"),
    Index("ix_trials_state", "state"),
    Index("ix_trials_experiment", "experiment_id", "state"),
    Index("ix_trials_best", "experiment_id", "best_metric"),
    # Within one experiment in order of id.
    Index("ix_trials_id", "experiment_id"),
    Index("ix_trials_steps", "experiment_id", "steps_completed"),
    Index("ix_trials_created", "experiment_id", "created_at"),
    Index("ix_trials_ended", "experiment_id", "ended_at"),
    Index("ix_trials_restarts", "experiment_id", "restarts"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("trial_id", ForeignKey("trials.id"), nullable=False),
    Column("experiment_id", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("slots", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("resumed_from", String),
    Column("resumed_steps", BigInteger, nullable=False, default=0),
    Column("preempt_reason", String),
    Column("preempt_acknowledged", Boolean, nullable=False, default=False),
    Column("early_exit", String),
    Column("outcome", String),
    Column("error", Text),
    Column("should_kill", Boolean, nullable=False, default=False),
    Column("control_version", Integer, nullable=False, default=1),
    Column("exit", JSON),
    # Journals of a run made without a master, and the time of its last record. Null for
    # attempts started by a runner.
    Column("run_attempt", Integer),
    Column("run_generation", Integer),
    Column("last_record_at", Float),
    # The attempt's node, or the node of rank 0; null is the master's own machine.
    Column("node_id", BigInteger),
    # Parts of an attempt on several nodes (see `Member`), and the port for their rendezvous.
    Column("members", JSON(none_as_null=True)),
    Column("meeting_port", Integer),
    # The digest of its chief's environment.
    Column("environment", String),
    # The name of its node, for when that is forgotten.
    Column("node_name", String),
    # Causes of worker restarts, by the generation started after them.
    Column("restart_causes", JSON(none_as_null=True)),
    # Whether it overtook a trial that was too large for the free slots.
    Column("is_filler", Boolean, nullable=False, default=False, server_default=false()),
    UniqueConstraint("trial_id", "number"),
    Index("ix_attempts_state", "state"),
    # Covers the order in which an experiment's trials began.
    Index("ix_attempts_began", "experiment_id", "number", "created_at", "trial_id"),
    # By pattern of a log policy: its action, the first line with it, and the node of that line.
    Column("log_hits", JSON),
    # How many of its slots are GPUs; and once it has ended, the seconds of training that was kept
    # and that was lost, if its trainer told of its time.
    Column("num_gpus", Integer),
    Column("spent", JSON(none_as_null=True)),
    # Indexes for recent failures, and for the last attempts on a node.
    Index("ix_attempts_ended", "ended_at"),
    Index("ix_attempts_node", "node_id", "id"),
    Index("ix_attempts_environment", "environment"),
    Index("ix_attempts_hits", "trial_id", sqlite_where=text("log_hits IS NOT NULL")),
)

# Compressed JSON. Attempts have equal ones, so they are stored once.
environments = Table(
    "environments",
    metadata,
    Column("digest", String, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

journal_marks = Table(
    "journal_marks",
    metadata,
    Column("attempt_id", ForeignKey("attempts.id"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("sequence", BigInteger, nullable=False),
)

# Time use of an attempt's chief: the records at the start of a session or after a
# checkpoint, and the newest record. Each generation is a session.
time_marks = Table(
    "time_marks",
    metadata,
    Column("attempt_id", ForeignKey("attempts.id"), primary_key=True),
    Column("generation", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("event", String, nullable=False),
    Column("steps_completed", BigInteger, nullable=False),
    Column("seconds", JSON, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("uuid", String, primary_key=True),
    Column("trial_id", ForeignKey("trials.id"), nullable=False),
    Column("experiment_id", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("steps_completed", BigInteger, nullable=False),
    Column("state", String, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("resources", JSON, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("storage", String, nullable=False),
    Column("created_at", Float, nullable=False),
    # The searched metric at the checkpoint's step. Null stands for NaN too.
    Column("metric", Float),
    Index("ix_checkpoints_trial", "trial_id", "steps_completed", "created_at", "uuid"),
    Index("ix_checkpoints_experiment", "experiment_id", "steps_completed", "created_at", "uuid"),
    Index(
        "ix_checkpoints_metric", "experiment_id", "metric", "steps_completed", "created_at", "uuid"
    ),
)

# How many rows there are in each state, so that nothing has to be counted; the experiment 0 stands
# for all of them. Kept by triggers: see `row_ids_and_counts.py`.
counts = Table(
    "counts",
    metadata,
    Column("kind", String, primary_key=True),
    Column("experiment_id", BigInteger, primary_key=True, autoincrement=False),
    Column("state", String, primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("experiment_id", BigInteger, nullable=False),
    Column("trial_id", BigInteger),
    Column("kind", String, nullable=False),
    Column("data", JSON, nullable=False),
    Index("ix_events_experiment", "experiment_id", "id"),
    # Ids must not be used again after old events were deleted: clients hold them as cursors.
    sqlite_autoincrement=True,
)

# Machines whose runner has registered. `facts` are those that it gave; `session` is the fencing
# token of its polls.
nodes = Table(
    "nodes",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("name", String, nullable=False, unique=True),
    Column("key", String, nullable=False),
    Column("session", Integer, nullable=False),
    Column("token_id", BigInteger),
    Column("facts", JSON, nullable=False),
    Column("is_draining", Boolean, nullable=False, default=False, server_default=false()),
    Column("registered_at", Float, nullable=False),
    # Last contact, not written at each poll: only a restarted master reads this column.
    Column("seen_at", Float),
    Column("has_left", Boolean, nullable=False, default=False, server_default=false()),
)

# How pools are shared. A node that names no pool belongs to the first one, by name, whose labels it
# has; one without labels takes in no node.
pools = Table(
    "pools",
    metadata,
    Column("name", String, primary_key=True),
    Column("policy", String, nullable=False),
    Column("max_slots", Integer),
    Column("labels", JSON, nullable=False),
    Column("backfill", Boolean, nullable=False, default=False, server_default=false()),
    # Under `fair_share`, past use counts by half for each so many hours.
    Column("half_life_hours", Float),
    # Trials that report nothing, or do not use their slots, for so long; and when they are paused.
    Column("silent_after_s", Float),
    Column("unused_after_s", Float),
    Column("pause_after_s", Float),
    # The best priority of those who are no administrators, and whose trials it takes; null is any.
    Column("best_priority", Integer),
    Column("open_to", JSON),
    # Trials start only on runners of their user.
    Column("own_runners", Boolean, nullable=False, default=False, server_default=false()),
    # Hours in which interactive trials come first, as a text.
    Column("interactive_first", String),
)

# Slots that get no attempts; the node 0 is the master's own machine.
drained_slots = Table(
    "drained_slots",
    metadata,
    Column("node_id", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", Integer, primary_key=True, autoincrement=False),
)

# Rows that the records beside the database do not have yet. Triggers add to it, in the transaction
# that changes the row.
unrecorded = Table(
    "unrecorded",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=True),
    Column("experiment_id", BigInteger),
    Column("kind", String, nullable=False),
    Column("row_id", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
