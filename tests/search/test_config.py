from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.search import Mode
from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig
from paceline.search._grid_random_single import GridConfig, RandomConfig, SingleConfig

ASHA: dict[str, Any] = {"metric": "loss", "max_trials": 16, "max_time": 64, "time_metric": "epochs"}

WRONG = [
    (SingleConfig, {"metric": ""}, "`metric` must name a validation metric, but got ''"),
    (SingleConfig, {"metric": "loss", "max_length": 0}, "`max_length` .* at least 1, but got 0"),
    (RandomConfig, {"metric": "loss", "max_trials": 0}, "`max_trials` .* at least 1, but got 0"),
    (RandomConfig, {"metric": "loss", "max_trials": True}, "`max_trials` .* but got True"),
    (GridConfig, {"metric": "loss", "max_concurrent_trials": -1}, "at least 0, but got -1"),
    (AdaptiveAshaConfig, {**ASHA, "divisor": 1}, "`divisor` .* greater than 1, but got 1"),
    (AdaptiveAshaConfig, {**ASHA, "divisor": math.nan}, "`divisor` .* but got nan"),
    (AdaptiveAshaConfig, {**ASHA, "divisor": math.inf}, "`divisor` .* but got inf"),
    (AdaptiveAshaConfig, {**ASHA, "divisor": "4"}, "`divisor` .* but got '4'"),
    (AdaptiveAshaConfig, {**ASHA, "max_time": 0.5}, "`max_time` .* but got 0.5"),
    (AdaptiveAshaConfig, {**ASHA, "max_rungs": 0}, "`max_rungs` .* but got 0"),
    (AdaptiveAshaConfig, {**ASHA, "mode": "bold"}, "`mode` must be one of .* but got 'bold'"),
    (AdaptiveAshaConfig, {**ASHA, "bracket_rungs": [2, 0]}, r"`bracket_rungs\[1\]` .* but got 0"),
    (AsyncHalvingConfig, {**ASHA, "num_rungs": 0}, "`num_rungs` .* but got 0"),
]


@pytest.mark.parametrize(("config", "fields", "message"), WRONG)
def test_wrong_field_is_refused(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_adaptive_takes_plain_values() -> None:
    plain: dict[str, Any] = {"mode": "aggressive", "bracket_rungs": [3, 2]}
    config = AdaptiveAshaConfig(**ASHA, **plain)
    assert config.mode is Mode.AGGRESSIVE
    assert config.bracket_rungs == (3, 2)


def test_adaptive_has_the_documented_defaults() -> None:
    config = AdaptiveAshaConfig(**ASHA)
    assert (config.smaller_is_better, config.mode, config.divisor) == (True, Mode.STANDARD, 4)
    assert (config.max_rungs, config.bracket_rungs, config.max_concurrent_trials) == (5, (), 16)
