"""Tables of experiments, trials, attempts, metrics, nodes and the master itself."""

import json
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.store.reach import (
    DEFAULT_PROJECT,
    FIRST_USER,
    current_project,
    current_user,
)
from paceline._cluster.master.store.user_tables import Id, metadata


class ScalarColumn(sa.TypeDecorator[Any]):
    """Any JSON value, numbers included, as text.

    A bare number in a column of type JSON becomes one of SQLite's own, whose last digit may differ.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> str | None:
        """Encode a value."""
        return None if value is None else json.dumps(value, allow_nan=False)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """Decode a value."""
        return None if value is None else json.loads(value)


# Row per (trial, attempt, group, key): the summary, and the newest points up to a full
# chunk. Points lie in columns: steps as int64, times and float values as float64.
series = sa.Table(
    "series",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("trial_id", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("group", sa.String, nullable=False),
    sa.Column("key", sa.String, nullable=False),
    sa.Column("num_points", sa.BigInteger, nullable=False),
    sa.Column("num_numbers", sa.BigInteger, nullable=False),
    sa.Column("sum", sa.Float),
    sa.Column("min", sa.Float),
    sa.Column("max", sa.Float),
    sa.Column("last", ScalarColumn),
    sa.Column("first_step", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("steps", sa.LargeBinary, nullable=False),
    sa.Column("times", sa.LargeBinary, nullable=False),
    sa.Column("value_bytes", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("trial_id", "attempt", "group", "key"),
)

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("series_id", sa.ForeignKey("series.id"), nullable=False),
    sa.Column("first_step", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("steps", sa.LargeBinary, nullable=False),
    sa.Column("times", sa.LargeBinary, nullable=False),
    sa.Column("value_bytes", sa.LargeBinary, nullable=False),
    # Holds all that says where points lie, so that no chunk is touched before it is read.
    sa.Index("ix_chunks_series", "series_id", "first_step", "last_step"),
)

# The metrics that the trials of an experiment reported, kept by a trigger as well.
metric_names = sa.Table(
    "metric_names",
    metadata,
    sa.Column("experiment_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("group", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Index("ix_metric_names", "group", "key"),
    sqlite_with_rowid=False,
)


# The search's input log: applying `input` to the state before it gave `operations`.
search_inputs = sa.Table(
    "search_inputs",
    metadata,
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("input", sa.JSON, nullable=False),
    sa.Column("operations", sa.JSON, nullable=False),
)

# The newest snapshot of each search and how many inputs it includes.
search_snapshots = sa.Table(
    "search_snapshots",
    metadata,
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), primary_key=True),
    sa.Column("num_inputs", sa.Integer, nullable=False),
    sa.Column("snapshot", sa.JSON, nullable=False),
)

# Rung views of searches as JSON, with the number of search inputs included.
search_views = sa.Table(
    "search_views",
    metadata,
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), primary_key=True),
    sa.Column("num_inputs", sa.Integer, nullable=False),
    sa.Column("view", sa.LargeBinary, nullable=False),
)


# Files of trials: media, saved files and artifacts. Their content lies below `files` in the home.
run_files = sa.Table(
    "run_files",
    metadata,
    sa.Column("trial_id", sa.ForeignKey("trials.id"), primary_key=True),
    sa.Column("path", sa.String, primary_key=True),
    sa.Column("experiment_id", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("media_type", sa.String, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Index("ix_run_files_digest", "digest"),
    sa.Index("ix_run_files_experiment", "experiment_id"),
    sqlite_with_rowid=False,
)

# Media as reported; `files` names rows of `run_files` by their path.
media = sa.Table(
    "media",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("experiment_id", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("group", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("steps_completed", sa.BigInteger, nullable=False),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("files", sa.JSON, nullable=False),
    sa.Column("value", ScalarColumn),
    sa.Index("ix_media_trial", "trial_id", "group", "name", "steps_completed", "id"),
    sa.Index("ix_media_experiment", "experiment_id"),
)

# What clients of other trackers keep here, in the form in which they ask for it: projects, runs,
# artifacts, registered models. `kind` begins with the client.
documents = sa.Table(
    "documents",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("parent", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("content", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("changed_at", sa.Float, nullable=False),
    # Of the run's experiment; goes with it.
    sa.Column("experiment_id", sa.BigInteger),
    # Of what belongs to no experiment.
    sa.Column("project_id", sa.BigInteger, nullable=False, default=current_project,
           server_default=str(DEFAULT_PROJECT)),
    sa.Index("ix_documents_experiment", "experiment_id"),
    sqlite_with_rowid=False,
)  # fmt: skip


SCHEMA_VERSION = 23
FIRST_SCHEMA_VERSION = 13
"""Schema version of the first release: no later one takes an older database."""


meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)

VERSION = sa.select(meta.c.value).where(meta.c.key == "schema_version")

experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("config", sa.JSON, nullable=False),
    sa.Column("submitted_config", sa.Text),
    sa.Column("context_digest", sa.String),
    sa.Column("warnings", sa.JSON, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("progress", sa.Float, nullable=False, default=0.0),
    sa.Column("best_trial_id", sa.BigInteger),
    sa.Column("best_metric", sa.Float),
    sa.Column("error", sa.Text),
    sa.Column("parent_trial_id", sa.BigInteger),
    # How the search ended: null while it may still create trials.
    sa.Column("search_end", sa.String),
    sa.Column("retention_done", sa.Boolean, nullable=False, default=False),
    # Run id and run directory of a run made without a master.
    sa.Column("external_id", sa.String, unique=True),
    sa.Column("external_path", sa.String),
    # Texts editable by users; description and labels start with the values of the configuration.
    sa.Column("description", sa.Text, nullable=False, default="", server_default=""),
    sa.Column("labels", sa.JSON, nullable=False, default=list, server_default="[]"),
    sa.Column("notes", sa.Text, nullable=False, default="", server_default=""),
    sa.Column("is_archived", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.Column("forked_from", sa.BigInteger),
    # The sum of its trials' counts.
    sa.Column("num_records_lost", sa.BigInteger, nullable=False, default=0, server_default="0"),
    # Null takes the configuration's value; a null place means the order of arrival. See
    # `pools.py` in `scheduling`.
    sa.Column("priority", sa.Integer),
    sa.Column("weight", sa.Float),
    sa.Column("queue_place", sa.Float),
    # Lease of a live-reported run made without a master: seconds of allowed silence;
    # null means no limit.
    sa.Column("report_lease_s", sa.Float),
    # Null takes the configuration's value; 0 is no limit.
    sa.Column("max_slots", sa.Integer),
    # The commit of its code and the uncommitted changes, as the submitter reported them.
    sa.Column("source", sa.JSON(none_as_null=True)),
    sa.Column("owner", sa.String, nullable=False, default=current_user, server_default=FIRST_USER),
    sa.Column("project_id", sa.BigInteger, nullable=False, default=current_project,
           server_default=str(DEFAULT_PROJECT)),
    sa.Index("ix_experiments_state", "state"),
    sa.Index("ix_experiments_project", "project_id", "state", "is_archived"),
    sa.Index("ix_experiments_owner", "owner"),
    sa.Index("ix_experiments_retention", "retention_done"),
    # The orders of the list, among those that are archived and those that are not.
    sa.Index("ix_experiments_archived", "is_archived"),
    sa.Index("ix_experiments_name", "is_archived", sa.text("name COLLATE NOCASE")),
    # A search reads it in place of rows, which are large.
    sa.Index("ix_experiments_texts", "name", "description", "labels"),
    sa.Index("ix_experiments_created", "is_archived", "created_at"),
    sa.Index("ix_experiments_ended", "is_archived", "ended_at"),
    sa.Index("ix_experiments_best", "is_archived", "best_metric"),
    sa.Index("ix_experiments_progress", "is_archived", "progress"),
)  # fmt: skip

trials = sa.Table(
    "trials",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("experiment_id", sa.ForeignKey("experiments.id"), nullable=False),
    sa.Column("request_id", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("hparams", sa.JSON, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("restarts", sa.Integer, nullable=False, default=0),
    sa.Column("num_attempts", sa.Integer, nullable=False, default=0),
    sa.Column("steps_completed", sa.BigInteger, nullable=False, default=0),
    sa.Column("progress", sa.Float),
    sa.Column("status", sa.Text),
    # Null stands for NaN too: a NaN is never the best.
    sa.Column("best_metric", sa.Float),
    sa.Column("best_step", sa.BigInteger),
    sa.Column("latest_metric", ScalarColumn),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("stop_reason", sa.String),
    sa.Column("error", sa.Text),
    sa.Column("source_checkpoint", sa.String),
    sa.Column("uses_operations", sa.Boolean, nullable=False, default=False),
    sa.Column("target_length", sa.BigInteger),
    sa.Column("operations_closed", sa.Boolean, nullable=False, default=False),
    # Records of its journals that were damaged, or that could not be stored.
    sa.Column("num_records_lost", sa.BigInteger, nullable=False, default=0, server_default="0"),
    # Run metadata set by the user's code, and the newest alerts.
    sa.Column("metadata", sa.JSON),
    sa.Column("alerts", sa.JSON),
    # Attempts that followed a transient error; the kind of error of `error`.
    sa.Column("retries", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.Column("error_kind", sa.String),
    # It pauses until its search has it train further.
    sa.Column("is_waiting", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.UniqueConstraint("experiment_id", "request_id"),
    sa.Index("ix_trials_state", "state"),
    sa.Index("ix_trials_experiment", "experiment_id", "state"),
    sa.Index("ix_trials_best", "experiment_id", "best_metric"),
    # Within one experiment in order of id.
    sa.Index("ix_trials_id", "experiment_id"),
    sa.Index("ix_trials_steps", "experiment_id", "steps_completed"),
    sa.Index("ix_trials_created", "experiment_id", "created_at"),
    sa.Index("ix_trials_ended", "experiment_id", "ended_at"),
    sa.Index("ix_trials_restarts", "experiment_id", "restarts"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("experiment_id", sa.BigInteger, nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("slots", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("resumed_from", sa.String),
    sa.Column("resumed_steps", sa.BigInteger, nullable=False, default=0),
    sa.Column("preempt_reason", sa.String),
    sa.Column("preempt_acknowledged", sa.Boolean, nullable=False, default=False),
    sa.Column("early_exit", sa.String),
    sa.Column("outcome", sa.String),
    sa.Column("error", sa.Text),
    sa.Column("should_kill", sa.Boolean, nullable=False, default=False),
    sa.Column("control_version", sa.Integer, nullable=False, default=1),
    sa.Column("exit", sa.JSON),
    # Journals of a run made without a master, and the time of its last record. Null for
    # attempts started by a runner.
    sa.Column("run_attempt", sa.Integer),
    sa.Column("run_generation", sa.Integer),
    sa.Column("last_record_at", sa.Float),
    # The attempt's node, or the node of rank 0; null is the master's own machine.
    sa.Column("node_id", sa.BigInteger),
    # Parts of an attempt on several nodes (see `Member`), and the port for their rendezvous.
    sa.Column("members", sa.JSON(none_as_null=True)),
    sa.Column("meeting_port", sa.Integer),
    # The digest of its chief's environment.
    sa.Column("environment", sa.String),
    # The name of its node, for when that is forgotten.
    sa.Column("node_name", sa.String),
    # Causes of worker restarts, by the generation started after them.
    sa.Column("restart_causes", sa.JSON(none_as_null=True)),
    # Whether it overtook a trial that was too large for the free slots.
    sa.Column("is_filler", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.UniqueConstraint("trial_id", "number"),
    sa.Index("ix_attempts_state", "state"),
    # Covers the order in which an experiment's trials began.
    sa.Index("ix_attempts_began", "experiment_id", "number", "created_at", "trial_id"),
    # By pattern of a log policy: its action, the first line with it, and the node of that line.
    sa.Column("log_hits", sa.JSON),
    # How many of its slots are GPUs; and once it has ended, the seconds of training that was kept
    # and that was lost, if its trainer told of its time.
    sa.Column("num_gpus", sa.Integer),
    sa.Column("spent", sa.JSON(none_as_null=True)),
    # Indexes for recent failures, and for the last attempts on a node.
    sa.Index("ix_attempts_ended", "ended_at"),
    sa.Index("ix_attempts_node", "node_id", "id"),
    sa.Index("ix_attempts_environment", "environment"),
    sa.Index("ix_attempts_hits", "trial_id", sqlite_where=sa.text("log_hits IS NOT NULL")),
)

# Compressed JSON. Attempts have equal ones, so they are stored once.
environments = sa.Table(
    "environments",
    metadata,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

journal_marks = sa.Table(
    "journal_marks",
    metadata,
    sa.Column("attempt_id", sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)

# Time use of an attempt's chief: the records at the start of a session or after a
# checkpoint, and the newest record. Each generation is a session.
time_marks = sa.Table(
    "time_marks",
    metadata,
    sa.Column("attempt_id", sa.ForeignKey("attempts.id"), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("steps_completed", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.JSON, nullable=False),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("uuid", sa.String, primary_key=True),
    sa.Column("trial_id", sa.ForeignKey("trials.id"), nullable=False),
    sa.Column("experiment_id", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("steps_completed", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("resources", sa.JSON, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("storage", sa.String, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    # The searched metric at the checkpoint's step. Null stands for NaN too.
    sa.Column("metric", sa.Float),
    sa.Index("ix_checkpoints_trial", "trial_id", "steps_completed", "created_at", "uuid"),
    sa.Index("ix_checkpoints_experiment", "experiment_id", "steps_completed", "created_at", "uuid"),
    sa.Index(
        "ix_checkpoints_metric", "experiment_id", "metric", "steps_completed", "created_at", "uuid"
    ),
)

# How many rows there are in each state, so that nothing has to be counted; the experiment 0 stands
# for all of them. Kept by triggers: see `row_ids_and_counts.py`.
counts = sa.Table(
    "counts",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("experiment_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("experiment_id", sa.BigInteger, nullable=False),
    sa.Column("trial_id", sa.BigInteger),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index("ix_events_experiment", "experiment_id", "id"),
    # Ids must not be used again after old events were deleted: clients hold them as cursors.
    sqlite_autoincrement=True,
)

# Machines whose runner has registered. `facts` are those that it gave; `session` is the fencing
# token of its polls.
nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("key", sa.String, nullable=False),
    sa.Column("session", sa.Integer, nullable=False),
    sa.Column("token_id", sa.BigInteger),
    sa.Column("facts", sa.JSON, nullable=False),
    sa.Column("is_draining", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.Column("registered_at", sa.Float, nullable=False),
    # Last contact, not written at each poll: only a restarted master reads this column.
    sa.Column("seen_at", sa.Float),
    sa.Column("has_left", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
)

# How pools are shared. A node that names no pool belongs to the first one, by name, whose labels it
# has; one without labels takes in no node.
pools = sa.Table(
    "pools",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("policy", sa.String, nullable=False),
    sa.Column("max_slots", sa.Integer),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("backfill", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    # Under `fair_share`, past use counts by half for each so many hours.
    sa.Column("half_life_hours", sa.Float),
    # Trials that report nothing, or do not use their slots, for so long; and when they are paused.
    sa.Column("silent_after_s", sa.Float),
    sa.Column("unused_after_s", sa.Float),
    sa.Column("pause_after_s", sa.Float),
    # The best priority of those who are no administrators, and whose trials it takes; null is any.
    sa.Column("best_priority", sa.Integer),
    sa.Column("open_to", sa.JSON),
    # Trials start only on runners of their user.
    sa.Column("own_runners", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    # Hours in which interactive trials come first, as a text.
    sa.Column("interactive_first", sa.String),
)

# Slots that get no attempts; the node 0 is the master's own machine.
drained_slots = sa.Table(
    "drained_slots",
    metadata,
    sa.Column("node_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
)

# Rows that the records beside the database do not have yet. Triggers add to it, in the transaction
# that changes the row.
unrecorded = sa.Table(
    "unrecorded",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("experiment_id", sa.BigInteger),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("row_id", sa.BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
