"""Starters: what starts the runners of nodes on the machines of a pool, when trials wait."""

from paceline.master.starters._pool_file import (
    POOL_FILE,
    PoolDefinition,
    read_pool_definitions,
    read_pool_file,
)
from paceline.master.starters._pool_runners import PoolRunners
from paceline.master.starters._starter_base import RunnerOrder, Starter, StarterError
from paceline.master.starters._starter_registry import starter_named

__all__ = [
    "POOL_FILE",
    "PoolDefinition",
    "PoolRunners",
    "RunnerOrder",
    "Starter",
    "StarterError",
    "read_pool_definitions",
    "read_pool_file",
    "starter_named",
]
