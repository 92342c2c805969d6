"""Reports of libraries with separate training and evaluation."""

from collections.abc import Mapping
from typing import Any

from paceline import train
from paceline.train._run_protocol import current_session


def library_report(
    metrics: Mapping[str, Any], evaluated: Mapping[str, Any], *, step: int, evaluates: bool
) -> None:
    """Report metrics of training, metrics of an evaluation, or both.

    A search judges the evaluated metrics. If a library evaluates nothing, it judges all reports.

    Args:
        metrics: The report: metrics of training, and where it stands. If there are none, it is what
            was evaluated.
        evaluated: Metrics of an evaluation since the last report, and where it took place.
        step: The steps of the optimizer that the library has completed.
        evaluates: Whether the library evaluates at all.
    """
    session = current_session()
    if session is None:
        train.report({**evaluated, **metrics})
    else:
        validation = (dict(evaluated) or False) if evaluates or evaluated else True
        session.report(dict(metrics or evaluated), validation, step)
