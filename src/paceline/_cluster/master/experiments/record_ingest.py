"""Ingest of journal records; lost records."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from paceline import faults
from paceline._base import journal_records as records
from paceline._cluster.master.experiments.attempts import (
    check_not_over,
    has_kept_memory,
    read_attempt,
)
from paceline._cluster.master.experiments.checkpoints import (
    store_checkpoint,
    take_checkpoint_deletion,
)
from paceline._cluster.master.experiments.idle_trials import Activities
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.searches.best_values import (
    CHIEF,
    Validations,
    recompute_best,
    small_metrics,
    take_operation,
    with_validations,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    config_of,
    read_members,
    store_environment,
)
from paceline._cluster.master.store.attempt_times import add_time_mark
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.metric_rows import (
    add_metrics,
    has_points_beyond,
    measure_checkpoints,
)
from paceline._cluster.master.store.metric_summaries import trim_summaries
from paceline._cluster.master.store.row_ids_and_counts import update_attempt, update_row
from paceline._cluster.master.store.run_files import add_media
from paceline._cluster.messages.record_checks import check_record
from paceline._cluster.messages.runner_messages import Mark, RecordBatch
from paceline._cluster.messages.states import AttemptState

Numbered = Sequence[tuple[int, records.AnyRecord]]

# Limit on a trial's log lines about lost records; counting continues.
_MAX_TOLD = 20
_MISSING = "damaged or missing in the journal"


def take_lost_records(
    changes: StateChanges,
    transaction: Transaction,
    attempt: sa.Row[Any],
    whose: str,
    mark: int,
    new: Numbered,
) -> None:
    """Count the records missing from a journal, and report them in the trial's log.

    The numbers of a journal have no gaps. A number that is passed over is a record that is lost,
    and so is one that was sent as lost.

    Args:
        changes: Where the trial's log goes.
        transaction: Everything happens in it, or nothing.
        attempt: The attempt that wrote the journal.
        whose: The rank and the generation, in words.
        mark: The number of the last record that is stored.
        new: The records that follow it, with their numbers.

    Raises:
        ValueError: More records are missing than any damage takes away.
    """
    texts: list[str] = []
    reasons: list[str] = []
    num_lost = 0
    for first, last in find_record_gaps(mark, [number for number, _ in new]):
        if last - first >= records.MAX_GAP:
            raise ValueError(
                f"A journal must lack at most {records.MAX_GAP} records in one place, but lacks"
                f" records {first} to {last}."
            )
        num_lost += last - first + 1
        if first == last:
            texts.append(f"Record {first} of {whose} is lost: its line is {_MISSING}.")
        else:
            text = f"Records {first} to {last} of {whose} are lost: their lines are {_MISSING}."
            texts.append(text)
    for number, record in new:
        if isinstance(record, records.RecordLost):
            num_lost += 1
            texts.append(f"Record {number} of {whose} is lost: {record.reason}.")
        elif isinstance(record, records.RecordsDropped):
            # Their numbers are missing before this record, so they are counted.
            reasons.append(
                f"{record.count} reports of {whose} were lost: the disk stayed full for too long."
            )
    if num_lost:
        num_before = _count_lost_records(changes, transaction, attempt, num_lost)
        texts = texts[: max(0, _MAX_TOLD - num_before)]
    for text in texts + reasons:
        changes.note(transaction, attempt.trial_id, attempt.number, "ERROR", text)


def find_record_gaps(mark: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each gap after `mark`."""
    if not numbers or numbers[-1] - mark == len(numbers):
        return []
    befores = [mark, *numbers]
    pairs = zip(befores, numbers, strict=False)
    return [(before + 1, number - 1) for before, number in pairs if number > before + 1]


def _count_lost_records(
    changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any], num_lost: int
) -> int:
    """Add to the counts of the trial and its experiment; return how many the trial had lost."""
    trial = changes.brief_trial(transaction.connection, attempt.trial_id)
    for table, row_id in (
        (tables.trials, trial.id),
        (tables.experiments, trial.experiment_id),
    ):
        num_now = table.c.num_records_lost + num_lost
        update_row(transaction.connection, table, row_id, num_records_lost=num_now)
    num_before: int = trial.num_records_lost
    return num_before


