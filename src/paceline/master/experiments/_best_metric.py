"""The best value of the searched metric, per trial and per experiment."""

from math import isfinite
from typing import Any

from sqlalchemy import Row, select, update

from paceline.config import Searcher
from paceline.journal import encode_float
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import Transaction, config_of, read_series, tables
from paceline.messages.states import AttemptState


def update_best(
    changes: StateChanges, transaction: Transaction, trial: Row[Any], step: int, value: float
) -> None:
    """Take a new value of the searched metric into the trial's and the experiment's best."""
    searcher = _searcher_of_metric(changes, transaction, trial)
    values: dict[str, Any] = {"latest_metric": encode_float(value)}
    is_best = _is_better(value, trial.best_metric, searcher.smaller_is_better)
    if is_best:
        values |= {"best_metric": value, "best_step": step}
    changes.update_trial(transaction, trial.id, **values)
    if is_best:
        _update_experiment(changes, transaction, trial.experiment_id, searcher)


def recompute_best(changes: StateChanges, transaction: Transaction, trial: Row[Any]) -> None:
    """Work the best out anew after a restart superseded some reports."""
    searcher = _searcher_of_metric(changes, transaction, trial)
    best: float | None = None
    values: dict[str, Any] = {"best_step": None, "latest_metric": None}
    for step, value in read_series(transaction.connection, trial.id, "validation", searcher.metric):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        values["latest_metric"] = encode_float(float(value))
        if _is_better(float(value), best, searcher.smaller_is_better):
            best, values["best_step"] = float(value), step
    changes.update_trial(transaction, trial.id, best_metric=best, **values)
    _update_experiment(changes, transaction, trial.experiment_id, searcher)


def _searcher_of_metric(
    changes: StateChanges, transaction: Transaction, trial: Row[Any]
) -> Searcher:
    experiment = changes.experiment(transaction.connection, trial.experiment_id)
    return config_of(experiment).searcher


def _update_experiment(
    changes: StateChanges,
    transaction: Transaction,
    experiment_id: int,
    searcher: Searcher,
) -> None:
    trials, connection = tables.trials, transaction.connection
    value = trials.c.best_metric
    order = value if searcher.smaller_is_better else value.desc()
    best = connection.execute(
        select(trials.c.id, trials.c.best_metric)
        .where(trials.c.experiment_id == experiment_id, trials.c.best_metric.is_not(None))
        .order_by(order, trials.c.id)
        .limit(1)
    ).first()
    present = changes.experiment(connection, experiment_id)
    found = (None, None) if best is None else (best.id, best.best_metric)
    if found == (present.best_trial_id, present.best_metric):
        return
    connection.execute(
        update(tables.experiments)
        .where(tables.experiments.c.id == experiment_id)
        .values(best_trial_id=found[0], best_metric=found[1])
    )
    attempts = tables.attempts
    running = select(attempts.c.id).where(
        attempts.c.experiment_id == experiment_id,
        attempts.c.state == AttemptState.RUNNING.value,
    )
    for attempt_id in connection.execute(running).scalars().all():
        changes.change_attempt(transaction, attempt_id)


def _is_better(value: float, best: float | None, is_smaller_better: bool) -> bool:
    if not isfinite(value):
        return False
    if best is None:
        return True
    return value < best if is_smaller_better else value > best
