"""Tables of metrics: series, their points, and their names."""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
)

from paceline.master.store._column_types import Id, ScalarColumn, metadata

# One row per (trial, attempt, group, key): the summary, and the newest points until they fill a
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
