"""What repeats with other seeds say about a gain."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.client._experiment_lineage import Arm, compared, repeated_config
from paceline.config import validate_config

SMALLER: Any = SimpleNamespace(smaller_is_better=True)
LARGER: Any = SimpleNamespace(smaller_is_better=False)


def arm(*values: float | None, is_done: bool = True, first: int = 0) -> Arm:
    return Arm(7, 2, dict(enumerate(values, first)), is_done)


def test_a_gain_is_real_if_its_interval_is_above_zero() -> None:
    """Pairs differ by 1, 2 and 3: mean 2, deviation 1, and t of 2 degrees is 4.303."""
    found = compared(arm(1.0, 1.0, 1.0), arm(2.0, 3.0, 4.0), SMALLER)
    assert (found.gain, found.gain_over_noise, found.num_pairs) == (2.0, 2.0, 3)
    assert found.interval == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    assert found.is_real is False
    surer = compared(arm(1.0, 1.0, 1.0), arm(3.0, 3.1, 3.2), SMALLER)
    assert surer.is_real is True
    worse = compared(arm(1.0, 1.0, 1.0), arm(3.0, 3.1, 3.2), LARGER)
    assert worse.gain == pytest.approx(-2.1)
    assert worse.is_real is False


def test_nothing_is_said_while_repeats_are_missing() -> None:
    good = arm(3.0, 3.1, 3.2)
    assert compared(arm(1.0, 1.0, None), good, SMALLER).is_real is None
    assert compared(arm(1.0, 1.0, float("nan")), good, SMALLER).num_missing == 1
    assert compared(arm(1.0, 1.0, 1.0, is_done=False), good, SMALLER).is_real is None
    # Other seeds are no pairs.
    assert compared(arm(1.0, 1.0, 1.0, first=9), good, SMALLER).gain is None
    alone = compared(arm(1.0, 2.0, 3.0), None, SMALLER)
    assert (alone.mean, alone.deviation, alone.baseline, alone.is_real) == (2.0, 1.0, None, None)


@pytest.mark.parametrize(
    "searcher",
    [
        {"name": "single"},
        {"name": "random", "max_trials": 9, "max_length": {"epochs": 3}},
        {"name": "adaptive_asha", "max_trials": 9, "max_length": {"epochs": 8}},
    ],
)
def test_repeats_train_as_the_search_did_with_constants(searcher: dict[str, Any]) -> None:
    config = validate_config(
        {"name": "a", "entrypoint": "true", "searcher": {"metric": "loss"} | searcher,
         "labels": ["mine", "repeat:1"],
         "hyperparameters": {"g": {"x": {"type": "int", "minval": 1, "maxval": 9}}}}
    )  # fmt: skip
    of: Any = SimpleNamespace(config=config.to_json(), name="a")
    made = validate_config(repeated_config(of, {"g": {"x": 4}}, "repeat:3", 5, 77))
    assert (made.name, list(made.labels)) == ("a (repeat of trial 3)", ["mine", "repeat:3"])
    assert (made.searcher.length, made.searcher.max_trials) == (config.searcher.length, 5)
    assert made.hyperparameters == {"g": {"x": {"type": "const", "val": 4}}}
    assert made.to_json()["reproducibility"]["experiment_seed"] == 77
