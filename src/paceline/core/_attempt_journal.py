"""Journal of a process in an attempt: start, end, notices to its parent, and time account."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from time import perf_counter
from typing import Any, Literal

from paceline._base import journal_records as records
from paceline._base.exceptions import text_of
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import (
    RESTART_CAUSES_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    JournalKey,
    RunDirectory,
)
from paceline.core._arguments import EarlyExitReason, Outcome
from paceline.core._exceptions import (
    DistributedPeerError,
    GivenUpError,
    InvalidHP,
    NonFiniteError,
    PreemptedError,
)
from paceline.core._process_environment import describe_environment
from paceline.core._read_runs import summarize_run
from paceline.core._run_opening import OpenedRun
from paceline.storage._checkpoint_errors import failing_store_of

logger = logging.getLogger(__name__)

_WORKER_PROGRAM = "_paceline_program"
_CHANNEL_VARIABLE = "PACELINE_WORKER_CHANNEL"


RunEvent = Literal["run", "checkpoint", "completed", "invalid_hp"]
"""What became of a run: begun or resumed, a checkpoint committed, completed, refused by a rank."""


def send_run_event(event: RunEvent, journal: JournalWriter, text: str = "") -> None:
    """Notify the parent of an event of a journal's run in this process, if the parent watches."""
    reporter = _reporter()
    if reporter is not None:
        reporter.send_run_event(event, str(journal.directory.absolute().parent.parent), text)


def begin_signs_of_life() -> None:
    """Start sending heartbeats and the current activity to the parent, if the parent watches."""
    reporter = _reporter()
    if reporter is not None:
        reporter.begin_signs_of_life()


def _reporter() -> Any:
    """Return the channel to the parent; None outside of a worker group of Paceline."""
    if _WORKER_PROGRAM not in sys.modules and _CHANNEL_VARIABLE not in os.environ:
        return None
    # Import by name: `core` must not depend on the packages of its callers.
    return import_module("paceline._training.workers.channels")


TRAINING, VALIDATION, CHECKPOINT, OTHER = "training", "validation", "checkpoint", "other"
LOST = "lost"
# How often there is a record at most, besides those that a restart needs, in seconds.
_INTERVAL_S = 1.0

TimeEvent = Literal["start", "report", "checkpoint", "end"]
Record = Callable[[TimeEvent, int, dict[str, float]], None]


class TimeAccount:
    """Account of the seconds spent on each activity, from the first `begin` on.

    Args:
        record: Called with an event, the completed batches and the seconds so far; None on ranks
            that record nothing.
    """

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self._has_ended = False
        self._seconds = {VALIDATION: 0.0, CHECKPOINT: 0.0, OTHER: 0.0, LOST: 0.0}
        self._present: str | None = None
        self._since = self._recorded = 0.0
        self._data_wait_s = 0.0

    def begin(self, num_batches: int, what: str = TRAINING) -> None:
        """Begin to count, or spend the time on something else from now on."""
        is_new = self._present is None or self._has_ended
        self._switch(what)
        if is_new:
            self._note_time("start", num_batches)

    @contextmanager
    def spent_on(self, what: str, num_batches: int) -> Iterator[None]:
        """Count the time of a block as spent on an activity; blocks may be nested."""
        before = self._present or OTHER
        self.begin(num_batches, what)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, what: str, seconds: float) -> None:
        """Move seconds from training to another activity."""
        self._seconds[what] += seconds

    def report(self, num_batches: int, data_wait_s: float) -> None:
        """Record the seconds so far, unless the last record is less than a second old.

        Args:
            num_batches: The completed batches.
            data_wait_s: The wait for data since the first batch.
        """
        self._data_wait_s = data_wait_s
        if perf_counter() - self._recorded >= _INTERVAL_S:
            self._note_time("report", num_batches)

    def stored(self, num_batches: int, data_wait_s: float) -> None:
        """Record the seconds so far at a new checkpoint, a point to resume from."""
        self._data_wait_s = data_wait_s
        self._note_time("checkpoint", num_batches)

    def end(self, num_batches: int, data_wait_s: float) -> None:
        """Record the end of training; a later `begin` starts again."""
        if self._present is not None and not self._has_ended:
            self._data_wait_s = data_wait_s
            self._switch(OTHER)
            self._note_time("end", num_batches)

    def _switch(self, what: str) -> None:
        now = perf_counter()
        if self._present in self._seconds:
            self._seconds[self._present] += now - self._since
        self._present, self._since = what, now

    def _note_time(self, event: TimeEvent, num_batches: int) -> None:
        assert self._present is not None
        self._has_ended = event == "end"
        self._switch(self._present)
        self._recorded = perf_counter()
        if self._record is not None:
            seconds = {"data_wait": self._data_wait_s, **self._seconds}
            if not seconds[LOST]:
                del seconds[LOST]
            self._record(event, num_batches, seconds)


