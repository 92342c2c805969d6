"""Deleting the checkpoints that an ended experiment need not keep."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, update

from paceline import faults
from paceline.config import CheckpointStorage
from paceline.master.experiments._checkpoint_files import delete_files
from paceline.master.experiments._retention_plan import (
    Candidate,
    RetentionPolicy,
    next_planning_s,
    plan_retention,
)
from paceline.master.experiments._start_checkpoints import latest_checkpoint
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import Database, Transaction, config_of, read_series, tables
from paceline.messages.states import AttemptState, CheckpointState, ExperimentState, TrialState
from paceline.storage import CheckpointError, storage_from

logger = logging.getLogger(__name__)

faults.register("master.retention.deleted")

# Longer than any pause between two writes of a checkpoint that is still being written.
_LEFTOVER_AGE_S = 3600.0
# The writer looks for all of them at once, and trials that start meanwhile leave them out.
_DELETED_AT_ONCE = 500
_ENDED_TRIALS = [state.value for state in TrialState if state.is_terminal]


def sweep_checkpoints(
    changes: StateChanges, database: Database, experiment_id: int
) -> float | None:
    """Apply the experiment's retention policy: delete files, then mark the rows.

    While it runs, this does nothing unless the config asks for it. Deleting twice is harmless, so
    a crash in between only means that it is done again.

    Returns:
        When to do it again, in seconds since the epoch; None if this was the last time for now.
    """
    with database.read() as connection:
        experiment = connection.execute(
            select(tables.experiments).where(tables.experiments.c.id == experiment_id)
        ).one()
    has_ended = ExperimentState(experiment.state).is_terminal
    if not has_ended:
        # Before the checkpoints are read, so that one that comes meanwhile is not missed.
        _mark_for_sweep(database, experiment_id, is_done=True)
        if not config_of(experiment).deletes_while_running:
            return None
    storages, doomed, next_s = _plan_sweep(database, experiment)
    if has_ended:
        for storage in set(storages.values()):
            _sweep_leftovers(storage)
    ordered = sorted(doomed)
    for start in range(0, len(ordered), _DELETED_AT_ONCE):
        some = ordered[start : start + _DELETED_AT_ONCE]
        _delete_in_sweep(changes, database, experiment_id, {one: storages[one] for one in some})
    if has_ended:
        _mark_for_sweep(database, experiment_id, is_done=next_s is None)
    return next_s if has_ended else None


def _delete_in_sweep(
    changes: StateChanges, database: Database, experiment_id: int, storages: dict[str, str]
) -> None:
    """Delete checkpoints by their UUIDs, but those that trials have begun to need meanwhile."""

    def withdraw(transaction: Transaction) -> list[str]:
        """Let no trial start from them any more."""
        needed = _needed_among(transaction.connection, list(storages))
        left = [uuid for uuid in storages if uuid not in needed]
        transaction.after_rollback(lambda: changes.being_deleted.difference_update(left))
        changes.being_deleted.update(left)
        return left

    doomed = database.write(withdraw).result()
    try:
        deleted = [uuid for uuid in doomed if delete_files(storages[uuid], uuid)]
        faults.reach("master.retention.deleted")
        _mark_for_sweep(database, experiment_id, deleted, is_done=None)
    finally:
        changes.being_deleted.difference_update(doomed)


def _mark_for_sweep(
    database: Database,
    experiment_id: int,
    deleted: Sequence[str] = (),
    *,
    is_done: bool | None,
) -> None:
    """Note which checkpoints were deleted, and unless it is None whether all is done."""

    def mark(transaction: Transaction) -> None:
        checkpoints, experiments = tables.checkpoints, tables.experiments
        transaction.connection.execute(
            update(checkpoints)
            .where(checkpoints.c.uuid.in_(deleted))
            .values(state=CheckpointState.DELETED.value)
        )
        if is_done is not None:
            transaction.connection.execute(
                update(experiments)
                .where(experiments.c.id == experiment_id)
                .values(retention_done=is_done)
            )

    database.write(mark).result()


def _plan_sweep(
    database: Database, experiment: Row[Any]
) -> tuple[dict[str, str], list[str], float | None]:
    """Return the storages of the checkpoints, which ones to delete, and when to plan again."""
    checkpoints = tables.checkpoints
    with database.read() as connection:
        # Of two checkpoints at one step, the newer one comes first: it is the latest.
        rows = connection.execute(
            select(checkpoints)
            .where(
                checkpoints.c.experiment_id == experiment.id,
                checkpoints.c.state == CheckpointState.COMPLETED.value,
            )
            .order_by(checkpoints.c.attempt.desc(), checkpoints.c.created_at.desc())
        ).all()
        config = config_of(experiment)
        searcher = config.searcher
        metrics = {
            trial_id: dict(read_series(connection, trial_id, "validation", searcher.metric))
            for trial_id in {row.trial_id for row in rows}
        }
        options: dict[str, Any] = {
            "smaller_is_better": searcher.smaller_is_better,
            "protected": frozenset(_needed_among(connection, [row.uuid for row in rows])),
        }
    candidates = [
        Candidate(
            uuid=row.uuid,
            trial_id=row.trial_id,
            steps_completed=row.steps_completed,
            metric=_number(metrics[row.trial_id].get(row.steps_completed)),
            num_bytes=row.size,
            stored_s=row.created_at,
        )
        for row in rows
    ]
    policy = _policy(config.checkpoint_storage or CheckpointStorage())
    doomed = plan_retention(candidates, policy, now_s=time.time(), **options)
    kept = [each for each in candidates if each.uuid not in doomed]
    storages = {row.uuid: row.storage for row in rows}
    return storages, doomed, next_planning_s(kept, policy, **options)


def _needed_among(connection: Connection, uuids: list[str]) -> set[str]:
    """Return which of some checkpoints trials go on from, or will."""
    needed: set[str] = set()
    # SQLite takes so many parameters of a query, and no more.
    for start in range(0, len(uuids), _DELETED_AT_ONCE):
        needed |= _needed_among_some(connection, uuids[start : start + _DELETED_AT_ONCE])
    return needed


def _needed_among_some(connection: Connection, uuids: list[str]) -> set[str]:
    trials, attempts, checkpoints = tables.trials.c, tables.attempts.c, tables.checkpoints.c
    sources = select(trials.source_checkpoint).where(trials.source_checkpoint.in_(uuids))
    resumed = select(attempts.resumed_from).where(
        attempts.resumed_from.in_(uuids), attempts.state != AttemptState.ENDED.value
    )
    needed = {*connection.execute(sources).scalars(), *connection.execute(resumed).scalars()}
    owners = (
        select(checkpoints.trial_id)
        .join(tables.trials, trials.id == checkpoints.trial_id)
        .where(checkpoints.uuid.in_(uuids), trials.state.not_in(_ENDED_TRIALS))
        .distinct()
    )
    for trial_id in connection.execute(owners).scalars().all():
        latest = latest_checkpoint(connection, trial_id)
        if latest is not None:
            needed.add(latest[0])
    return needed


def _sweep_leftovers(storage: str) -> None:
    """Remove what crashes left of checkpoints that were never committed."""
    try:
        storage_from(storage).sweep(older_than_s=_LEFTOVER_AGE_S)
    except (OSError, ValueError, CheckpointError):
        logger.exception("Leftovers in %s could not be removed.", storage)


def _policy(storage: CheckpointStorage) -> RetentionPolicy:
    return RetentionPolicy(
        save_experiment_best=storage.save_experiment_best,
        save_trial_best=storage.save_trial_best,
        save_trial_latest=storage.save_trial_latest,
        save_age_s=storage.save_age,
        save_bytes=storage.save_bytes,
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]
