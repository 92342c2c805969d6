"""Simulations of searches on slots: closed forms, measured curves, and replays by the method."""

import pytest

from paceline.config import validate_config
from paceline.search._hyperparameter_space import parse_space
from paceline.search._preview_and_simulation import (
    Curve,
    imaginary_curves,
    nearest_curves,
    preview,
    simulate_slots,
)
from paceline.search._search_method import Create

SPACE = {"x": {"type": "double", "minval": 0.0, "maxval": 1.0}}


def config_of(**searcher: object) -> object:
    found = {"name": "random", "metric": "loss", "max_trials": 6, "max_length": 10} | searcher
    return validate_config({"entrypoint": "true", "searcher": found, "hyperparameters": SPACE})


def flat(create: Create) -> Curve:
    return Curve(hparams=create.hparams, points=[(1, create.hparams["x"])], seconds_per_unit=3.0)


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
