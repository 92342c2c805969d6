"""Searches with samplers on a real master: told decisions, kills, samplers that fail."""

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import ApiError
from paceline.config import validate_config
from paceline.search._search import replay
from paceline.search._search_messages import Proposed, input_from_json, message_to_json

SCRIPT = """
import paceline as det
with det.core.init() as context:
    hparams = context.info.trial.hparams
    for batch in (1, 4):
        loss = (hparams["x"] - 0.3) ** 2 / batch
        context.train.report_validation_metrics(batch, {"loss": loss})
        if context.preempt.should_preempt():
            break
"""
SPACE = {"x": {"type": "double", "minval": 0, "maxval": 1}}


def config_of(sampler: Any, **searcher: Any) -> dict[str, Any]:
    halving = {
        "name": "async_halving", "metric": "loss", "num_rungs": 2, "max_trials": 6, "max_time": 4,
        "time_metric": "batches", "max_concurrent_trials": 2, "sampler": sampler,
    }  # fmt: skip
    return {
        "entrypoint": "python3 train.py",
        "searcher": halving | searcher,
        "hyperparameters": SPACE,
        "max_restarts": 5,
    }


def check_replay(home: Path) -> list[Proposed]:
    """Check that the stored inputs give the stored operations; return the answers of samplers."""
    with sqlite3.connect(home / "master.sqlite") as connection:
        [(config, seed)] = connection.execute("SELECT config, seed FROM experiments").fetchall()
        stored = connection.execute(
            "SELECT input, operations FROM search_inputs ORDER BY number"
        ).fetchall()
    checked = validate_config(json.loads(config))
    inputs = [input_from_json(given) for given, _ in stored]
    again = replay(checked.search_config(), checked.hyperparameters, seed, inputs, is_asking=True)
    decided = [[json.loads(message_to_json(one)) for one in group] for group in again]
    assert decided == [json.loads(operations) for _, operations in stored]
    return [one for one in inputs if isinstance(one, Proposed)]


