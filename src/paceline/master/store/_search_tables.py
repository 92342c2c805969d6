"""Tables of searches: their inputs, snapshots and views."""

from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, LargeBinary, Table

from paceline.master.store._column_types import metadata

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

# What a search shows of its rungs, as JSON, and how many of its inputs that includes.
search_views = Table(
    "search_views",
    metadata,
    Column("experiment_id", ForeignKey("experiments.id"), primary_key=True),
    Column("num_inputs", Integer, nullable=False),
    Column("view", LargeBinary, nullable=False),
)
