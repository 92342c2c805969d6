"""A run that the chief has opened, as another rank has it."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from paceline.core._open_run import OpenedRun
from paceline.journal import RUN_DIRECTORY_VARIABLE, RunDirectory


def join_run(opened: OpenedRun, lock: ExitStack, *, is_chief: bool) -> OpenedRun:
    """Return what the chief has opened as this node has it, and mark the run as alive.

    Each node of a master's attempt has a run directory of its own, which its runner ships. Other
    runs are in one directory that all nodes see.

    Args:
        opened: What the chief has opened.
        lock: Holds the lock of this rank until it is closed.
        is_chief: Whether this process has opened it, and so holds the run's lock.
    """
    own = os.environ.get(RUN_DIRECTORY_VARIABLE)
    if own and opened.info.cluster_id:
        opened = replace(opened, path=Path(own), info=RunDirectory(Path(own)).read_info())
    if not is_chief:
        lock.enter_context(RunDirectory(opened.path).hold_rank_lock())
    return opened
