"""Ask and tell in this process."""

import json
import subprocess
import sys
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


def test_the_sampler_of_a_study_begins_with_what_a_file_says(tmp_path: Path) -> None:
    """Without it, the first ten trials are drawn at random."""
    earlier = tmp_path / "earlier.csv"
    earlier.write_text("x,loss\n" + "".join(f"{n / 40},{abs(n - 30)}\n" for n in range(40)))
    method = {
        "name": "random", "metric": "loss", "max_trials": 20, "warm_start_from": [str(earlier)],
        "sampler": "tpe",
    }  # fmt: skip
    space = {"x": {"type": "double", "minval": 0, "maxval": 1}}
    with Study(space, method=method, seed=0) as study:
        asked = [trial for _ in range(20) if (trial := study.ask()) is not None]
    chosen = [one.hparams["x"] for one in asked if "of 40 trials" in str(one.why)]
    assert len(chosen) >= 12
    assert all(0.5 < x < 1 for x in chosen)


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


def told(study: Study) -> list[tuple[object, ...]]:
    return [(t.hparams, t.seed, t.by, t.value, t.is_stopped, t.is_over) for t in study.trials]


@pytest.mark.long
def test_a_killed_study_continues_with_its_trials_and_the_same_draws(tmp_path: Path) -> None:
    whole = Study(SPACE, method=HALVING, seed=1)
    for number in range(4):
        trial = whole.ask()
        assert trial is not None
        whole.report(trial, 1.0 / (1 + number), 1)
        whole.tell(trial)
    code = f"""
import os
import numpy as np
from paceline.train import Study
study = Study({SPACE!r}, method={HALVING!r}, seed=1, directory={str(tmp_path)!r})
for number in range(3):
    trial = study.ask()
    study.report(trial, np.float64(1.0 / (1 + number)), np.int64(1))
    if number < 2:
        study.tell(trial)
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with Study(SPACE, method=HALVING, directory=tmp_path) as study:
        [trial] = [trial for trial in study.trials if not trial.is_over]
        study.tell(trial)
        last = study.ask()
        assert last is not None
        study.report(last, 0.25, 1)
        study.tell(last)
        assert told(study) == told(whole)
        with pytest.raises(RuntimeError, match="while it is running"):
            Study(SPACE, method=HALVING, directory=tmp_path)
        study.close()
    # Another process may have the directory now.
    with pytest.raises(RuntimeError, match="must be open"):
        study.ask()
    with pytest.raises(ValueError, match="same `space`"):
        Study({"y": SPACE["x"]}, method=HALVING, directory=tmp_path)


def test_a_proposal_is_the_next_trial_and_the_state_is_json() -> None:
    study = Study({**SPACE, "size": {"type": "int", "minval": 1, "maxval": 9}}, seed=1)
    study.propose({"x": 0.25}, by="model", why="between the best two")
    with pytest.raises(ValueError, match="x"):
        study.propose({"x": 2.0})
    first, second = study.ask(), study.ask()
    assert first is not None
    assert second is not None
    assert (first.hparams["x"], first.by, first.why) == (0.25, "model", "between the best two")
    assert 1 <= first.hparams["size"] <= 9
    assert second.by != "model"
    study.tell(first, 2.0)
    study.report(second, float("nan"), 1)
    state = json.loads(json.dumps(study.state(), allow_nan=False))
    assert state["best"] == 1
    assert state["metric"] == "value"
    assert [trial["value"] for trial in state["trials"]] == [2.0, None]
    assert state["space"]["x"]["maxval"] == 1


OBJECTIVES = [{"metric": "loss"}, {"metric": "score", "smaller_is_better": False}]


def test_a_study_of_two_objectives_has_a_front_also_after_its_end(tmp_path: Path) -> None:
    """NaN in one objective is never on the front; a report counts as a whole."""
    method = {"name": "random", "max_trials": 5, "objectives": OBJECTIVES}

    def fronts(study: Study) -> Any:
        return [(trial.number, trial.values) for trial in study.best_trials]

    with Study(SPACE, method=method, sampler=Half(), seed=1, directory=tmp_path / "s") as study:
        given: list[Any] = [
            (1.0, 1.0),
            (0.5, 0.5),
            (2.0, 0.5),
            (0.1, float("nan")),
            np.array([0.4, 0.1]),
        ]
        for values in given:
            trial = study.ask()
            assert trial is not None
            if trial.number == 2:
                assert study.report(trial, [0.6, 0.5], 1), "a random search stops none"
            study.tell(trial, values)
        assert fronts(study) == [(5, (0.4, 0.1)), (2, (0.5, 0.5)), (1, (1.0, 1.0))]
        assert study.trials[3].values == (), "of NaN nothing counts"
        with pytest.raises(RuntimeError, match="`best_trials` is its Pareto front"):
            _ = study.best_trial
        state = json.loads(json.dumps(study.state()))
        assert (state["best"], state["front"]) == (None, [5, 2, 1])
        assert [one["metric"] for one in state["objectives"]] == ["loss", "score"]
    with Study(SPACE, method=method, sampler=Half(), seed=1, directory=tmp_path / "s") as again:
        assert fronts(again) == [(5, (0.4, 0.1)), (2, (0.5, 0.5)), (1, (1.0, 1.0))]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(1.0, TypeError), ("ab", TypeError), ([1.0], ValueError), ([1, "a"], TypeError)],
)
def test_a_study_of_two_objectives_needs_a_number_for_each(
    value: Any, kind: type[Exception]
) -> None:
    """Nothing is told to the search then."""
    study = Study(SPACE, method={"name": "random", "max_trials": 5, "objectives": OBJECTIVES})
    trial = study.ask()
    assert trial is not None
    with pytest.raises(kind, match="`value` must be a number"):
        study.tell(trial, value)
    assert not trial.is_over


@pytest.mark.parametrize(
    "method", [{"name": "hyperband"}, {"name": "adaptive_asha", "promotion": True}]
)
def test_a_study_refuses_methods_whose_trials_wait(method: dict[str, Any]) -> None:
    """They would train every trial to its full length, and stop none."""
    halving = {"metric": "loss", "max_trials": 5, "max_length": {"epochs": 4}}
    with pytest.raises(ValueError, match="a study cannot pause"):
        Study(SPACE, method=halving | method)
