"""Retention: deletion of checkpoints not kept by an experiment's policy, in its own thread."""

import logging
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.experiments.checkpoint_places import (
    CheckpointPlace,
    checkpoint_places,
    experiment_place,
    storage_for_others,
)
from paceline._cluster.master.experiments.checkpoints import (
    delete_files,
    latest_checkpoint,
    registered_checkpoints,
    remove_unknown_checkpoints,
)
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline._cluster.master.store.database import Database, DatabaseLostError, Transaction
from paceline._cluster.master.store.metric_rows import read_series
from paceline._cluster.master.store.row_ids_and_counts import row_of
from paceline._cluster.master.store.run_files import FileContents, used_digests
from paceline._cluster.messages.states import (
    AttemptState,
    CheckpointState,
    ExperimentState,
    TrialState,
)
from paceline.config._checkpoint_storage_section import CheckpointStorage
from paceline.storage._checkpoint_errors import CheckpointError
from paceline.storage._retention_rules import Kept, RetentionRules, best_of, beyond_bytes, wanted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """Numbers of checkpoints to keep, by the searched metric, by age and by bytes."""

    save_experiment_best: int = 0
    save_trial_best: int = 1
    save_trial_latest: int = 1
    save_age_s: float | None = None
    save_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint; `metric` is the searched metric at the same step, None if there is none."""

    uuid: str
    trial_id: int
    steps_completed: int
    metric: float | None
    num_bytes: int = 0
    stored_s: float = 0.0


def plan_retention(
    candidates: Iterable[Candidate],
    policy: RetentionPolicy,
    *,
    smaller_is_better: bool,
    protected: frozenset[str] = frozenset(),
    now_s: float = 0.0,
) -> list[str]:
    """Return the UUIDs of the checkpoints to delete.

    Kept are the union of: the best of the experiment, the best and the latest of each trial, the
    young ones, and the protected ones. A checkpoint without a metric is not among the best. If
    they are too many bytes, the oldest go, and the best after all others; the protected ones and
    the newest of all stay.

    Args:
        candidates: The checkpoints; of two at one step of a trial, the newer one comes first.
        policy: The rules of retention.
        smaller_is_better: Whether smaller values of the metric are better.
        protected: Those that are needed.
        now_s: The present time, in seconds since the epoch.
    """
    candidates = list(candidates)
    by_step = sorted(candidates, key=lambda c: c.steps_completed, reverse=True)[::-1]
    facts = {c.uuid: _kept(c, smaller_is_better=smaller_is_better) for c in by_step}
    of_trial: dict[int, list[Kept]] = defaultdict(list)
    for candidate in by_step:
        of_trial[candidate.trial_id].append(facts[candidate.uuid])
    best = best_of(facts.values(), policy.save_experiment_best)
    for group in of_trial.values():
        best |= best_of(group, policy.save_trial_best)
    rules = RetentionRules(latest=policy.save_trial_latest, age_s=policy.save_age_s)
    found = set(protected) | best
    for group in of_trial.values():
        found |= wanted(group, rules, now_s=now_s)
    if policy.save_bytes is not None:
        found -= _beyond_bytes(
            [each for each in facts.values() if each.uuid in found],
            policy.save_bytes,
            protected=protected,
            best=best,
        )
    return [c.uuid for c in candidates if c.uuid not in found]


def next_planning_s(
    candidates: Iterable[Candidate],
    policy: RetentionPolicy,
    *,
    smaller_is_better: bool,
    protected: frozenset[str] = frozenset(),
) -> float | None:
    """Return when the next of some checkpoints has become too old, None if none will.

    Args:
        candidates: Those that are kept now.
        policy: The rules of retention.
        smaller_is_better: As for `plan_retention`.
        protected: Those that are needed.

    Returns:
        The time in seconds since the epoch.
    """
    if policy.save_age_s is None:
        return None
    candidates = list(candidates)
    gone = plan_retention(
        candidates, policy, smaller_is_better=smaller_is_better, protected=protected, now_s=inf
    )
    stored_s = [c.stored_s for c in candidates if c.uuid in gone]
    return min(stored_s) + policy.save_age_s if stored_s else None


def _kept(candidate: Candidate, *, smaller_is_better: bool) -> Kept:
    score = candidate.metric
    if score is not None and smaller_is_better:
        score = -score
    return Kept(
        candidate.uuid, candidate.steps_completed, score, candidate.num_bytes, candidate.stored_s
    )


def _beyond_bytes(
    kept: Sequence[Kept], num_bytes: int, *, protected: frozenset[str], best: set[str]
) -> set[str]:
    by_age = sorted(kept, key=lambda each: each.stored_s)
    needed = protected | {each.uuid for each in by_age[-1:]}
    return beyond_bytes(by_age, num_bytes, needed=needed, best=best)


faults.register("master.retention.deleted")

# Longer than any pause between two writes of a checkpoint that is still being written.
_LEFTOVER_AGE_S = 3600.0
RETRY_S = 600.0
"""Seconds until a failed deletion is tried again."""
# After so many failures a storage is left alone: each may take as long as a store that does not
# answer is waited for.
_MAX_FAILURES = 3
# The writer looks for all of them at once, and trials that start meanwhile leave them out.
_DELETED_AT_ONCE = 500
_ENDED_TRIALS = [state.value for state in TrialState if state.is_terminal]


def sweep_checkpoints(
    changes: StateChanges, database: Database, experiment_id: int, failures: Counter[str]
) -> float | None:
    """Apply the experiment's retention policy: delete files, then mark the rows.

    While it runs, this does nothing unless the config asks for it. Deleting twice is harmless, so
    a crash in between only means that it is done again. Failed deletions are tried again
    some minutes after the end of the experiment.

    Args:
        changes: Informs trials of checkpoints being deleted.
        database: The database.
        experiment_id: The experiment.
        failures: How often each storage has failed in the last minutes; this adds to it.

    Returns:
        When to do it again, in seconds since the epoch; None if this was the last time for now.
    """
    with database.read() as connection:
        experiment = row_of(connection, tables.experiments, experiment_id)
    has_ended = ExperimentState(experiment.state).is_terminal
    if not has_ended:
        # Before the checkpoints are read, so that one that comes meanwhile is not missed.
        _mark_done(database, experiment, True)
        if not config_of(experiment).deletes_while_running:
            return None
    places, doomed, next_s = _plan_sweep(database, experiment, changes.default_storage)
    if has_ended:
        for storage in {place.storage for place in places.values()}:
            with changes.storage_calls.noted(storage):
                _sweep_leftovers(storage, failures)
        _remove_unknown(changes, database, experiment)
    # Random order: a few undeletable checkpoints must not hold back the same others each time.
    ordered = random.sample(doomed, len(doomed))
    for start in range(0, len(ordered), _DELETED_AT_ONCE):
        some = {uuid: places[uuid] for uuid in ordered[start : start + _DELETED_AT_ONCE]}
        _delete_in_sweep(changes, database, some, failures)
    if not has_ended:
        return None
    if any(failures[place.storage] for place in places.values()):
        retry_s = time.time() + RETRY_S
        next_s = retry_s if next_s is None else min(next_s, retry_s)
    _mark_done(database, experiment, next_s is None)
    return next_s


def _delete_in_sweep(
    changes: StateChanges,
    database: Database,
    places: dict[str, CheckpointPlace],
    failures: Counter[str],
) -> None:
    """Delete checkpoints by UUID, except those needed by trials by now.

    Args:
        changes: Informs trials of checkpoints being deleted.
        database: The database.
        places: Where they lie, by UUID.
        failures: How often deleting has failed, by storage; this adds to it.
    """

    def withdraw(transaction: Transaction) -> list[str]:
        """Let no trial start from them any more."""
        needed = _needed_among(transaction.connection, list(places))
        left = [uuid for uuid in places if uuid not in needed]
        # In-memory set: a rollback of the transaction does not undo it by itself.
        transaction.after_rollback(lambda: changes.being_deleted.difference_update(left))
        changes.being_deleted.update(left)
        return left

    doomed = database.write(withdraw).result()
    deleted = []
    try:
        for uuid in doomed:
            place = places[uuid]
            if failures[place.storage] >= _MAX_FAILURES:
                continue
            try:
                if delete_files(changes.storage_calls, place, uuid):
                    deleted.append(uuid)
                else:
                    failures[place.storage] += 1
            except RefusedError as error:
                logger.warning("%s", error)
        faults.reach("master.retention.deleted")
        _mark_deleted(database, deleted)
    finally:
        changes.being_deleted.difference_update(doomed)


def _mark_deleted(database: Database, uuids: Sequence[str]) -> None:
    """Mark checkpoints as deleted."""
    checkpoints = tables.checkpoints
    statement = (
        sa.update(checkpoints)
        .where(checkpoints.c.uuid.in_(uuids))
        .values(state=CheckpointState.DELETED.value)
    )
    database.write(lambda transaction: transaction.connection.execute(statement)).result()


def _mark_done(database: Database, experiment: sa.Row[Any], is_done: bool) -> None:
    """Store whether retention is done, unless the experiment has ended again meanwhile."""
    experiments = tables.experiments
    statement = (
        sa.update(experiments)
        .where(
            experiments.c.id == experiment.id,
            experiments.c.ended_at.is_not_distinct_from(experiment.ended_at),
        )
        .values(retention_done=is_done)
    )
    database.write(lambda transaction: transaction.connection.execute(statement)).result()


def _plan_sweep(
    database: Database, experiment: sa.Row[Any], default_storage: str
) -> tuple[dict[str, CheckpointPlace], list[str], float | None]:
    """Return the checkpoints' places, the UUIDs to delete, and the time of the next planning.

    Those that a script has stored elsewhere are left alone.
    """
    checkpoints = tables.checkpoints
    with database.read() as connection:
        # Newer checkpoints first: of two at the same step, the first counts as the latest.
        rows = connection.execute(
            sa.select(checkpoints)
            .where(
                checkpoints.c.experiment_id == experiment.id,
                checkpoints.c.state == CheckpointState.COMPLETED.value,
            )
            .order_by(checkpoints.c.attempt.desc(), checkpoints.c.created_at.desc())
        ).all()
        places = checkpoint_places(connection, experiment.id, rows, default_storage)
        rows = [row for row in rows if places[row.uuid].is_own]
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
    return (
        {row.uuid: places[row.uuid] for row in rows},
        doomed,
        next_planning_s(kept, policy, **options),
    )


def _needed_among(connection: sa.Connection, uuids: list[str]) -> set[str]:
    """Return the given checkpoints needed by a trial now or later, or by a registered model."""
    needed: set[str] = set()
    # SQLite takes so many parameters of a query, and no more.
    for start in range(0, len(uuids), _DELETED_AT_ONCE):
        needed |= _needed_among_some(connection, uuids[start : start + _DELETED_AT_ONCE])
    return needed


def _needed_among_some(connection: sa.Connection, uuids: list[str]) -> set[str]:
    trials, attempts, checkpoints = tables.trials.c, tables.attempts.c, tables.checkpoints.c
    sources = sa.select(trials.source_checkpoint).where(trials.source_checkpoint.in_(uuids))
    resumed = sa.select(attempts.resumed_from).where(
        attempts.resumed_from.in_(uuids), attempts.state != AttemptState.ENDED.value
    )
    needed = {*connection.execute(sources).scalars(), *connection.execute(resumed).scalars()}
    needed |= registered_checkpoints(connection).keys() & set(uuids)
    owners = (
        sa.select(checkpoints.trial_id)
        .join(tables.trials, trials.id == checkpoints.trial_id)
        .where(checkpoints.uuid.in_(uuids), trials.state.not_in(_ENDED_TRIALS))
        .distinct()
    )
    for trial_id in connection.execute(owners).scalars().all():
        latest = latest_checkpoint(connection, trial_id)
        if latest is not None:
            needed.add(latest[0])
    return needed


def _sweep_leftovers(storage: str, failures: Counter[str]) -> None:
    """Remove leftovers of checkpoints never committed because of a crash."""
    if failures[storage] >= _MAX_FAILURES:
        return
    try:
        storage_for_others(storage).sweep(older_than_s=_LEFTOVER_AGE_S)
    except (OSError, ValueError, CheckpointError):
        logger.exception("Leftovers in %s could not be removed.", storage)
        failures[storage] += 1


def _remove_unknown(changes: StateChanges, database: Database, experiment: sa.Row[Any]) -> None:
    """Remove checkpoints stored by a killed attempt but never recorded."""
    try:
        place = experiment_place(experiment, changes.default_storage)
        with changes.storage_calls.noted(place):
            remove_unknown_checkpoints(database, experiment, place, changes.since_s)
    except (OSError, ValueError):
        logger.exception("Unknown checkpoints of experiment %d were not found.", experiment.id)


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


_TICK_S = 1.0
# Contents without a name are kept for a day, so this may be seldom.
_SWEEP_S = 3600.0
# A store that does not answer is not waited for when a master ends.
_CLOSE_S = 5.0


class Retention:
    """Thread to apply retention policies, woken by changes and once a second.

    Once an hour it also deletes contents of files that no run names.

    A separate thread: nothing else may wait for a store that deletes slowly or hangs.
    """

    def __init__(
        self, database: Database, changes: StateChanges, contents: FileContents | None = None
    ) -> None:
        self._database = database
        self._contents = contents
        self._contents_swept_at = -_SWEEP_S
        self._changes = changes
        # When an experiment is to be looked at again, in seconds since the epoch.
        self._next_sweeps: dict[int, float] = {}
        # How often each storage has failed lately, for whichever experiment.
        self._failures = Counter[str]()
        self._failures_since = 0.0
        self._wakeup = changes.wakeups.event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Ask for a pass soon; safe from any thread."""
        self._wakeup.set()

    def close(self) -> None:
        """Stop; a later master on this home does the remaining work."""
        self._is_closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def make_pass(self) -> None:
        """Apply retention to experiments marked as due: ended, or with a new checkpoint."""
        experiments = tables.experiments
        with self._database.read() as connection:
            due = connection.execute(
                sa.select(experiments.c.id).where(
                    experiments.c.retention_done.is_(False),
                    experiments.c.external_id.is_(None),
                )
            ).scalars()
            experiment_ids = due.all()
        if time.time() >= self._failures_since + RETRY_S:
            self._failures.clear()
            self._failures_since = time.time()
        for experiment_id in experiment_ids:
            if self._is_closing:
                return
            if time.time() < self._next_sweeps.get(experiment_id, 0.0):
                continue
            next_s = sweep_checkpoints(self._changes, self._database, experiment_id, self._failures)
            self._next_sweeps.pop(experiment_id, None)
            if next_s is not None:
                self._next_sweeps[experiment_id] = next_s

    def sweep_contents(self) -> None:
        """Delete contents of files that no run names any more."""
        if self._contents is not None:
            with self._database.read() as connection:
                used = used_digests(connection)
            self._contents.sweep(used)

    def _run(self) -> None:
        while True:
            self._wakeup.wait(_TICK_S)
            if self._is_closing:
                return
            self._wakeup.clear()
            try:
                self.make_pass()
                if time.monotonic() >= self._contents_swept_at + _SWEEP_S:
                    self._contents_swept_at = time.monotonic()
                    self.sweep_contents()
            except DatabaseLostError:
                # The database has reported it already.
                return
            except Exception:
                logger.exception("Checkpoints could not be deleted; the next pass tries again.")
                time.sleep(_TICK_S)