class ScriptTimes:
    """Time account of a script without a trainer, from its first report on.

    It knows the steps that the script reports. Time between reports and checkpoints counts as
    training. A block within a thread other than the main one counts nothing,
    as training may continue beside it.

    Args:
        record: The record function of a `TimeAccount`.
        steps_completed: The step from which the script resumes.
    """

    def __init__(self, record: Record | None, steps_completed: int) -> None:
        self._account = TimeAccount(record)
        self._is_counting = record is not None
        self._has_begun = False
        self._steps_completed = steps_completed
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Count no longer, as a trainer records its times itself."""
        self._is_counting = False

    def reported(self, steps_completed: int) -> None:
        """Count the time up to a report."""
        if self._is_counting:
            with self._lock:
                self._begin()
                # A report of an earlier step, as after a rollback, must not turn the account back.
                if steps_completed > self._steps_completed:
                    self._steps_completed = steps_completed
                self._account.report(self._steps_completed, 0.0)

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Count the time of a block."""
        is_main = threading.current_thread() is threading.main_thread()
        # Blocks of other threads run beside training, whose time would count twice.
        if not self._is_counting or not is_main:
            yield
            return
        with self._lock:
            self._begin()
        with self._account.spent_on(what, self._steps_completed):
            yield

    def stored(self, steps_completed: int) -> None:
        """Record a checkpoint as a point for the script to resume from."""
        if self._is_counting:
            with self._lock:
                self._begin()
                self._steps_completed = max(self._steps_completed, steps_completed)
                self._account.stored(steps_completed, 0.0)

    def end(self) -> None:
        """Record the end of the script."""
        if self._is_counting and self._has_begun:
            with self._lock:
                self._account.end(self._steps_completed, 0.0)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._account.begin(self._steps_completed)


_LONGEST_ERROR = 2000


def begin_journal(
    run: RunDirectory, opened: OpenedRun, *, rank: int = 0, world_size: int = 1
) -> JournalWriter:
    """Begin a process's journal; older rows beyond the resumed step are superseded.

    Args:
        run: The run directory on this node.
        opened: The attempt, its generation, and the checkpoint to resume from.
        rank: The process's rank.
        world_size: How many ranks there are.

    Raises:
        FileExistsError: There is one already.
        OSError: The run directory cannot be written to.
    """
    journal = JournalWriter(run.journal_path(JournalKey(opened.attempt, opened.generation, rank)))
    record_start(
        journal,
        attempt=opened.attempt,
        generation=opened.generation,
        rank=rank,
        world_size=world_size,
        resumed_from=opened.latest_checkpoint,
        steps_completed=opened.steps_completed,
    )
    return journal


def record_start(
    journal: JournalWriter,
    *,
    attempt: int,
    generation: int,
    rank: int,
    world_size: int,
    resumed_from: str | None,
    steps_completed: int,
    restart_causes: Sequence[str] = (),
    is_parent_notified: bool = True,
) -> None:
    """Record this process's start as a rank of an attempt, with the first step of its reports.

    Args:
        journal: The journal.
        attempt: The attempt.
        generation: The generation of its workers.
        rank: The rank.
        world_size: How many ranks there are.
        resumed_from: The checkpoint that it resumes from.
        steps_completed: The steps so far.
        restart_causes: The reasons why the workers of earlier starts ended, see `AttemptStarted`.
        is_parent_notified: Whether the parent process must be informed; it knows of a run that
            it has begun itself.
    """
    # World size 0: the record of a run's failed end, not a start of workers.
    is_chief = rank == 0 and world_size > 0
    # A master refuses longer texts, and with them the record.
    causes = tuple(cause[:_LONGEST_ERROR] for cause in (*restart_causes, *_take_restart_causes()))
    journal.append(
        records.AttemptStarted(
            time=time.time(),
            attempt=attempt,
            generation=generation,
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            host=os.uname().nodename,
            resumed_from=resumed_from,
            steps_completed=steps_completed,
            environment=_environment_to_record() if is_chief else None,
            restart_causes=causes if is_chief else (),
        )
    )
    if is_parent_notified:
        send_run_event("run", journal)


def _take_restart_causes() -> list[str]:
    """Return and remove the launcher's restart causes, so no later run or child reports them."""
    causes: list[str] = json.loads(os.environ.pop(RESTART_CAUSES_VARIABLE, "[]"))
    return causes


def _environment_to_record() -> dict[str, Any] | None:
    # A master knows the source of the code that it has unpacked.
    is_managed = RUN_DIRECTORY_VARIABLE in os.environ
    try:
        return describe_environment(with_source=not is_managed)
    except Exception:
        logger.exception("The environment cannot be recorded.")
        return None


