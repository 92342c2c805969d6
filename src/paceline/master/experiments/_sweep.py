"""Deleting the checkpoints that an ended experiment need not keep."""

import logging

from sqlalchemy import select, update

from paceline import faults
from paceline.config import CheckpointStorage
from paceline.master.experiments._checkpoint_files import delete_files
from paceline.master.experiments._retention import Candidate, RetentionPolicy, plan_retention
from paceline.master.store import Database, Transaction, config_of, read_series, tables
from paceline.messages.states import CheckpointState
from paceline.storage import CheckpointError, storage_from

logger = logging.getLogger(__name__)

faults.register("master.retention.deleted")

# Longer than any pause between two writes of a checkpoint that is still being written.
_LEFTOVER_AGE_S = 3600.0


def sweep_checkpoints(database: Database, experiment_id: int) -> None:
    """Apply the experiment's retention policy: delete files, then mark the rows.

    Deleting twice is harmless, so a crash in between only means that it is done again.
    """
    with database.read() as connection:
        experiment = connection.execute(
            select(tables.experiments).where(tables.experiments.c.id == experiment_id)
        ).one()
        checkpoints = tables.checkpoints
        # Of two checkpoints at one step, the newer one comes first: it is the latest.
        rows = connection.execute(
            select(checkpoints)
            .where(
                checkpoints.c.experiment_id == experiment_id,
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
        protected = connection.execute(
            select(tables.trials.c.source_checkpoint).where(
                tables.trials.c.source_checkpoint.is_not(None)
            )
        ).scalars()
        doomed = plan_retention(
            [
                Candidate(
                    uuid=row.uuid,
                    trial_id=row.trial_id,
                    steps_completed=row.steps_completed,
                    metric=_number(metrics[row.trial_id].get(row.steps_completed)),
                )
                for row in rows
            ],
            _policy(config.checkpoint_storage or CheckpointStorage()),
            smaller_is_better=searcher.smaller_is_better,
            protected=frozenset(uuid for uuid in protected if uuid is not None),
        )
    storages = {row.uuid: row.storage for row in rows}
    for storage in set(storages.values()):
        _sweep_leftovers(storage)
    deleted = [uuid for uuid in doomed if delete_files(storages[uuid], uuid)]
    faults.reach("master.retention.deleted")

    def mark(transaction: Transaction) -> None:
        transaction.connection.execute(
            update(checkpoints)
            .where(checkpoints.c.uuid.in_(deleted))
            .values(state=CheckpointState.DELETED.value)
        )
        transaction.connection.execute(
            update(tables.experiments)
            .where(tables.experiments.c.id == experiment_id)
            .values(retention_done=True)
        )

    database.write(mark).result()


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
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]
