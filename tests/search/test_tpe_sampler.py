"""The built-in TPE: what it learns, what it never does, and that it works from observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.search import Observation, Space, parse_space
from paceline.search._tpe_sampler import TpeSampler

MIXED: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -6, "maxval": 0},
    "layers": {"type": "int", "minval": 1, "maxval": 8},
    "act": {"type": "categorical", "vals": ["relu", "tanh", ["gelu", {"approximate": True}]]},
    "fixed": 7,
}
SMALL: dict[str, Any] = {
    "width": {"type": "int", "minval": 1, "maxval": 4},
    "bias": {"type": "categorical", "vals": [True, False, 1]},
}


def loss_of(hparams: dict[str, Any]) -> float:
    is_gelu = isinstance(hparams["act"], list)
    return float(
        (math.log10(hparams["lr"]) + 3) ** 2 + (hparams["layers"] - 5) ** 2 + 3 * (not is_gelu)
    )


def searched(
    space: Space,
    num_trials: int,
    seed: int,
    outcome: Callable[[dict[str, Any]], dict[str, Any]],
    earlier: tuple[Observation, ...] = (),
    *,
    at_once: int = 1,
    is_made_anew: bool = False,
) -> list[Observation]:
    sampler, seen = TpeSampler(), list(earlier)
    while len(seen) < num_trials:
        if is_made_anew:
            sampler = TpeSampler()
        rng = np.random.default_rng([seed, len(seen)])
        for proposal in sampler.ask(space, seen, at_once, rng):
            hparams = space.check(proposal.hparams)
            fields = {"state": "completed", "time": 1.0} | outcome(hparams)
            seen.append(Observation(id=str(len(seen)), hparams=hparams, **fields))
    return seen


def best(trials: list[Observation]) -> float:
    return min(trial.loss for trial in trials if trial.loss is not None)


def test_it_finds_better_values_than_draws_at_random() -> None:
    space = parse_space(MIXED)
    wins = 0
    for seed in range(10):
        learned = searched(space, 60, seed, lambda h: {"loss": loss_of(h)})
        rng = np.random.default_rng(seed)
        drawn = [
            loss_of(space.decode(rng.random(len(space.parameters)).tolist())) for _ in range(60)
        ]
        wins += best(learned) < min(drawn)
    assert wins >= 9


@pytest.mark.parametrize("at_once", [1, 5])
def test_it_tries_each_point_of_a_small_space_once_before_it_repeats_one(at_once: int) -> None:
    space = parse_space(SMALL)
    trials = searched(space, 40, 3, lambda h: {"loss": float(h["width"])}, at_once=at_once)
    points = [repr(trial.hparams) for trial in trials]
    assert len(set(points)) == 12
    # A fifth of the proposals is drawn at random, and may repeat a point.
    assert len(set(points[:20])) >= 11


def test_it_draws_at_random_until_ten_trials_have_ended() -> None:
    space = parse_space(MIXED)
    seen = [
        Observation(id=str(i), hparams=space.decode([0.5] * 3), state=state, loss=loss, time=1.0)
        for i, (state, loss) in enumerate([("completed", 1.0)] * 9 + [("running", 0.5)] * 50)
    ]
    proposals = TpeSampler().ask(space, seen, 8, np.random.default_rng(0))
    assert {proposal.why for proposal in proposals} == {"at random"}


def test_it_learns_from_earlier_trials_at_once() -> None:
    space = parse_space(MIXED)
    rng = np.random.default_rng(1)
    points = [space.decode(rng.random(3).tolist()) for _ in range(80)]
    earlier = tuple(
        Observation(
            id=f"earlier {i}", hparams=point, state="completed", loss=loss_of(point), time=1.0,
            is_earlier=True,
        )
        for i, point in enumerate(points)
    )  # fmt: skip
    proposals = TpeSampler().ask(space, earlier, 40, np.random.default_rng(2))
    losses = [loss_of(one.hparams) for one in proposals if one.why != "at random"]
    assert len(losses) >= 25
    assert np.median(losses) < np.median([loss_of(point) for point in points]) / 2
    assert proposals[-1].why in ("at random", "like the best 12 of 80 trials, unlike the others")
    assert all(one.by == "tpe" for one in proposals)


def test_it_keeps_away_from_what_ran_out_of_memory() -> None:
    space = parse_space({"batch_size": {"type": "int", "minval": 1, "maxval": 512}})

    def outcome(hparams: dict[str, Any]) -> dict[str, Any]:
        # Where there is memory, all are alike: only the lack of it can be learned.
        size = hparams["batch_size"]
        too_large = {"state": "out_of_memory", "loss": None, "time": 0.0}
        return too_large if size > 200 else {"loss": size * 7919 % 101 / 101}

    late = [trial.state for seed in range(5) for trial in searched(space, 80, seed, outcome)[40:]]
    # Draws at random, which are a fifth, have 0.61.
    assert late.count("out_of_memory") / len(late) < 0.3


def test_failed_trials_count_for_nothing() -> None:
    space = parse_space(MIXED)
    trials = searched(space, 30, 4, lambda h: {"loss": loss_of(h)})
    failed = [
        Observation(id=f"f{i}", hparams=trials[0].hparams, state="failed", loss=0.0, time=1.0)
        for i in range(9)
    ]
    ask = TpeSampler().ask
    without = ask(space, trials, 4, np.random.default_rng(0))
    assert ask(space, [*failed, *trials], 4, np.random.default_rng(0)) == without


def test_a_sampler_made_anew_proposes_the_same() -> None:
    space = parse_space(MIXED)
    runs = [
        searched(space, 40, 6, lambda h: {"loss": loss_of(h)}, is_made_anew=anew)
        for anew in (False, True)
    ]
    assert runs[0] == runs[1]


def test_trials_that_run_are_not_proposed_again() -> None:
    space = parse_space({"x": {"type": "double", "minval": 0.0, "maxval": 1.0}})
    trials = searched(space, 30, 7, lambda h: {"loss": abs(h["x"] - 0.3)})
    ask = TpeSampler().ask
    calls = [ask(space, trials, 1, np.random.default_rng(i))[0] for i in range(60)]
    alone = [one.hparams["x"] for one in calls if one.why != "at random"]
    around = [
        Observation(id=f"r{i}", hparams={"x": x}, state="running", loss=None, time=0.0)
        for i, x in enumerate(alone)
    ]
    calls = [ask(space, [*trials, *around], 1, np.random.default_rng(i))[0] for i in range(60)]
    beside = [one.hparams["x"] for one in calls if one.why != "at random"]
    assert np.std(beside) > 1.5 * np.std(alone)


def test_several_objectives_rank_by_who_dominates_them() -> None:
    space = parse_space(
        {name: {"type": "double", "minval": 0.0, "maxval": 1.0} for name in ("x", "waste")}
    )

    def outcome(hparams: dict[str, Any]) -> dict[str, Any]:
        x, waste = hparams["x"], hparams["waste"]
        losses = (x + waste, 1 - x + waste)
        return {"loss": losses[0], "losses": losses}

    trials = searched(space, 100, 8, outcome)
    late = [trial.hparams for trial in trials[60:]]
    assert np.median([one["waste"] for one in late]) < 0.2
    # The whole front is tried, and not only the end that is best in the first objective.
    assert min(one["x"] for one in late) < 0.3
    assert max(one["x"] for one in late) > 0.7


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {},
        {"only": 3},
        {"one": {"type": "categorical", "vals": ["a"]}},
        {"huge": {"type": "int", "minval": 1, "maxval": 2**60}},
        {"tiny": {"type": "double", "minval": 0.5, "maxval": 0.5 + 1e-16 + 1e-15}},
    ],
    ids=lambda space: "-".join(space) or "nothing",
)
def test_it_proposes_from_odd_spaces(hyperparameters: dict[str, Any]) -> None:
    space = parse_space(hyperparameters)
    number = iter(range(1000))
    trials = searched(space, 30, 9, lambda _: {"loss": float(next(number) % 5)}, at_once=3)
    assert len(trials) == 30


def test_a_space_of_very_many_hyperparameters_is_drawn_at_random() -> None:
    # In the master, where 24 candidates x 1,000 trials x 10,000 numbers would be 2 GB.
    real = {"type": "double", "minval": 0.0, "maxval": 1.0}
    for size, is_drawn in ((100, False), (101, True)):
        space = parse_space({f"x{i}": real for i in range(size)})
        trials = searched(space, 20, 11, lambda h: {"loss": h["x0"]})
        proposals = TpeSampler().ask(space, trials, 20, np.random.default_rng(0))
        assert all(one.why == "at random" for one in proposals) is is_drawn


@pytest.mark.parametrize("loss", [0.0, 1e308, -1e308])
def test_equal_and_extreme_losses_are_ranked(loss: float) -> None:
    trials = searched(parse_space(MIXED), 30, 10, lambda _: {"loss": loss})
    assert len(trials) == 30
