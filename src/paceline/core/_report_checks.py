"""Checks of what a report names: its step, its group, and its metrics."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.journal import decode_value, same_value

RESERVED_GROUPS = frozenset({"cpu", "disk", "gpu", "memory", "network"})
# What every store of numbers holds.
MAX_STEPS = 2**63 - 1


def group_of_rank(group: str, rank: int) -> str:
    """Return the metric group that a rank reports to; those of a master are the chief's."""
    return group if rank == 0 else f"{group}_rank_{rank}"


def new_metrics(
    group: str, steps_completed: int, known: dict[str, Any], metrics: dict[str, Any]
) -> dict[str, Any]:
    """Return the metrics whose names were not reported before at this step."""
    for key in known.keys() & metrics.keys():
        if not same_value(known[key], metrics[key]):
            raise ValueError(
                f"A metric must not change once reported, but {group} metric {key!r} at"
                f" `steps_completed`={steps_completed} was {decode_value(known[key])!r} and is now"
                f" {decode_value(metrics[key])!r}. Hint: count steps on over epochs, and report"
                " each only once."
            )
    return {key: value for key, value in metrics.items() if key not in known}


def searched_metrics(searcher: Mapping[str, Any], judged: Sequence[str] | None) -> tuple[str, ...]:
    """Return the metrics that must be numbers, as a search chooses among its trials by them.

    Args:
        searcher: The `searcher` section of the trial's config; empty without one.
        judged: The metrics that the search needs to judge a report, if it judges them.
    """
    if not searcher or searcher.get("name") == "single":
        return ()
    return tuple(judged or filter(None, [searcher.get("metric")]))


def check_judged(metrics: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a report in which a metric that a search needs is no number.

    Args:
        metrics: The report, encoded.
        names: What `searched_metrics` has returned.

    Raises:
        TypeError: One is no number.
    """
    for name in names:
        value = decode_value(metrics.get(name, 0))
        if type(value) not in (int, float):
            raise TypeError(
                f"The metric {name!r} must be a number, as the search goes by it, but got"
                f" {value!r}. Hint: report a float, or set the metric of the searcher to another"
                " name."
            )


def checked_steps(steps_completed: object) -> int:
    """Return a plain integer for NumPy's and the like."""
    try:
        if isinstance(steps_completed, bool):
            raise TypeError
        value = operator.index(steps_completed)  # type: ignore[arg-type]  # refused below
    except TypeError:
        raise TypeError(
            f"`steps_completed` must be an integer, but got {steps_completed!r}"
            f" ({type(steps_completed).__name__})."
        ) from None
    if value < 0:
        raise ValueError(f"`steps_completed` must be at least 0, but got {value}.")
    if value > MAX_STEPS:
        raise ValueError(
            f"`steps_completed` must be below 2**63, but got {value}."
            " Hint: it counts batches, not samples or time."
        )
    return value


def check_group(group: object) -> None:
    if not isinstance(group, str):
        raise TypeError(f"`group` must be a string, but got {group!r}.")
    if not group or "." in group or group in RESERVED_GROUPS:
        reserved = ", ".join(sorted(RESERVED_GROUPS))
        raise ValueError(
            f"`group` must be a non-empty name without dots and none of {reserved},"
            f" but got {group!r}."
        )
