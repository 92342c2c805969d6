"""The arguments of `fit` on checkpoints: when to store them, and which of them to keep."""

from typing import Any

from paceline._argument_checks import check_count
from paceline._quantities import AGE_FORMS, SIZE_FORMS, bytes_of, seconds_of
from paceline.engine.checkpoints._continuous_saves import CONTINUOUS, ContinuousPeriod
from paceline.engine.schedule._train_units import TrainUnit, checked_unit
from paceline.storage import RetentionRules

# Those of continuous checkpoints without a rule of the user's.
_CONTINUOUS_LATEST, _CONTINUOUS_BEST = 2, 1


def checked_period(period: Any) -> TrainUnit | ContinuousPeriod | None:
    """Return `checkpoint_period` if it is one.

    Raises:
        TypeError: It is neither a train unit nor "continuous".
    """
    if period == CONTINUOUS:
        return CONTINUOUS
    if isinstance(period, str):
        raise TypeError(
            f'`checkpoint_period` must be a train unit or "continuous", but got {period!r}.'
        )
    return checked_unit("checkpoint_period", period)


def checked_budget(
    given: int | str | None, configured: int | None, period: TrainUnit | ContinuousPeriod | None
) -> int | None:
    """Return how many bytes of checkpoints to store in an hour at most, None for no limit.

    Args:
        given: The argument.
        configured: What the config says.
        period: The checkpoint period.

    Raises:
        ValueError: The argument is no size, or has no effect with the period.
    """
    if given is None:
        return configured if period == CONTINUOUS else None
    if period != CONTINUOUS:
        raise ValueError(
            '`checkpoint_bytes_per_hour` needs `checkpoint_period="continuous"`, but the period is'
            f" {period!r}."
        )
    return _checked_bytes("checkpoint_bytes_per_hour", given)


def checked_rules(
    *,
    keep_latest: int | None,
    keep_best: int | None,
    keep_age: float | str | None,
    keep_bytes: int | str | None,
    metric: str | None,
    is_continuous: bool,
) -> RetentionRules:
    """Return the rules that the arguments `keep_...` give.

    Args:
        keep_latest: The argument, as the next three.
        keep_best: See there.
        keep_age: See there.
        keep_bytes: See there.
        metric: The metric that tells which ones are the best.
        is_continuous: Whether checkpoints follow each other; they are never all kept then.

    Raises:
        ValueError: One is out of range, or `keep_best` is given without a metric.
    """
    for name, count in (("keep_latest", keep_latest), ("keep_best", keep_best)):
        if count is not None:
            check_count(name, count)
    if keep_best is not None and metric is None:
        raise ValueError(
            "`keep_best` needs a metric to judge by, but there is none. Hint:"
            ' fit(metric="validation_loss", keep_best=1).'
        )
    age_s = None if keep_age is None else seconds_of(keep_age)
    if keep_age is not None and age_s is None:
        raise ValueError(f"`keep_age` must be {AGE_FORMS}, but got {keep_age!r}.")
    num_bytes = None if keep_bytes is None else _checked_bytes("keep_bytes", keep_bytes)
    rules = RetentionRules(latest=keep_latest, best=keep_best, age_s=age_s, num_bytes=num_bytes)
    if is_continuous and rules == RetentionRules(num_bytes=num_bytes):
        best = None if metric is None else _CONTINUOUS_BEST
        return RetentionRules(latest=_CONTINUOUS_LATEST, best=best, num_bytes=num_bytes)
    return rules


def _checked_bytes(name: str, value: Any) -> int:
    checked = bytes_of(value)
    if checked is None:
        raise ValueError(f"`{name}` must be {SIZE_FORMS}, but got {value!r}.")
    return checked
