"""Notice from a worker to its parent process about the runs that the worker has begun."""

import os
import sys
from importlib import import_module
from typing import Any

from paceline._errors import text_of
from paceline.journal import JournalWriter

_WORKER_PROGRAM = "_paceline_program"
_CHANNEL_VARIABLE = "PACELINE_WORKER_CHANNEL"


def tell_run_began(journal: JournalWriter) -> None:
    """Tell the parent that this process has begun, or goes on with, the run of a journal."""
    _tell("run", journal)


def tell_checkpoint_stored(journal: JournalWriter) -> None:
    """Tell the parent that this process has committed a checkpoint of a journal's run."""
    _tell("checkpoint", journal)


def tell_run_completed(journal: JournalWriter) -> None:
    """Tell the parent that the run of a journal has come to its end."""
    _tell("completed", journal)


def tell_invalid_hp(journal: JournalWriter, error: Exception) -> None:
    """Tell the parent that this process has ended a journal's run for all ranks, and why."""
    _tell("invalid_hp", journal, text_of(error))


def begin_signs_of_life() -> None:
    """Have the parent see that this process lives, and what it is at, if the parent looks."""
    reporter = _reporter()
    if reporter is not None:
        reporter.begin_signs_of_life()


def _tell(event: str, journal: JournalWriter, text: str = "") -> None:
    reporter = _reporter()
    if reporter is not None:
        reporter.tell(event, str(journal.directory.absolute().parent.parent), text)


def _reporter() -> Any:
    """Return what talks to the parent; None where no worker group of Paceline started this one."""
    if _WORKER_PROGRAM not in sys.modules and _CHANNEL_VARIABLE not in os.environ:
        return None
    # By name, as `core` must not depend on the packages of its callers.
    return import_module("paceline.workers.pools._worker_events")
