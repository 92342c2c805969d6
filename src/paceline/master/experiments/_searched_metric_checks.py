"""Checks whether a trial has reported the searched metric, and as a number."""

from typing import Any

from sqlalchemy import Row

from paceline.config import MissingSearcher
from paceline.master.store import Transaction, config_of, read_summary


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