def record_metrics(
    journal: JournalWriter,
    group: str,
    steps_completed: int,
    metrics: dict[str, Any],
    validation: bool | dict[str, Any] = False,
    number: int | None = None,
) -> int:
    """Append encoded metrics to the journal and return the number of the record.

    Args:
        journal: The journal.
        group: The group of the metrics.
        steps_completed: The step.
        metrics: The metrics.
        validation: The metrics that count as a validation too, see `MetricsReported`.
        number: The number of the report, unless it is the step.
    """
    return journal.append(
        records.MetricsReported(
            time=time.time(),
            group=group,
            steps_completed=steps_completed,
            metrics=metrics,
            validation=validation,
            number=number,
        )
    )


def record_time_spent(
    journal: JournalWriter, event: TimeEvent, steps_completed: int, seconds: dict[str, float]
) -> None:
    """Record the seconds spent so far on training and each other activity."""
    journal.append(
        records.TimeSpent(
            time=time.time(), event=event, steps_completed=steps_completed, seconds=seconds
        )
    )


def record_store_state(journal: JournalWriter, storage: str, reason: str | None) -> None:
    """Record why a storage is unreachable, or with None its return to service."""
    text = None if reason is None else reason[:_LONGEST_ERROR]
    journal.append(records.StoreChecked(time=time.time(), storage=storage, reason=text))


def end_journal(
    journal: JournalWriter,
    outcome: Outcome,
    error: BaseException | str | None,
    *,
    is_parent_notified: bool = True,
) -> None:
    """Record how a process has ended, and close its journal.

    Args:
        journal: The journal.
        outcome: How it has ended.
        error: The exception that ended the attempt, or its text by `describe_error`.
        is_parent_notified: See `record_start`.
    """
    if outcome is Outcome.INVALID_HP:
        reason = EarlyExitReason.INVALID_HP.value
        journal.append(records.EarlyExitReported(time=time.time(), reason=reason))
    if isinstance(error, NonFiniteError):
        journal.append(records.EarlyExitReported(time=time.time(), reason=records.DIVERGED))
    if outcome is Outcome.PREEMPTED and isinstance(error, PreemptedError):
        journal.append(records.PreemptionAcknowledged(time=time.time()))
    is_told = error is not None and outcome in (Outcome.ERROR, Outcome.INVALID_HP)
    if outcome is Outcome.INVALID_HP and isinstance(error, DistributedPeerError):
        # The rank that refused says why.
        is_told = False
    text = describe_error(error) if isinstance(error, BaseException) else error
    store = failing_store_of(error) if isinstance(error, BaseException) and is_told else None
    journal.append(
        records.AttemptFinished(
            time=time.time(),
            outcome=outcome.value,
            error=text if is_told else None,
            store=store,
            is_consequence=bool(getattr(error, "is_consequence", False)),
        )
    )
    journal.close()
    if outcome is Outcome.COMPLETED and is_parent_notified:
        send_run_event("completed", journal)


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception, cut to 2000 characters."""
    name, text = type(error).__name__, text_of(error)
    return f"{name}: {text}"[:_LONGEST_ERROR] if text else name


def outcome_of(error: BaseException | None) -> Outcome:
    """Return the outcome for the exception ending a process; `sys.exit(0)` counts as success."""
    if isinstance(error, InvalidHP):
        return Outcome.INVALID_HP
    # A person who presses Ctrl-C may want to resume: the run has not failed.
    if isinstance(error, (PreemptedError, GivenUpError, KeyboardInterrupt)):
        return Outcome.PREEMPTED
    if isinstance(error, DistributedPeerError) and error.error_type == InvalidHP.__name__:
        # Another rank has found it first, and this one waited for it.
        return Outcome.INVALID_HP
    is_clean = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
    return Outcome.COMPLETED if is_clean else Outcome.ERROR


def record_failed_end(
    run: RunDirectory, opened: OpenedRun, generation: int, error: BaseException
) -> None:
    """Record how a run has ended if the first rank has not: others failed, or none began.

    Args:
        run: The run directory.
        opened: Where the run began.
        generation: The number of a generation that has not begun.
        error: The error that ended the run.
    """
    try:
        summary = summarize_run(run.path)
        if summary.error is None:
            opened = replace(
                opened,
                generation=generation,
                latest_checkpoint=None,
                steps_completed=summary.last_step or 0,
            )
            journal = begin_journal(run, opened, world_size=0)
            end_journal(journal, outcome_of(error), error)
    except Exception:
        # The first error is the one to raise.
        logger.exception("The end of a failed run cannot be recorded.")
