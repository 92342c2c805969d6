"""Field `sampler` of a searcher, and the points to begin with."""

from typing import Any

import pytest

from paceline.config import ConfigError, validate_config

SPACE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


def config_of(**searcher: Any) -> Any:
    given = {"name": "random", "metric": "loss", "max_trials": 3} | searcher
    return validate_config({"entrypoint": "true", "searcher": given, "hyperparameters": SPACE})


@pytest.mark.parametrize(
    ("sampler", "shown"),
    [(None, "random"), ("sobol", "sobol"), ("optuna", "optuna tpe"), ("a.b:C", "a.b:C"),
     ({"name": "optuna", "of": "cmaes", "options": {"popsize": 4}}, "optuna cmaes")],
)  # fmt: skip
def test_a_sampler_has_a_short_and_a_long_form(sampler: Any, shown: str) -> None:
    searcher = config_of(sampler=sampler).searcher
    assert searcher.sampler_spec().shown == shown
    assert searcher.is_asking == (sampler is not None)


@pytest.mark.parametrize(
    ("searcher", "path"),
    [
        ({"sampler": "t.p.e"}, "searcher.sampler.name"),
        ({"sampler": {"name": "sobol", "of": "tpe"}}, "searcher.sampler"),
        ({"sampler": {"name": "optuna", "of": "best"}}, "searcher.sampler.of"),
        ({"sampler": {"name": "optuna", "timeout": 0}}, "searcher.sampler.timeout"),
        ({"sampler": "grid"}, "hyperparameters.lr.count"),
        ({"points_to_evaluate": [{"lr": 2}]}, "points_to_evaluate"),
        ({"points_to_evaluate": [{"rate": 0.1}]}, "points_to_evaluate"),
    ],
)
def test_what_cannot_work_is_refused(searcher: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        config_of(**searcher)


def test_a_grid_search_takes_no_sampler() -> None:
    with pytest.raises(ConfigError, match="draws nothing"):
        config_of(name="grid", sampler="sobol", max_trials=None)
