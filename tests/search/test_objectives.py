"""Searches of several objectives: ranks, fronts, decisions, samplers, configs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ConfigError, validate_config
from paceline.search import Create, Exited, ExitReason, Reported, Started, Stop, simulate
from paceline.search._adaptive_asha import AsyncHalvingConfig
from paceline.search._rungs import FrontRung, newer_point, pareto_front
from paceline.search._samplers import answers, asking, make_sampler
from paceline.search._search import Search, replay
from paceline.search._search_messages import input_from_json, message_to_json
from paceline.search._search_method import Objective
from paceline.testing import check_search_method

SPACE: dict[str, Any] = {
    "x": {"type": "double", "minval": 0.0, "maxval": 1.0},
    "y": {"type": "double", "minval": 0.0, "maxval": 1.0},
}
TWO = [{"metric": "loss"}, {"metric": "score", "smaller_is_better": False}]
THREE = [*TWO, {"metric": "seconds"}]
HALVING = {"max_trials": 12, "max_length": {"epochs": 9}, "divisor": 3}
METHODS: list[dict[str, Any]] = [
    {"name": "random", "max_trials": 6},
    {"name": "async_halving", "num_rungs": 3, **HALVING},
    {"name": "adaptive_asha", **HALVING},
    {"name": "adaptive_asha", "promotion": True, **HALVING},
    {"name": "hyperband", **HALVING},
    {"name": "median_stopping", "max_trials": 8, "max_length": {"epochs": 9}},
    {"name": "pbt", "max_trials": 5, "max_length": {"epochs": 9}, "interval": 2},
]
# Small numbers, so that equal ones are common; points have two or three of them.
POINTS = st.integers(2, 3).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, 4).map(float)] * size), max_size=25)
)


def section_of(searcher: dict[str, Any], objectives: Any = TWO) -> Any:
    """Return the checked section of a searcher with objectives."""
    config = {"entrypoint": "x", "hyperparameters": SPACE}
    return validate_config(config | {"searcher": {**searcher, "objectives": objectives}}).searcher


def is_better(one: Any, other: Any) -> bool:
    """Return whether a point dominates another, by the definition."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(POINTS, st.lists(st.integers(0, 30), max_size=5))
def test_a_rung_ranks_by_fronts_whatever_comes_and_goes(points: Any, gone: list[int]) -> None:
    """Each rank is that of its definition; a stored rung ranks as before."""
    size = len(points[0]) if points else 2
    rung, left = FrontRung(1, size), dict[str, Any]()
    for number, point in enumerate(points):
        key = str(number)
        rank = rung.insert(key, point)
        left[key] = point
        assert [k for k, _ in rung].index(key) == rank, f"{point} is where its rank says"
    for key in {str(number) for number in gone} & left.keys():
        rung.remove(key)
        del left[key]
    order = [key for key, _ in rung]
    counts = [sum(is_better(other, left[key]) for other in left.values()) for key in order]
    assert counts == sorted(counts), f"{counts} rise from front to front"
    assert sorted(order) == sorted(left), f"{order} has all that are left"
    stored = FrontRung(1, size)
    stored.load(json.loads(json.dumps(rung.snapshot())))
    assert list(stored) == list(rung), "a stored rung ranks the same"
    if left:
        assert stored.insert("new", points[0]) == rung.insert("new", points[0])


@given(POINTS)
def test_the_front_has_what_no_other_dominates(points: Any) -> None:
    """The front is that of the definition, copies of its points included."""
    found = pareto_front([(str(number), point) for number, point in enumerate(points)])
    expected = [p for p in points if not any(is_better(other, p) for other in points)]
    assert sorted(point for _, point in found) == sorted(expected), f"the front of {points}"


@pytest.mark.parametrize(
    ("point", "losses", "expected"),
    [
        ((), (1.0, 2.0), (1.0, 2.0)),
        ((), (math.nan, 2.0), ()),
        ((1.0, 2.0), (1.0, math.inf), (1.0, 2.0)),
        ((1.0, 2.0), (1.0, 3.0), (1.0, 2.0)),
        ((1.0, 2.0), (0.5, 3.0), (0.5, 3.0)),
        ((1.0, 2.0), (0.5, 1.0), (0.5, 1.0)),
    ],
)
def test_a_trial_stands_for_its_newest_report_that_counts(
    point: Any, losses: Any, expected: Any
) -> None:
    """Values of different reports are never mixed."""
    assert newer_point(point, losses) == expected


