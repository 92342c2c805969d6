"""Executors of attempts: this machine, and those of other packages."""

from paceline.master.executors._executor_base import (
    AttemptStatus,
    Executor,
    ExecutorContext,
    Launch,
)
from paceline.master.executors._executor_registry import executor_named
from paceline.master.executors._local_executor import LocalExecutor

__all__ = [
    "AttemptStatus",
    "Executor",
    "ExecutorContext",
    "Launch",
    "LocalExecutor",
    "executor_named",
]
