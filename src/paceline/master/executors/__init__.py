"""Executors of attempts: this machine; clusters later."""

from paceline.master.executors._base import AttemptStatus, Executor, Launch
from paceline.master.executors._local import LocalExecutor

__all__ = ["AttemptStatus", "Executor", "Launch", "LocalExecutor"]