@pytest.mark.long
@pytest.mark.parametrize("objectives", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("searcher", METHODS, ids=lambda one: "-".join(map(str, one.values())))
def test_a_method_keeps_its_rules_with_objectives(searcher: Any, objectives: Any) -> None:
    """Repeated inputs, stored states, NaN and ties: the contract of all methods."""
    check_search_method(section_of(searcher, objectives), SPACE, num_runs=20)


@pytest.mark.parametrize("searcher", METHODS, ids=lambda one: "-".join(map(str, one.values())))
def test_a_second_objective_that_is_always_the_same_changes_no_decision(searcher: Any) -> None:
    """With one objective in effect, several decide as one."""

    def loss(create: Any, time: int) -> float:
        return float(round(create.hparams["x"], 1) / time)

    one = simulate(
        section_of({**searcher, "metric": "loss"}, []).search_config(),
        SPACE, 3, loss, report_every=1,
    )  # fmt: skip
    several = simulate(
        section_of(searcher).search_config(),
        SPACE, 3, lambda create, time: (loss(create, time), 1.0), report_every=1,
    )  # fmt: skip
    assert several.operations == one.operations, f"decisions of {searcher['name']} are the same"


def test_a_trial_that_is_best_in_one_objective_passes_a_rung() -> None:
    """Each of the extremes continues, what is dominated stops; a list of losses alone decides."""
    config = AsyncHalvingConfig(
        metric="loss", objectives=(Objective("loss"), Objective("score", False)), num_rungs=2,
        max_trials=8, max_time=4, time_metric="epochs", divisor=2, max_concurrent_trials=8,
    )  # fmt: skip
    search = Search(config, SPACE, 0)
    ids = [one.request_id for one in search.apply(Started()) if isinstance(one, Create)]
    given = [(1.0, 1.0), (0.1, 0.0), (2.0, 0.5), (0.5, 9.0), (0.1, math.nan), (math.nan, 99.0)]
    stopped = []
    for request_id, (loss, score) in zip(ids, given, strict=False):
        found = search.apply(Reported(request_id=request_id, time=2, metric=loss, others=(score,)))
        stopped.append(any(isinstance(one, Stop) for one in found))
    assert stopped == [False, True, True, False, True, True], f"{given}"
    front = [values for _, values in search.front()]
    assert front == [(0.1, 0.0), (0.5, 9.0)], f"{front} has no values that are not finite"


def test_inputs_of_several_objectives_give_the_same_decisions_again() -> None:
    """The log of inputs is written as JSON and read again, NaN and infinities included."""
    config = section_of(METHODS[2], THREE).search_config()
    values = itertools.cycle([0.3, math.nan, 0.1, math.inf, 0.7, -math.inf, 0.2])
    result = simulate(
        config, SPACE, 5, lambda *_: tuple(next(values) for _ in THREE), report_every=2
    )
    stored = [input_from_json(message_to_json(one)) for one in result.inputs]
    again = replay(config, SPACE, 5, stored)
    assert tuple(map(tuple, again)) == result.operations


def test_a_report_without_all_objectives_is_refused() -> None:
    """A wrong number of values is no report."""
    search = Search(section_of(METHODS[2]).search_config(), SPACE, 0)
    create = search.apply(Started())[0]
    with pytest.raises(ValueError, match="a value for each of loss, score"):
        search.apply(Reported(request_id=create.request_id, time=1, metric=0.1))  # type: ignore[union-attr]


def test_one_objective_is_stored_as_before() -> None:
    """Logs and snapshots of a single objective have no more fields."""
    text = message_to_json(Reported(request_id="a", time=1, metric=0.5))
    assert json.loads(text) == {"type": "reported", "request_id": "a", "time": 1, "metric": 0.5}


# A GP thinks for seconds from its eleventh trial on.
@pytest.mark.long
@pytest.mark.parametrize(("of", "num_trials"), [("tpe", 60), ("nsgaii", 60), ("gp", 14)])
def test_samplers_of_optuna_learn_all_objectives(of: str, num_trials: int) -> None:
    """Failed, broken and invalid trials disturb none; those of TPE come near the front."""
    section = section_of(
        {"name": "random", "max_trials": num_trials, "sampler": {"name": "optuna", "of": of}}
    )
    options = section.sampler_spec().options
    search = Search(section.search_config(), SPACE, 0, is_asking=True)
    ask = asking(make_sampler("optuna", options, 0), search.space, 0)
    search.apply(Started())
    answered, number = [], 0
    while search.asks:
        [answer] = answers(search, ask, of)
        assert not answer.is_fallback, f"{answer.why}"
        [create, _] = search.apply(answer)
        assert isinstance(create, Create)
        answered.append(create.hparams)
        number += 1
        x, y = answered[-1]["x"], answered[-1]["y"]
        values = [x**2 + y, -((x - 1) ** 2) - y]
        if number % 9 == 4:
            values[number % 2] = math.nan
        request_id = create.request_id
        search.apply(Reported(request_id=request_id, time=1, metric=values[0], others=(values[1],)))
        reason = {5: ExitReason.ERROR, 6: ExitReason.INVALID_HP}.get(number % 11)
        search.apply(
            Exited(
                request_id=request_id, reason=reason or ExitReason.COMPLETED,
                is_out_of_memory=number % 22 == 5,
            )
        )  # fmt: skip
    known = [seen.losses for seen in search.observations() if seen.losses]
    assert all(len(losses) == 2 and losses[1] >= 0 for losses in known), f"{known} are losses"
    if of == "tpe":
        late = sum(hparams["y"] for hparams in answered[-20:]) / 20
        assert late < 0.3, f"{late}: trials come near the front, where y is 0"


@pytest.mark.parametrize(
    ("searcher", "objectives", "problem"),
    [
        ({"name": "single"}, TWO, "one metric alone"),
        (METHODS[2], [{"metric": "loss"}], "two or more different metrics"),
        (METHODS[2], [*TWO, {"metric": "loss"}], "two or more different metrics"),
        (METHODS[2] | {"metric": "other"}, TWO, "must begin with `searcher.metric`"),
        (METHODS[2] | {"smaller_is_better": False}, TWO, "must begin with `searcher.metric`"),
        (METHODS[2] | {"limits": {"target": 1.0}}, TWO, "must not have a `target` with several"),
        (METHODS[2] | {"sampler": {"name": "optuna", "of": "cmaes"}}, TWO, "must not be CMA-ES"),
        (
            METHODS[2] | {"sampler": {"name": "optuna"}, "warm_start_from": [3]},
            TWO,
            "must not be given with several objectives",
        ),
    ],
)
def test_what_several_objectives_cannot_have_is_refused(
    searcher: Any, objectives: Any, problem: str
) -> None:
    """Each refusal names what must hold."""
    with pytest.raises(ConfigError, match=problem):
        section_of(searcher, objectives)


def test_the_first_objective_is_the_metric() -> None:
    """A config that names no metric has that of the first objective, also when read again."""
    section = section_of(METHODS[2], [TWO[1], TWO[0]])
    assert (section.metric, section.smaller_is_better) == ("score", False)
    assert section.judged_metrics == ["score", "loss", "epochs"]
    again = section_of(
        {**section.model_dump(), "max_length": None}, section.model_dump()["objectives"]
    )
    assert again == section


def test_curves_of_one_metric_simulate_no_several_objectives(
    halving: Callable[..., AsyncHalvingConfig],
) -> None:
    """A simulation that would say nothing true is refused."""
    from paceline.search._preview_and_simulation import imaginary_curves, simulate_slots

    config = halving(objectives=(Objective("loss"), Objective("score")))
    with pytest.raises(ValueError, match="must have one objective, but got loss, score"):
        simulate_slots(config, SPACE, 0, imaginary_curves(9, smaller_is_better=True), slots=2)


class LossyConfig(AsyncHalvingConfig):
    """Configuration of a method of somebody else."""


def test_a_section_of_somebody_else_passes_its_objectives_on() -> None:
    """The objectives of a section serve as those of a configuration, as the guide says."""
    section = section_of(METHODS[1])
    config = LossyConfig(
        metric=section.metric, smaller_is_better=section.smaller_is_better,
        objectives=tuple(section.objectives), num_rungs=2, max_trials=6, max_time=4,
        time_metric="epochs", divisor=2,
    )  # fmt: skip
    assert (config.metrics, config.signed([1.0, 2.0])) == (("loss", "score"), (1.0, -2.0))
    simulate(config, SPACE, 1, lambda create, _: (create.hparams["x"], create.hparams["y"]))
