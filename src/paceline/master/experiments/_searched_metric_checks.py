"""Checks whether a trial has reported the searched metric, and as a number."""

from typing import Any

from sqlalchemy import Connection, Row, func, select

from paceline.config import MissingSearcher, SingleSearcher
from paceline.master.store import Transaction, config_of, read_summary, tables

_GROUP = "validation"


def describe_nan_metric(
    transaction: Transaction, trial: Row[Any], experiment: Row[Any]
) -> str | None:
    """Say that the searched metric was never finite, if a trial reported it so."""
    if trial.best_metric is not None or trial.latest_metric is None:
        return None
    metric = config_of(experiment).searcher.metric
    summary = read_summary(transaction.connection, trial.id).get("validation", {}).get(metric)
    if summary is None:
        return None
    reports = "the only report" if summary.count == 1 else f"all {summary.count} reports"
    return (
        f"The searched metric `{metric}` was NaN or infinite in {reports}. Hint: look for a"
        " learning rate that is too high, or a division by zero."
    )


def describe_missing_metric(
    transaction: Transaction, trial: Row[Any], experiment: Row[Any]
) -> str | None:
    """Say what a trial that ended by itself failed to report, if the search needed it."""
    searcher = config_of(experiment).searcher
    if isinstance(searcher, MissingSearcher):
        return None
    judged = searcher.judged_metrics
    if trial.uses_operations and judged is not None:
        return None
    reported = read_summary(transaction.connection, trial.id).get("validation", {})
    if not reported and judged is None:
        # A script that does not validate is welcome to any search that needs nothing.
        return None
    missing = [name for name in judged or [searcher.metric] if name not in reported]
    if not missing:
        return None
    named = " and ".join(f"`{name}`" for name in missing)
    found = ", ".join(sorted(reported)) or "none"
    return (
        f"The search needs {named} in the validation metrics, but the code never reported it"
        f" (reported: {found}). Hint: report it, or set `searcher.metric` and"
        " `searcher.time_metric` to what is reported."
    )


def is_single(experiment: Row[Any]) -> bool:
    """Tell whether an experiment has one trial, which needs no metric to be chosen by."""
    return isinstance(config_of(experiment).searcher, SingleSearcher)


def others_have_reported(transaction: Transaction, trial: Row[Any], experiment: Row[Any]) -> bool:
    """Tell whether some trial of the search has reported what this one lacks."""
    searcher = config_of(experiment).searcher
    reported = read_summary(transaction.connection, trial.id).get(_GROUP, {})
    names = [name for name in searcher.judged_metrics or [searcher.metric] if name not in reported]
    series, trials = tables.series.c, tables.trials.c
    found = (
        select(series.id)
        .join_from(tables.series, tables.trials, trials.id == series.trial_id)
        .where(trials.experiment_id == experiment.id, series.group == _GROUP)
        .limit(1)
    )
    connection = transaction.connection
    return all(connection.scalar(found.where(series.key == name)) is not None for name in names)


def num_validations(connection: Connection, trial_id: int) -> tuple[int, int | None]:
    """Return how many validations a trial has reported, and the step of the first one."""
    series = tables.series.c
    row = connection.execute(
        select(func.max(series.num_points), func.min(series.first_step)).where(
            series.trial_id == trial_id, series.group == _GROUP
        )
    ).one()
    return row[0] or 0, row[1]


def is_never_finite(connection: Connection, experiment_id: int) -> bool:
    """Tell whether trials of a search have reported its metric, but no finite value of it."""
    experiments, trials = tables.experiments, tables.trials.c
    experiment = connection.execute(
        select(experiments).where(experiments.c.id == experiment_id)
    ).one()
    if experiment.best_metric is not None or is_single(experiment):
        return False
    reported = select(trials.id).where(
        trials.experiment_id == experiment_id, trials.latest_metric.is_not(None)
    )
    return connection.execute(reported.limit(1)).first() is not None


def describe_unmeasured(connection: Connection, experiment_id: int) -> str:
    """Say that no trial of a search has reported a finite value of its metric."""
    experiments = tables.experiments
    experiment = connection.execute(
        select(experiments).where(experiments.c.id == experiment_id)
    ).one()
    return (
        f"A trial must report a finite value of the searched metric"
        f" `{config_of(experiment).searcher.metric}`, but all values were NaN or infinite. Hint:"
        " look for a learning rate that is too high, or a division by zero."
    )
