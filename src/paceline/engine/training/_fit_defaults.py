"""Settings of a trainer from the experiment's config and the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.engine.checkpoints._continuous_saves import CONTINUOUS, ContinuousPeriod
from paceline.engine.profiling._step_timer import ProfilingWindow
from paceline.engine.schedule._train_units import Batch, Epoch, Record, TrainUnit

TEST_MODE_VARIABLE = "PACELINE_TEST_MODE"
"""Set to 1 by `paceline experiment create --local --test`: train as with `test_mode=True`."""

_UNITS: dict[str, type[TrainUnit]] = {"batches": Batch, "epochs": Epoch, "records": Record}
_PRECISIONS = {"O0": "fp32", "O1": "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitDefaults:
    """The arguments of `fit` as an experiment's config gives them; None is "not said"."""

    checkpoint_period: TrainUnit | ContinuousPeriod | None = None
    checkpoint_bytes_per_hour: int | None = None
    validation_period: TrainUnit | None = None
    reporting_period: TrainUnit | None = None
    aggregation_frequency: int | None = None
    average_aggregated_gradients: bool | None = None
    checkpoint_policy: str | None = None
    step_zero_validation: bool | None = None
    profiling: ProfilingWindow | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FitDefaults":
        """Return the defaults of a resolved config; fields may be missing from an older one.

        Args:
            config: The config, as in `get_cluster_info().trial.config`.
        """
        optimizations = config.get("optimizations") or {}
        profiling = config.get("profiling")
        period = config.get("min_checkpoint_period")
        return cls(
            checkpoint_period=CONTINUOUS if period == CONTINUOUS else unit_of(period),
            checkpoint_bytes_per_hour=config.get("checkpoint_bytes_per_hour"),
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
    """Return the length that a config's searcher sets; None if it sets none."""
    length = searcher.get("max_length")
    if length is None and searcher.get("time_metric") in ("batches", "epochs", "records"):
        length = {searcher["time_metric"]: searcher["max_time"]}
    return unit_of(length)


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return the precision that a resolved config asks for, None if it says nothing of it."""
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
