"""The journal of one process in an attempt, with the records that begin and end it."""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline._errors import text_of
from paceline.core._enums import EarlyExitReason, Outcome
from paceline.core._environment import describe_environment
from paceline.core._errors import (
    DistributedPeerError,
    GivenUpError,
    InvalidHP,
    NonFiniteError,
    PreemptedError,
)
from paceline.core._notices_to_parent import tell_run_began, tell_run_completed
from paceline.core._open_run import OpenedRun
from paceline.core._run_summaries import summarize_run
from paceline.core._time_account import TimeEvent
from paceline.journal import (
    DIVERGED,
    RESTART_CAUSES_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    AttemptFinished,
    AttemptStarted,
    EarlyExitReported,
    JournalKey,
    JournalWriter,
    MetricsReported,
    PreemptionAcknowledged,
    RunDirectory,
    StoreChecked,
    TimeSpent,
)
from paceline.storage import failing_store_of

logger = logging.getLogger(__name__)

_LONGEST_ERROR = 2000


def begin_journal(
    run: RunDirectory, opened: OpenedRun, *, rank: int = 0, world_size: int = 1
) -> JournalWriter:
    """Begin a process's journal; rows beyond the step that the run goes on from are superseded.

    Args:
        run: The run directory on this node.
        opened: Which attempt and generation it is, and what it goes on from.
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
    is_parent_told: bool = True,
) -> None:
    """Record that this process is a rank of an attempt, and from which step on it reports.

    Args:
        journal: The journal.
        attempt: The attempt.
        generation: The generation of it.
        rank: The rank.
        world_size: How many ranks there are.
        resumed_from: The checkpoint that it goes on from.
        steps_completed: The steps so far.
        restart_causes: What ended the workers of earlier starts, see `AttemptStarted`.
        is_parent_told: Whether the parent process must hear of it; it knows of a run that it has
            begun itself.
    """
    is_chief = rank == 0 and world_size > 0
    causes = (*restart_causes, *_take_restart_causes())
    journal.append(
        AttemptStarted(
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
    if is_parent_told:
        tell_run_began(journal)


def _take_restart_causes() -> list[str]:
    """Return what the launcher tells, once: it holds for no later run and no further process."""
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
    """Record metrics that are encoded, and return the number of the record.

    Args:
        journal: The journal.
        group: The group of the metrics.
        steps_completed: The step.
        metrics: The metrics.
        validation: What of them counts as a validation too, see `MetricsReported`.
        number: The number of the report, unless it is the step.
    """
    return journal.append(
        MetricsReported(
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
    """Record what training has spent its time on so far."""
    journal.append(
        TimeSpent(time=time.time(), event=event, steps_completed=steps_completed, seconds=seconds)
    )


def record_store_state(journal: JournalWriter, storage: str, reason: str | None) -> None:
    """Record that a storage does not answer for a reason, or with None that it answers again."""
    journal.append(StoreChecked(time=time.time(), storage=storage, reason=reason))


def end_journal(
    journal: JournalWriter,
    outcome: Outcome,
    error: BaseException | str | None,
    *,
    is_parent_told: bool = True,
) -> None:
    """Record how a process has ended, and close its journal.

    Args:
        journal: The journal.
        outcome: How it has ended.
        error: The exception that has ended it, or what `describe_error` says of that.
        is_parent_told: See `record_start`.
    """
    if outcome is Outcome.INVALID_HP:
        reason = EarlyExitReason.INVALID_HP.value
        journal.append(EarlyExitReported(time=time.time(), reason=reason))
    if isinstance(error, NonFiniteError):
        journal.append(EarlyExitReported(time=time.time(), reason=DIVERGED))
    if outcome is Outcome.PREEMPTED and isinstance(error, PreemptedError):
        journal.append(PreemptionAcknowledged(time=time.time()))
    is_told = error is not None and outcome in (Outcome.ERROR, Outcome.INVALID_HP)
    if outcome is Outcome.INVALID_HP and isinstance(error, DistributedPeerError):
        # The rank that refused says why.
        is_told = False
    text = describe_error(error) if isinstance(error, BaseException) else error
    store = failing_store_of(error) if isinstance(error, BaseException) and is_told else None
    journal.append(
        AttemptFinished(
            time=time.time(),
            outcome=outcome.value,
            error=text if is_told else None,
            store=store,
            is_consequence=bool(getattr(error, "is_consequence", False)),
        )
    )
    journal.close()
    if outcome is Outcome.COMPLETED and is_parent_told:
        tell_run_completed(journal)


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception, cut where that is very long."""
    name, text = type(error).__name__, text_of(error)
    return f"{name}: {text}"[:_LONGEST_ERROR] if text else name


def outcome_of(error: BaseException | None) -> Outcome:
    """Return how what ended a process is counted; leaving by `sys.exit(0)` is no error."""
    if isinstance(error, InvalidHP):
        return Outcome.INVALID_HP
    if isinstance(error, (PreemptedError, GivenUpError)):
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
        error: What has ended the run.
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