faults.register("master.records.stored")

_INVALID_HP = "invalid_hp"
_NUM_ALERTS = 20
_LOG_LEVELS = {"debug": "DEBUG", "info": "INFO", "warn": "WARNING", "error": "ERROR"}


class RecordIngest:
    """Store journal records of attempts; used in the writer thread, inside a transaction."""

    def __init__(self, changes: StateChanges) -> None:
        self._changes = changes
        self.activities = Activities()

    def store(
        self, transaction: Transaction, attempt_id: int, batches: Sequence[RecordBatch]
    ) -> list[Mark]:
        """Store the records beyond the marks and return the new marks.

        Records, marks and the search decisions that follow are one transaction: after a crash
        between any two instructions, either everything is there or nothing.

        Raises:
            NotFoundError: There is no such attempt.
            RefusedError: The attempt has ended.
            ValueError: A record has a value that cannot be.
        """
        for batch in batches:
            for number, record in batch.records:
                check_record(record, number)
        connection = transaction.connection
        attempt = read_attempt(connection, attempt_id)
        check_not_over(attempt)
        self._mark_running(transaction, attempt)
        marks = _read_marks(connection, attempt_id)
        for batch in batches:
            mark = marks.get((batch.generation, batch.rank), -1)
            if batch.after is not None and batch.after > mark:
                continue  # by the marks in the answer the runner sends the missing records
            fresh = [(number, record) for number, record in batch.records if number > mark]
            if not fresh:
                continue
            # Mark and rows share a transaction, so a batch sent twice is stored once.
            key = {"attempt_id": attempt_id, "generation": batch.generation, "rank": batch.rank}
            connection.execute(_MARK, key | {"sequence": fresh[-1][0]})
            is_first = batch.rank == CHIEF and all(rank != CHIEF for _, rank in marks)
            marks[batch.generation, batch.rank] = fresh[-1][0]
            whose = f"rank {batch.rank} (generation {batch.generation})"
            if is_first and isinstance(start := fresh[0][1], records.AttemptStarted):
                attempt = self._take_start(transaction, attempt, start)
            take_lost_records(self._changes, transaction, attempt, whose, mark, fresh)
            fresh_records = with_validations(
                connection, attempt, batch.rank, [record for _, record in fresh]
            )
            self._take_records(transaction, attempt, batch.rank, fresh_records)
            self.activities.note_records(attempt.id, fresh_records)
            _take_times(connection, attempt.id, batch, fresh_records)
        faults.reach("master.records.stored")
        return [Mark(generation, rank, n) for (generation, rank), n in sorted(marks.items())]

    def _mark_running(self, transaction: Transaction, attempt: sa.Row[Any]) -> None:
        is_waiting = attempt.members is not None and attempt.meeting_port is None
        if attempt.state != AttemptState.PENDING.value or is_waiting:
            return
        running = AttemptState.RUNNING.value
        update_attempt(transaction.connection, attempt.id, state=running, started_at=time.time())
        transaction.emit(
            "attempt_started",
            attempt.experiment_id,
            attempt.trial_id,
            number=attempt.number,
            slots=attempt.slots,
            num_nodes=len(read_members(attempt)) or 1,
            node=attempt.node_name,
        )
        self._recompute_beyond(transaction, attempt)

    def _recompute_beyond(
        self, transaction: Transaction, attempt: sa.Row[Any], since: int | None = None
    ) -> None:
        """Work out anew what depends on reports beyond the step from which an attempt resumed.

        `since` is the step from which it seemed to resume before, if that was another one.
        """
        least = attempt.resumed_steps if since is None else since
        if attempt.number > 1 and has_points_beyond(
            transaction.connection, attempt.trial_id, least
        ):
            trial = self._changes.brief_trial(transaction.connection, attempt.trial_id)
            trim_summaries(transaction.connection, trial.id, since)
            recompute_best(self._changes, transaction, trial)
            measure_checkpoints(
                transaction.connection,
                trial.id,
                _searched_metric(transaction.connection, trial.experiment_id),
                least=least + 1,
            )

    def _take_start(
        self, transaction: Transaction, attempt: sa.Row[Any], record: records.AttemptStarted
    ) -> sa.Row[Any]:
        """Return the attempt, with the step of the state in memory that it began with, if any.

        Its runner keeps a state only if this master has all reports of the attempt before.
        """
        since, steps = attempt.resumed_steps, record.steps_completed
        if steps <= since or not has_kept_memory(transaction.connection, attempt):
            return attempt
        update_attempt(transaction.connection, attempt.id, resumed_steps=steps)
        attempt = read_attempt(transaction.connection, attempt.id)
        self._recompute_beyond(transaction, attempt, since)
        text = f"The attempt goes on from a state in memory at step {steps}."
        self._changes.note(transaction, attempt.trial_id, attempt.number, "INFO", text)
        return attempt

    def _take_records(
        self,
        transaction: Transaction,
        attempt: sa.Row[Any],
        rank: int,
        fresh_records: list[records.AnyRecord],
    ) -> None:
        self._take_rows(transaction, attempt, fresh_records)
        untold: dict[str, list[records.MetricsReported]] = {}
        validations = Validations(self._changes, transaction, attempt)
        for record in _without_replaced(fresh_records):
            if isinstance(record, records.MetricsReported):
                if record.group == "validation":
                    _emit_newest(transaction, attempt, rank, untold)
                    validations.take(record)
                else:
                    _note_untold(untold, record)
                continue
            validations.settle()
            if isinstance(record, records.CheckpointStored):
                store_checkpoint(self._changes, transaction, attempt, record)
            elif isinstance(record, (records.CheckpointDeleted, records.CheckpointFilesDeleted)):
                take_checkpoint_deletion(transaction.connection, attempt, record)
            elif isinstance(record, records.AttemptStarted):
                _take_environment(transaction.connection, attempt, record)
                _take_restarts(transaction, attempt, record)
            elif isinstance(record, (records.AlertRaised, records.StoreChecked)):
                self._take_notice(transaction, attempt, rank, record)
            elif isinstance(record, records.EarlyExitReported) and record.reason == _INVALID_HP:
                # The message of any rank decides for all ranks.
                update_attempt(
                    transaction.connection, attempt.id, early_exit=_INVALID_HP, outcome=_INVALID_HP
                )
            elif isinstance(record, records.AttemptFinished) and record.outcome == _INVALID_HP:
                # The rank that refused knows why; others may have no error of their own.
                why = {} if record.error is None else {"error": record.error}
                update_attempt(transaction.connection, attempt.id, outcome=_INVALID_HP, **why)
            elif rank == CHIEF and not isinstance(record, records.MediaReported):
                self._take_chief_record(transaction, attempt, record)
        validations.settle()
        _emit_newest(transaction, attempt, rank, untold)
        self._keep_alerts(
            transaction, attempt.trial_id, rank,
            [record for record in fresh_records if isinstance(record, records.AlertRaised)],
        )  # fmt: skip

    def _take_rows(
        self, transaction: Transaction, attempt: sa.Row[Any], fresh_records: list[records.AnyRecord]
    ) -> None:
        """Store metrics and media, of any rank."""
        reports = [
            record for record in fresh_records if isinstance(record, records.MetricsReported)
        ]
        if reports:
            self._take_metrics(transaction, attempt, reports)
        media = [record for record in fresh_records if isinstance(record, records.MediaReported)]
        if media:
            trial = self._changes.brief_trial(transaction.connection, attempt.trial_id)
            add_media(transaction.connection, trial, attempt.number, media)
            newest = max(record.steps_completed for record in media)
            transaction.emit("media", trial.experiment_id, trial.id, steps_completed=newest)

    def _take_metrics(
        self, transaction: Transaction, attempt: sa.Row[Any], reports: list[records.MetricsReported]
    ) -> None:
        conflicts = add_metrics(
            transaction.connection,
            trial_id=attempt.trial_id,
            attempt=attempt.number,
            resumed_steps=attempt.resumed_steps,
            records=reports,
        )
        for conflict in conflicts:
            self._changes.note(
                transaction,
                attempt.trial_id,
                attempt.number,
                "ERROR",
                f"{conflict.group} metric `{conflict.key}` at step {conflict.step} was reported as"
                f" {conflict.kept!r} by an earlier attempt and now as {conflict.refused!r}; the"
                " earlier value is kept. Hint: report a step only once per trial.",
            )
        newest = max(report.steps_completed for report in reports)
        trial = self._changes.brief_trial(transaction.connection, attempt.trial_id)
        if newest > trial.steps_completed:
            self._changes.update_trial(transaction, trial.id, steps_completed=newest)

    def _take_notice(
        self,
        transaction: Transaction,
        attempt: sa.Row[Any],
        rank: int,
        notice: records.AlertRaised | records.StoreChecked,
    ) -> None:
        """Take in an alert or a storage check, from any rank."""
        if isinstance(notice, records.AlertRaised):
            self._take_alert(transaction, attempt, rank, notice)
        else:
            transaction.after_commit(
                partial(self._changes.failing_stores.note, attempt, rank, notice)
            )

    def raise_alert(
        self, transaction: Transaction, attempt: sa.Row[Any], title: str, text: str
    ) -> None:
        """Add an alert of the master to a trial."""
        alert = records.AlertRaised(time=time.time(), title=title, description=text, level="warn")
        self._take_alert(transaction, attempt, CHIEF, alert, "Alert")
        self._keep_alerts(transaction, attempt.trial_id, CHIEF, [alert])

    def _take_alert(
        self,
        transaction: Transaction,
        attempt: sa.Row[Any],
        rank: int,
        alert: records.AlertRaised,
        who: str | None = None,
    ) -> None:
        text = ": ".join(filter(None, (alert.title, alert.description)))
        level = _LOG_LEVELS.get(alert.level, "INFO")
        trial_id = attempt.trial_id
        who = who or f"Alert of rank {rank}"
        self._changes.note(transaction, trial_id, attempt.number, level, f"{who}: {text}")
        shown = _shown_alert(alert, rank)
        transaction.emit("alert", attempt.experiment_id, trial_id, **shown, raised_at=alert.time)

    def _keep_alerts(
        self, transaction: Transaction, trial_id: int, rank: int, alerts: list[records.AlertRaised]
    ) -> None:
        """Store the newest alerts with the trial."""
        if not alerts:
            return
        column = tables.trials.c.alerts
        query = sa.select(column).where(tables.trials.c.id == trial_id)
        earlier = transaction.connection.scalar(query) or []
        new = [{"time": alert.time, **_shown_alert(alert, rank)} for alert in alerts]
        kept = [*earlier, *new][-_NUM_ALERTS:]
        self._changes.update_trial(transaction, trial_id, alerts=kept)

    def _take_chief_record(
        self, transaction: Transaction, attempt: sa.Row[Any], record: records.AnyRecord
    ) -> None:
        changes = self._changes
        if isinstance(record, records.ProgressReported):
            trial = changes.brief_trial(transaction.connection, attempt.trial_id)
            changes.search_operations.note_progress(transaction, trial, record.progress)
        elif isinstance(record, records.StatusReported):
            changes.update_trial(transaction, attempt.trial_id, status=record.status)
        elif isinstance(record, records.RunMetadataSet):
            changes.update_trial(transaction, attempt.trial_id, metadata=record.metadata)
        elif isinstance(record, records.OperationsRequested):
            changes.update_trial(transaction, attempt.trial_id, uses_operations=True)
        elif isinstance(record, records.OperationCompleted):
            take_operation(changes, transaction, attempt, record)
        elif isinstance(record, records.PreemptionAcknowledged):
            update_attempt(transaction.connection, attempt.id, preempt_acknowledged=True)
        elif isinstance(record, records.EarlyExitReported):
            update_attempt(transaction.connection, attempt.id, early_exit=record.reason)
        elif isinstance(record, records.AttemptFinished):
            is_refused = _early_exit(transaction.connection, attempt.id) == _INVALID_HP
            if not (is_refused and record.outcome == "error"):
                # An error of the chief's only answers the end of the rank that refused.
                update_attempt(
                    transaction.connection, attempt.id, outcome=record.outcome, error=record.error
                )
        else:
            assert isinstance(
                record,
                (
                    records.AttemptStarted,
                    records.CheckpointSentApart,
                    records.RecordLost,
                    records.RecordsDropped,
                    records.SearchInputTaken,
                    records.TimeSpent,
                ),
            )


