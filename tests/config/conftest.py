"""Shared fixtures of the config's tests."""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import ConfigError, validate_config
from paceline.config._fields_and_problems import Problem


@pytest.fixture
def make() -> Callable[..., dict[str, Any]]:
    """Return a function that makes the data of a valid config, with other top-level fields."""

    def make_data(**fields: Any) -> dict[str, Any]:
        base = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
        return {**base, **fields}

    return make_data


@pytest.fixture
def problems_of() -> Callable[[dict[str, Any]], dict[str, Problem]]:
    """Return a function that gives a refused config's problems by their paths."""

    def collect(data: dict[str, Any]) -> dict[str, Problem]:
        with pytest.raises(ConfigError) as caught:
            validate_config(data)
        problems = {problem.path: problem for problem in caught.value.problems}
        assert len(problems) == len(caught.value.problems)
        return problems

    return collect