def describe(master: Any, *command: str) -> str:
    """Return what the CLI says, in one line."""
    from typer.testing import CliRunner

    from paceline.cli._app import app

    env = {"PACELINE_HOME": str(master.home), "COLUMNS": "400"}
    found = CliRunner().invoke(app, [*command], env=env)
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split())


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "master.search.applied:4",
        *(pytest.param(f, marks=pytest.mark.slow) for f in (None, "master.search.applied:9")),
    ],
)
def test_a_search_by_tpe_ends_with_the_decisions_that_it_stored(
    fault: str | None,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    master = make_master(2)
    master.start(fault=fault)
    sampler = {"name": "optuna", "of": "tpe"}
    config = config_of(sampler, points_to_evaluate=[{"x": 0.5}])
    master.client().create_experiment(config, write_context(SCRIPT))
    if fault is not None:
        master.wait(240)
        master.start()
    [experiment] = master.client().list_experiments()
    wait_until(lambda: experiment.reload().state.is_terminal)
    assert experiment.state.value == "COMPLETED"
    trials = experiment.trials()
    assert len(trials) == 6
    answers = check_replay(master.home)
    assert [one.by for one in answers] == ["points_to_evaluate"] + ["optuna tpe"] * 5
    assert [one.is_fallback for one in answers] == [False] * 6
    told = [trial.decisions() for trial in trials]
    assert [found.proposal.by for found in told] == [one.by for one in answers]
    assert trials[0].hparams == {"x": 0.5}
    assert all(found.rungs for found in told)
    sampled = experiment.search().sampler
    assert (sampled.name, sampled.num_proposed, sampled.num_fallbacks) == ("optuna tpe", 6, 0)


LAB = """
import os, time
from paceline.search import Proposal, Sampler

class Lab(Sampler):
    def __init__(self, fault):
        self.fault = fault

    def ask(self, space, observations, n, rng):
        if len(observations) < 2:
            if self.fault == "raise":
                raise ValueError("out of ideas")
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "kill":
                os.kill(os.getpid(), 9)
            if self.fault == "outside":
                return [Proposal(hparams={"x": 3})] * n
        return [Proposal(hparams=space.decode([0.25]), why="a quarter")] * n
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "ValueError: out of ideas"),
        ("hang", "did not answer within 10 s"),
        ("kill", "its process has ended"),
        ("outside", "must be a number from 0.0 to 1.0, but got 3"),
    ],
)
def test_a_sampler_that_fails_delays_a_search_and_is_told(
    fault: str,
    why: str,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    (tmp_path / "lab_sampler.py").write_text(LAB)
    facts = tmp_path / "lab_sampler-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-sampler\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[paceline.samplers]\nlab = lab_sampler:Lab\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    master = make_master(2).start(PYTHONPATH=path)
    timeout = 10 if fault == "hang" else 120
    sampler = {"name": "lab", "options": {"fault": fault}, "timeout": timeout}
    # The package of the sampler is found by the master's own environment.
    experiment = master.client().create_experiment(config_of(sampler), write_context(SCRIPT))
    wait_until(lambda: experiment.reload().state.is_terminal)
    assert experiment.state.value == "COMPLETED"
    answers = check_replay(master.home)
    assert [one.is_fallback for one in answers] == [True] * 2 + [False] * 4
    trials = experiment.trials()
    assert [trial.hparams["x"] == 0.25 for trial in trials] == [False] * 2 + [True] * 4
    found = describe(master, "experiment", "describe", str(experiment.id))
    assert "lab, 6 trials, 2 of them drawn at random instead" in found
    assert why in found
    assert "by random: " in describe(master, "trial", "describe", str(trials[0].id))
    found = describe(master, "trial", "describe", str(trials[5].id))
    assert "by lab: a quarter" in found
    assert "bracket 1, rung 1:" in found


def test_a_sampler_that_is_not_installed_is_refused_at_once(
    master: Any, write_context: Callable[..., Path]
) -> None:
    context = write_context(SCRIPT)
    with pytest.raises(ApiError, match="must be named by an entry point `paceline.samplers`"):
        master.client().create_experiment(config_of("nowhere_at_all.mine:Own"), context)


@pytest.mark.long
def test_a_program_answers_a_random_search_over_the_api_across_a_kill_of_the_master(
    make_master: Callable[..., Any], write_context: Callable[..., Path]
) -> None:
    """The program sees the losses of earlier trials; no answer is lost or asked for twice."""
    master = make_master(2).start()
    sampler = {"name": "external", "timeout": 600}
    searcher = {"name": "random", "metric": "loss", "max_trials": 5, "max_concurrent_trials": 1}
    config = config_of(sampler) | {"searcher": searcher | {"sampler": sampler}}
    experiment = master.client().create_experiment(config, write_context(SCRIPT))
    losses: list[float | None] = []
    for number in range(5):
        if number in (1, 3):
            master.kill()
            master.start()
            experiment = master.client().get_experiment(experiment.id)
        while not (found := experiment.asks(wait_s=30)).asks:
            assert not experiment.reload().state.is_terminal
        losses = [seen.loss for seen in found.observations]
        experiment.answer(found.asks[0], {"x": 0.3 + number / 10}, why="a step further")
        with pytest.raises(ApiError, match="no ask"):
            experiment.answer(found.asks[0], {"x": 0.9})
    assert losses == pytest.approx([(number / 10) ** 2 / 4 for number in range(4)])
    assert experiment.wait(timeout=240).value == "COMPLETED"
    assert [trial.hparams["x"] for trial in experiment.trials()] == pytest.approx(
        [0.3, 0.4, 0.5, 0.6, 0.7]
    )
    assert [one.why for one in check_replay(master.home)] == ["a step further"] * 5


OBJECTIVES = [{"metric": "loss"}, {"metric": "score", "smaller_is_better": False}]
SCRIPT_OF_TWO = """
import math
import paceline as det
with det.core.init() as context:
    x = context.info.trial.hparams["x"]
    for batch in (1, 4):
        score = math.nan if x > 0.7 else -((x - 0.6) ** 2) / batch
        context.train.report_validation_metrics(batch, {"loss": x**2 / batch, "score": score})
        if context.preempt.should_preempt():
            break
"""


@pytest.mark.long
def test_a_search_of_two_objectives_keeps_its_decisions_and_shows_its_front(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    """A kill of the master changes no decision; NaN in one objective is on no front."""
    master = make_master(2)
    master.start(fault="master.search.applied:9")
    config = config_of({"name": "optuna", "of": "tpe"}, max_trials=9, objectives=OBJECTIVES)
    del config["searcher"]["metric"]
    config["searcher"]["points_to_evaluate"] = [{"x": x} for x in (0.9, 0.1, 0.5, 0.65)]
    master.client().create_experiment(config, write_context(SCRIPT_OF_TWO))
    master.wait(240)
    master.start()
    [experiment] = master.client().list_experiments()
    wait_until(lambda: experiment.reload().state.is_terminal)
    assert experiment.state.value == "COMPLETED"
    assert not any(one.is_fallback for one in check_replay(master.home))
    points = {}
    for trial in experiment.trials():
        *_, last = trial.iter_metrics("validation")
        values = (last.metrics["loss"], last.metrics["score"])
        if isinstance(values[1], float) and values[1] == values[1]:
            points[trial.id] = values
    found = experiment.search()
    expected = {
        one for one, (loss, score) in points.items()
        if not any(a <= loss and b >= score and (a, b) != (loss, score) for a, b in points.values())
    }  # fmt: skip
    assert {one.trial_id for one in found.front} == expected, f"{points}"
    assert {one.trial_id: tuple(one.values) for one in found.front} == {
        one: points[one] for one in expected
    }
    assert found.num_in_front == len(expected) > 1
    shown = describe(master, "experiment", "describe", str(experiment.id))
    assert "loss (smaller is better) and score (larger is better)" in shown
    assert f"Pareto front: {len(expected)} trials" in shown
    plain = json.loads(describe(master, "experiment", "describe", str(experiment.id), "--json"))
    assert plain["best_trial"] is None
    assert [one["trial_id"] for one in plain["front"]] == [one.trial_id for one in found.front]
    assert all("x" in one["hparams"] for one in plain["front"])


def test_a_program_that_answers_sees_the_losses_of_all_objectives(
    make_master: Callable[..., Any], write_context: Callable[..., Path]
) -> None:
    """Of NaN it sees nothing, of the other objective neither."""
    master = make_master(1).start()
    searcher = {"name": "random", "max_trials": 3, "max_concurrent_trials": 1}
    searcher |= {"objectives": OBJECTIVES, "sampler": {"name": "external", "timeout": 600}}
    experiment = master.client().create_experiment(
        config_of(None) | {"searcher": searcher}, write_context(SCRIPT_OF_TWO)
    )
    for x in (0.5, 0.9, 0.1):
        while not (found := experiment.asks(wait_s=30)).asks:
            assert not experiment.reload().state.is_terminal
        experiment.answer(found.asks[0], {"x": x})
    assert [one.metric for one in found.objectives] == ["loss", "score"]
    first, second = found.observations
    assert first.losses == pytest.approx([0.0625, 0.0025])
    assert (first.loss, second.loss, second.losses) == (first.losses[0], None, [])
    assert experiment.wait(timeout=240).value == "COMPLETED"
    assert len(check_replay(master.home)) == 3