def _shown_alert(alert: records.AlertRaised, rank: int) -> dict[str, Any]:
    return {
        "title": alert.title,
        "description": alert.description,
        "level": alert.level,
        "rank": rank,
    }


def _without_replaced(fresh_records: list[records.AnyRecord]) -> list[records.AnyRecord]:
    """Return the records without statuses and metadata replaced by later records."""
    newest = {type(record): record for record in fresh_records}
    return [
        record
        for record in fresh_records
        if not isinstance(record, (records.StatusReported, records.RunMetadataSet))
        or record is newest[type(record)]
    ]


def _take_times(
    connection: sa.Connection,
    attempt_id: int,
    batch: RecordBatch,
    fresh_records: list[records.AnyRecord],
) -> None:
    """Store the time records of the chief."""
    for record in fresh_records:
        if isinstance(record, records.TimeSpent) and batch.rank == CHIEF:
            add_time_mark(connection, attempt_id, batch.generation, record)


def _note_untold(
    untold: dict[str, list[records.MetricsReported]], record: records.MetricsReported
) -> None:
    if record.validation is not True:
        untold.setdefault(record.group, []).append(record)


def _emit_newest(
    transaction: Transaction,
    attempt: sa.Row[Any],
    rank: int,
    untold: dict[str, list[records.MetricsReported]],
) -> None:
    """Emit an event per group with its newest report, and clear the reports.

    Validation reports have events of their own.
    """
    for group, reports in untold.items():
        transaction.emit(
            "metrics",
            attempt.experiment_id,
            attempt.trial_id,
            group=group,
            rank=rank,
            steps_completed=reports[-1].steps_completed,
            count=len(reports),
            metrics=small_metrics(reports[-1].metrics),
        )
    untold.clear()


