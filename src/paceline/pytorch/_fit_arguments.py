"""Arguments of `fit`: length, periods, retention rules, and their defaults from a config."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline._base.arguments_and_errors import (
    AGE_FORMS,
    SIZE_FORMS,
    bytes_of,
    check_count,
    seconds_of,
)
from paceline._training.engine.profiling import ProfilingWindow
from paceline._training.engine.schedules import Batch, Epoch, Record, TrainUnit, checked_unit
from paceline.pytorch._training_checkpoints import CONTINUOUS, ContinuousPeriod
from paceline.storage._retention_rules import RetentionRules

logger = logging.getLogger(__name__)


TEST_MODE_VARIABLE = "PACELINE_TEST_MODE"
"""Set to 1 by `paceline experiment create --local --test`: train as with `test_mode=True`."""
_UNITS: dict[str, type[TrainUnit]] = {"batches": Batch, "epochs": Epoch, "records": Record}
_PRECISIONS = {"O0": "fp32", "O1": "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitDefaults:
    """The arguments of `fit` as an experiment's config gives them; None is "not said"."""

    checkpoint_period: TrainUnit | ContinuousPeriod | None = None
    checkpoint_bytes_per_hour: int | None = None
    memory_checkpoints: bool | float | None = None
    validation_period: TrainUnit | None = None
    reporting_period: TrainUnit | None = None
    aggregation_frequency: int | None = None
    average_aggregated_gradients: bool | None = None
    checkpoint_policy: str | None = None
    step_zero_validation: bool | None = None
    profiling: ProfilingWindow | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FitDefaults":
        """Return the defaults of a resolved config; an older config may lack fields.

        Args:
            config: The config, as in `get_cluster_info().trial.config`.
        """
        optimizations = config.get("optimizations") or {}
        profiling = config.get("profiling")
        period = config.get("min_checkpoint_period")
        return cls(
            checkpoint_period=CONTINUOUS if period == CONTINUOUS else unit_of(period),
            checkpoint_bytes_per_hour=config.get("checkpoint_bytes_per_hour"),
            memory_checkpoints=config.get("memory_checkpoints"),
            validation_period=unit_of(config.get("min_validation_period")),
            reporting_period=unit_of(config.get("scheduling_unit")),
            aggregation_frequency=optimizations.get("aggregation_frequency"),
            average_aggregated_gradients=optimizations.get("average_aggregated_gradients"),
            checkpoint_policy=config.get("checkpoint_policy"),
            step_zero_validation=config.get("perform_initial_validation"),
            profiling=ProfilingWindow(**profiling) if profiling else None,
        )


def unit_of(length: int | Mapping[str, int] | None) -> TrainUnit | None:
    """Return a config's length or period as a train unit; None and 0 are None, for never."""
    if length is None:
        return None
    unit, count = next(iter(length.items())) if isinstance(length, Mapping) else ("batches", length)
    return _UNITS[unit](count) if count else None


def searcher_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the searcher's part of a resolved config; empty if there is none."""
    return config.get("searcher") or {}


def searched_length(searcher: Mapping[str, Any]) -> TrainUnit | None:
    """Return the training length set by a config's searcher, or None."""
    length = searcher.get("max_length")
    # A searcher without a length may count its time in a unit of training.
    if length is None and searcher.get("time_metric") in ("batches", "epochs", "records"):
        length = {searcher["time_metric"]: searcher["max_time"]}
    return unit_of(length)


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return the precision set by a resolved config, or None."""
    level = (config.get("optimizations") or {}).get("mixed_precision")
    return None if level is None else _PRECISIONS[level]


def is_test_mode() -> bool:
    """Tell whether the environment asks every trainer for its test mode.

    Raises:
        ValueError: PACELINE_TEST_MODE is neither 0 nor 1.
    """
    value = os.environ.get(TEST_MODE_VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"`{TEST_MODE_VARIABLE}` must be 0 or 1, but got {value!r}.")
    return value == "1"


_POLICIES = ("best", "all", "none")


def first_argument(*values: Any) -> Any:
    """Return the first argument other than None, or None without any."""
    return next((value for value in values if value is not None), None)


def checked_policy(policy: str) -> str:
    """Return the checked policy for checkpoints after validations.

    Raises:
        ValueError: There is no such policy.
    """
    if policy not in _POLICIES:
        raise ValueError(
            f"`checkpoint_policy` must be one of {', '.join(_POLICIES)}, but got {policy!r}."
        )
    return policy


def training_length(searcher: Mapping[str, Any], given: TrainUnit | None) -> TrainUnit:
    """Return the total training length: the searcher's, or else the given length.

    Raises:
        ValueError: There is neither.
    """
    searched = searched_length(searcher)
    if searched is not None:
        if given is not None and given != searched:
            logger.info("The searcher's length %r is used instead of %r.", searched, given)
        return searched
    if given is None:
        raise ValueError(
            "`max_length` must be given without a searcher's length. Hint:"
            " fit(max_length=pytorch.Epoch(1))."
        )
    given.length  # noqa: B018  # raises for a schedule
    return given


# Retention defaults of continuous checkpoints, for users who give no rule.
_CONTINUOUS_LATEST, _CONTINUOUS_BEST = 2, 1


def checked_period(period: Any) -> TrainUnit | ContinuousPeriod | None:
    """Return the checked `checkpoint_period`.

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
        configured: The value in the config.
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
    """Return the retention rules of the arguments `keep_...`.

    Args:
        keep_latest: The argument, as the next three.
        keep_best: See there.
        keep_age: See there.
        keep_bytes: See there.
        metric: The metric that ranks checkpoints.
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
