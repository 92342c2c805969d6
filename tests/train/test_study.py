"""Ask and tell in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import ConfigError
from paceline.search import Observation, Proposal, Sampler, Space
from paceline.train import Study

SPACE = {"x": {"type": "double", "minval": 0, "maxval": 1}}
HALVING = {
    "name": "async_halving", "metric": "loss", "num_rungs": 2, "max_trials": 5, "max_time": 4,
    "time_metric": "batches", "max_concurrent_trials": 1, "smaller_is_better": False,
}  # fmt: skip


class Half(Sampler):
    def ask(
        self, space: Space, observations: Sequence[Observation], n: int, rng: Any
    ) -> Sequence[Proposal]:
        return [Proposal(hparams={"x": 0.5 + len(observations) / 10})] * n


def test_a_study_hands_out_trials_and_learns_their_values() -> None:
    study = Study(SPACE, sampler=Half(), seed=1)
    first, second = study.ask(), study.ask()
    assert first is not None
    assert second is not None
    assert (first.by, first.hparams, second.hparams) == ("Half", {"x": 0.5}, {"x": 0.6})
    study.tell(second, 2.0)
    study.tell(first, 3.0)
    assert study.best_trial is second
    with pytest.raises(ValueError, match="Trial 1 must be open"):
        study.tell(first, 1.0)
    third = study.ask()
    assert third is not None
    study.fail(third)
    assert study.best_trial is second


@pytest.mark.parametrize("value", ["low", True, np.bool_(False), [1.0]])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    study = Study(SPACE, seed=1)
    trial = study.ask()
    assert trial is not None
    for refused in (
        lambda: study.tell(trial, value),
        lambda: study.report(trial, value, 1),
        lambda: study.report(trial, 1.0, value),
    ):
        with pytest.raises(TypeError, match="`(value|time)` must be a number, but got"):
            refused()
    assert trial.value is None
    study.tell(trial, np.float32(0.5))
    assert study.best_trial is trial
    assert trial.value == 0.5


def test_a_method_stops_trials_and_ends_the_study() -> None:
    study = Study(SPACE, method=HALVING, seed=1)
    lengths = []
    while (trial := study.ask()) is not None:
        assert study.ask() is None, "one at once"
        time = 1
        while study.report(trial, trial.hparams["x"], time):
            time += 1
        lengths.append(time)
        study.tell(trial)
    assert len(study.trials) == 5
    assert lengths[0] == 4
    assert 1 in lengths
    best = study.best_trial
    assert best is not None
    assert best.value == max(trial.hparams["x"] for trial in study.trials)


def test_tpe_runs_in_a_process_that_ends_with_the_study() -> None:
    with Study(SPACE, sampler={"name": "optuna", "of": "tpe"}, seed=1) as study:
        for _ in range(3):
            trial = study.ask()
            assert trial is not None
            assert trial.by == "optuna tpe"
            study.tell(trial, float("nan"))
    assert study.best_trial is None


def test_the_same_seed_asks_for_the_same_trials() -> None:
    one, two = (Study(SPACE, seed=3) for _ in range(2))
    assert [one.ask().hparams for _ in range(3)] == [two.ask().hparams for _ in range(3)]  # type: ignore[union-attr]


TIMED = {"metric": "loss", "max_trials": 5, "max_time": 4, "time_metric": "batches"}


def test_a_study_ends_at_its_limits_and_learns_from_a_file(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.csv"
    earlier.write_text("config.x,loss\n0.5,1.0\n0.25,nan\n7,0.1\n0.75,2.0\n,1\n")
    method = {
        "name": "random", "metric": "loss", "max_trials": 9, "warm_start_from": [str(earlier)],
        "sampler": {"name": "optuna"}, "limits": {"target": 0.2},
    }  # fmt: skip
    space = {"x": {"type": "double", "minval": 0, "maxval": 1}}
    with Study(space, method=method, seed=0) as study:
        seen = study._search.observations()
        # Neither what is no number, nor what is outside of the space.
        assert [(one.hparams, one.loss) for one in seen] == [({"x": 0.5}, 1.0), ({"x": 0.75}, 2.0)]
        first, other = study.ask(), study.ask()
        assert first is not None
        assert other is not None
        assert first.why == "knew 2 ended and 0 running trial(s)"
        assert not study.report(first, 0.1, 1)
        assert other.is_stopped
        for trial in (first, other):
            study.tell(trial)
        assert study.ask() is None


def test_a_study_refuses_what_a_config_would() -> None:
    with pytest.raises(ConfigError, match="sampler"):
        Study(SPACE, sampler="no.sampler")
    with pytest.raises(ImportError, match="`sobel` must be named by an entry point"):
        Study(SPACE, sampler="sobel")
    with pytest.raises(ValueError, match="must not limit time"):
        Study(SPACE, method=HALVING | {"limits": {"max_wall_time": 5}})
    with pytest.raises(ValueError, match="`pbt` must run under a master"):
        Study(SPACE, method={"name": "pbt", "interval": 1, **TIMED})
    with pytest.raises(ConfigError, match="count"):
        Study(SPACE, sampler="grid")
    with pytest.raises(ConfigError, match="points_to_evaluate"):
        Study(SPACE, method=HALVING | {"points_to_evaluate": [{"x": 3}]})