def _take_environment(
    connection: sa.Connection, attempt: sa.Row[Any], record: records.AttemptStarted
) -> None:
    if record.environment is not None:
        digest = store_environment(connection, record.environment)
        update_attempt(connection, attempt.id, environment=digest)


def _take_restarts(
    transaction: Transaction, attempt: sa.Row[Any], record: records.AttemptStarted
) -> None:
    if not record.restart_causes:
        return
    column = tables.attempts.c.restart_causes
    query = sa.select(column).where(tables.attempts.c.id == attempt.id)
    # Causes keyed by generation: a database rebuilt from records may take a record twice.
    causes = (transaction.connection.scalar(query) or {}) | {
        str(record.generation): list(record.restart_causes)
    }
    update_attempt(transaction.connection, attempt.id, restart_causes=causes)
    transaction.emit(
        "workers_restarted",
        attempt.experiment_id,
        attempt.trial_id,
        number=attempt.number,
        restarts=sum(map(len, causes.values())),
        cause=record.restart_causes[-1],
    )


# Made once: for each report they cost more to make than to run.
_MARKS = sa.select(tables.journal_marks).where(
    tables.journal_marks.c.attempt_id == sa.bindparam("wanted")
)
_MARK = sqlite_insert(tables.journal_marks)
_MARK = _MARK.on_conflict_do_update(
    index_elements=["attempt_id", "generation", "rank"],
    set_={"sequence": _MARK.excluded.sequence},
)


def _read_marks(connection: sa.Connection, attempt_id: int) -> dict[tuple[int, int], int]:
    """Return the highest stored sequence number per (generation, rank)."""
    rows = connection.execute(_MARKS, {"wanted": attempt_id})
    return {(row.generation, row.rank): row.sequence for row in rows}


def _early_exit(connection: sa.Connection, attempt_id: int) -> str | None:
    column = tables.attempts.c.early_exit
    reason: str | None = connection.scalar(
        sa.select(column).where(tables.attempts.c.id == attempt_id)
    )
    return reason


def _searched_metric(connection: sa.Connection, experiment_id: int) -> str:
    return config_of(StateChanges.experiment(connection, experiment_id)).searcher.metric
