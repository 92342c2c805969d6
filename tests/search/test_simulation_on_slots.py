"""Simulations of searches on slots: closed forms, measured curves, and replays by the method."""

import itertools

import pytest

from paceline.config import validate_config
from paceline.search._hyperparameter_space import parse_space
from paceline.search._preview_and_simulation import (
    Curve,
    imaginary_curves,
    nearest_curves,
    preview,
    run_on_slots,
    simulate_slots,
)
from paceline.search._search import Search
from paceline.search._search_messages import Create, Started

SPACE = {"x": {"type": "double", "minval": 0.0, "maxval": 1.0}}


def config_of(**searcher: object) -> object:
    found = {"name": "random", "metric": "loss", "max_trials": 6, "max_length": 10} | searcher
    return validate_config({"entrypoint": "true", "searcher": found, "hyperparameters": SPACE})


def flat(create: Create) -> Curve:
    return Curve(hparams=create.hparams, points=[(10, create.hparams["x"])], seconds_per_unit=3.0)


@pytest.mark.parametrize(("slots", "wall_s"), [(1, 180.0), (2, 90.0), (4, 60.0), (9, 30.0)])
def test_equal_trials_take_as_many_rounds_as_slots_leave(slots: int, wall_s: float) -> None:
    """Six trials of ten units of three seconds."""
    config = config_of()
    found = simulate_slots(config.search_config(), SPACE, 1, flat, slots=slots)  # type: ignore[attr-defined]
    assert (found.wall_s, found.slot_s, found.trained) == (wall_s, 180.0, {10: 6})
    values = [value for _, value in found.best]
    assert values == sorted(values, reverse=True)
    assert found.best_at(29.0) is None
    assert found.best_at(wall_s) == values[-1]


def test_a_halving_search_trains_as_its_method_says() -> None:
    halving = {"name": "async_halving", "num_rungs": 3, "divisor": 2, "max_trials": 16}
    config = config_of(**halving, max_length={"epochs": 8})
    planned = preview(config.search_config(), SPACE)  # type: ignore[attr-defined]
    curves = imaginary_curves(8, smaller_is_better=True)
    found = simulate_slots(config.search_config(), SPACE, 3, curves, slots=4)  # type: ignore[attr-defined]
    assert found.trained.keys() <= {row.units for row in planned.rows}
    assert sum(found.trained.values()) == 16
    assert found.slot_s == sum(length * number for length, number in found.trained.items())
    assert found == simulate_slots(config.search_config(), SPACE, 3, curves, slots=4)  # type: ignore[attr-defined]


def test_the_curve_is_that_of_the_nearest_hyperparameters() -> None:
    curves = [Curve(hparams={"x": x}, points=[(1, x), (5, x / 2)]) for x in (0.1, 0.9)]
    of = nearest_curves(parse_space(SPACE), [*curves, Curve(hparams={"y": 1}, points=[(1, 0)])])
    create = Create(request_id="r", trial_seed=1, hparams={"x": 0.7})
    assert of(create) == curves[1]
    assert [of(create).at(time) for time in (0.5, 1, 4.9, 5, 9)] == [0.9, 0.9, 0.9, 0.45, 0.45]
    with pytest.raises(ValueError, match="must have a trial with hyperparameters of the config"):
        nearest_curves(parse_space(SPACE), [Curve(hparams={"y": 1}, points=[(1, 0)])])


@pytest.mark.parametrize("searcher", ["hyperband", "adaptive_asha"])
def test_paused_trials_leave_their_slots_and_are_promoted(searcher: str) -> None:
    """Rungs that wait for all their trials promote as many as the preview says."""
    promotion = {} if searcher == "hyperband" else {"promotion": True}
    method = {"name": searcher, "max_trials": 16, "max_concurrent_trials": 4, **promotion}
    config = config_of(**method, max_length={"epochs": 16}).search_config()  # type: ignore[attr-defined]
    found = simulate_slots(config, SPACE, 3, imaginary_curves(16, smaller_is_better=True), slots=2)
    planned = {row.units: row.trials for row in preview(config, SPACE).rows}
    assert found.trained.keys() == planned.keys()
    if searcher == "hyperband":
        assert found.trained == planned
    assert found.slot_s == sum(length * number for length, number in found.trained.items())


def test_a_method_without_rungs_stops_trials_between_the_points_of_their_curves() -> None:
    method = {"name": "median_stopping", "max_trials": 12, "min_others": 2}
    config = config_of(**method, max_length={"epochs": 10}).search_config()  # type: ignore[attr-defined]

    def level(create: Create) -> Curve:
        points = [(time, create.hparams["x"]) for time in (1.0, 4.5, 10.0)]
        return Curve(hparams=create.hparams, points=points)

    found = simulate_slots(config, SPACE, 1, level, slots=1)
    assert found.trained.keys() <= {1, 5, 10}
    assert found.trained[1] > 0
    assert found.wall_s == found.slot_s


def test_a_simulation_ends_at_its_time() -> None:
    config = config_of(max_trials=1000).search_config()  # type: ignore[attr-defined]
    search = Search(config, SPACE, 1)
    found = run_on_slots(config, search, Started, flat, slots=4, most_s=45.0)
    assert (found.wall_s, found.slot_s) == (45.0, 180.0)


@pytest.mark.parametrize(
    ("resume_units", "slot_s"), [(0.0, 16.0 + 8.0), (1.5, 16.0 + 8.0 + 2 * 1.5)]
)
def test_a_pause_costs_what_is_said_once_for_each_promotion(
    resume_units: float, slot_s: float
) -> None:
    """Four trials of four units; the first two are the best, and go on after their pauses."""
    order = itertools.count()
    halving = {"name": "async_halving", "num_rungs": 2, "divisor": 2, "max_trials": 4}
    config = config_of(**halving, max_length={"epochs": 8}, promotion=True).search_config()  # type: ignore[attr-defined]
    found = run_on_slots(
        config,
        Search(config, SPACE, 1),
        lambda: Started(),
        lambda create: Curve(hparams=create.hparams, points=[(8, float(next(order)))]),
        slots=1,
        resume_units=resume_units,
    )
    assert found.trained == {4: 2, 8: 2}, f"{found.trained}"
    assert (found.slot_s, found.wall_s) == (slot_s, slot_s), f"{found}"
