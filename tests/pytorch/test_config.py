from collections.abc import Callable
from typing import Any

import pytest

from paceline._training.engine.profiling import ProfilingWindow
from paceline.config import validate_config
from paceline.pytorch import Batch, Epoch, Record, TrainUnit
from paceline.pytorch._fit_arguments import FitDefaults, is_test_mode, precision_of, unit_of


@pytest.fixture
def resolved() -> Callable[..., dict[str, Any]]:
    """Return a function that gives a whole config with some fields set."""

    def resolve(**fields: Any) -> dict[str, Any]:
        base = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
        return validate_config({**base, **fields}).to_json()

    return resolve


def test_a_config_that_says_nothing_gives_what_fit_does_by_itself(
    resolved: Callable[..., dict[str, Any]],
) -> None:
    assert FitDefaults.from_config(resolved()) == FitDefaults(
        aggregation_frequency=1,
        average_aggregated_gradients=True,
        checkpoint_policy="best",
        step_zero_validation=False,
        profiling=ProfilingWindow(),
    )


def test_continuous_checkpoints_become_arguments(
    resolved: Callable[..., dict[str, Any]],
) -> None:
    defaults = FitDefaults.from_config(
        resolved(min_checkpoint_period="continuous", checkpoint_bytes_per_hour="20GB")
    )
    assert defaults.checkpoint_period == "continuous"
    assert defaults.checkpoint_bytes_per_hour == 20 * 1000**3
    given = [True, 0.05, 30, None]
    configs = (resolved(memory_checkpoints=value) for value in given)
    assert [FitDefaults.from_config(one).memory_checkpoints for one in configs] == given


def test_every_older_field_becomes_an_argument(resolved: Callable[..., dict[str, Any]]) -> None:
    config = resolved(
        min_checkpoint_period={"batches": 10},
        min_validation_period={"records": 64},
        scheduling_unit=5,
        perform_initial_validation=True,
        checkpoint_policy="none",
        optimizations={"aggregation_frequency": 2, "average_aggregated_gradients": False},
        profiling={
            "enabled": True, "sync_timings": False, "begin_on_batch": 3, "end_after_batch": 4,
        },
    )  # fmt: skip
    assert FitDefaults.from_config(config) == FitDefaults(
        checkpoint_period=Batch(10),
        validation_period=Record(64),
        reporting_period=Batch(5),
        aggregation_frequency=2,
        average_aggregated_gradients=False,
        checkpoint_policy="none",
        step_zero_validation=True,
        profiling=ProfilingWindow(
            enabled=True, sync_timings=False, begin_on_batch=3, end_after_batch=4
        ),
    )


def test_a_config_from_before_these_fields_says_nothing() -> None:
    assert FitDefaults.from_config({}) == FitDefaults()
    assert precision_of({}) is None


@pytest.mark.parametrize(
    ("length", "unit"),
    [
        (None, None),
        (0, None),
        (7, Batch(7)),
        ({"batches": 0}, None),
        ({"epochs": 0}, None),
        ({"batches": 3}, Batch(3)),
        ({"epochs": 2}, Epoch(2)),
        ({"records": 64}, Record(64)),
    ],
)
def test_a_period_becomes_a_train_unit_and_zero_is_never(
    length: Any, unit: TrainUnit | None
) -> None:
    assert unit_of(length) == unit


@pytest.mark.parametrize(("level", "precision"), [("O0", "fp32"), ("O1", "fp16")])
def test_mixed_precision_becomes_a_precision(
    resolved: Callable[..., dict[str, Any]], level: str, precision: str
) -> None:
    assert precision_of(resolved(optimizations={"mixed_precision": level})) == precision


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_the_environment_asks_for_the_test_mode(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("PACELINE_TEST_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("PACELINE_TEST_MODE", value)
    assert is_test_mode() is expected


def test_a_test_mode_that_is_neither_on_nor_off_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TEST_MODE", "false")
    with pytest.raises(ValueError, match="`PACELINE_TEST_MODE` must be 0 or 1, but got 'false'"):
        is_test_mode()
