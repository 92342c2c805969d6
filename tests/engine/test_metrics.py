"""Weighted means: of numbers and tensors, in pieces, and over a restart."""

import math
from typing import Any

import pytest
import torch

from paceline._training.engine.weighted_means import KeySetError, WeightedMeans
from paceline.core import DistributedContext, NonFiniteError

CPU = torch.device("cpu")


def make(**options: Any) -> WeightedMeans:
    return WeightedMeans(DistributedContext.single(), "training", **options)


def test_means_are_weighted_whatever_kind_the_values_are() -> None:
    means = make()
    means.add({"number": 1.0, "tensor": torch.tensor(1.0), "vector": torch.tensor([0.0, 2.0])}, 3)
    means.add({"number": 5.0, "tensor": torch.tensor(5.0), "vector": torch.tensor([5.0, 5.0])}, 1)
    assert means.reduce() == {"number": 2.0, "tensor": 2.0, "vector": 2.0}
    assert means.reduce() is None


def test_batch_without_metrics_is_a_batch() -> None:
    means = make()
    means.add({}, 1)
    with pytest.raises(KeySetError, match=r"one returned \['a'\] and those before \[\]"):
        means.add({"a": 1.0}, 1)
    assert means.reduce() == {}


def test_parameter_returned_as_a_metric_counts_as_it_was() -> None:
    means, scale = make(), torch.nn.Parameter(torch.tensor(1.0))
    means.add({"scale": scale}, 1)
    with torch.no_grad():
        scale += 2.0
    means.add({"scale": scale}, 1)
    assert means.reduce() == {"scale": 2.0}


def test_part_of_a_parameter_returned_as_a_metric_counts_as_it_was() -> None:
    means, scales = make(), torch.nn.Parameter(torch.ones(2))
    for _ in range(2):
        means.add({"scale": scales[0]}, 1)
        with torch.no_grad():
            scales += 2.0
    assert means.reduce() == {"scale": 2.0}


def test_mean_of_many_values_is_exact_and_holds_few_of_them() -> None:
    means = make()
    for value in range(1000):
        means.add({"x": torch.tensor(float(value))}, 1)
    assert sum(len(held) for held in means.state()["held"].values()) < 200
    assert means.reduce() == {"x": 499.5}


def test_value_that_is_changed_in_place_afterwards_counts_as_it_was() -> None:
    means, running = make(), torch.zeros(())
    for _ in range(3):
        running += 1
        means.add({"running": running}, 1)
    assert means.reduce() == {"running": 2.0}


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100])
def test_state_goes_on_in_the_same_bits(cut: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(150, generator=generator)
    straight, first, second = make(), make(), make()
    for index, value in enumerate(values):
        for means in (straight, first if index < cut else second):
            means.add({"x": value, "n": float(value)}, 3 + index % 2)
        if index + 1 == cut:
            second.load_state(first.state(), CPU)
    assert second.reduce() == straight.reduce()


def test_looking_at_the_means_so_far_changes_no_bit_of_them() -> None:
    values = torch.randn(150, generator=torch.Generator().manual_seed(1))
    straight, watched = make(), make()
    assert watched.peek() == {}
    for index, value in enumerate(values):
        for means in (straight, watched):
            means.add({"x": value, "n": float(value)}, 3 + index % 2)
        shown = watched.peek()
    means_of_all = watched.reduce()
    assert means_of_all == straight.reduce()
    assert shown == pytest.approx(means_of_all)
    assert watched.peek() == {}


def test_a_check_in_between_changes_no_bit_of_the_means() -> None:
    """States in memory are checked and stored at times that no two runs share."""
    values = torch.randn(150, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = set()
    for period in range(1, 11):
        means = make(stop_on_nan=True)
        for number, value in enumerate(values, 1):
            means.add({"loss": value}, 3 + number % 4)
            if number % period == 0:
                means.check_finite()
        results.add(repr(means.reduce()))
    assert len(results) == 1


def test_names_must_stay_the_same_between_reports() -> None:
    means = make()
    means.add({"a": 1.0}, 1)
    for other in ({"b": 1.0}, {"a": 1.0, "b": 1.0}, {}):
        with pytest.raises(KeySetError, match=r"those before \['a'\]"):
            means.add(other, 1)
    means.reduce()
    means.add({"b": 1.0}, 1)


@pytest.mark.parametrize(
    ("fine", "broken"),
    [(1.0, math.nan), (torch.ones(()), torch.tensor(math.nan)), (1.0, -math.inf)],
)
def test_first_value_that_is_not_finite_is_found(fine: Any, broken: Any) -> None:
    means = make(stop_on_nan=True)
    for batch in range(200):
        means.add({"x": broken if batch in (70, 90) else fine}, 1, batch)
    with pytest.raises(NonFiniteError, match="'x' must be finite.* rank 0 at batch 70"):
        means.check_finite()


def test_a_total_with_a_gradient_is_looked_at_beside_a_metric_named_loss() -> None:
    total = torch.ones((), requires_grad=True) * math.nan
    for metrics in ({"aux_loss": 1.0, "total": total}, {"total": total, "loss_ratio": 0.5}):
        means = make(stop_on_nan=True)
        means.add(metrics, 1, 7)
        with pytest.raises(NonFiniteError, match="'total' must be finite.* rank 0 at batch 7"):
            means.check_finite(means.reduce())
    means.add({"aux_loss": 1.0, "total": total.detach()}, 1, 8)
    means.check_finite(means.reduce())


def test_so_many_losses_in_a_row_must_be_wrong_also_over_reports() -> None:
    means = make(stop_on_nan=True)
    means.max_in_a_row = 10
    wrong = {*range(10, 19), *range(30, 39), *range(95, 105)}
    for batch in range(200):
        means.add({"loss": math.nan if batch in wrong else 1.0, "error": math.nan}, 1, batch)
        if batch % 20 == 19 and batch < 100:
            means.check_finite(means.reduce())
    with pytest.raises(NonFiniteError, match="'loss' must be finite.* rank 0 at batch 95") as found:
        means.check_finite(means.reduce())
    assert found.value.batch == 95
    means.add({"loss": 1.0, "error": math.nan}, 1, 200)
    means.check_finite(means.reduce())


def test_nothing_is_looked_for_unless_it_is_wanted() -> None:
    means = make()
    means.add({"x": math.nan}, 1)
    means.check_finite()
    assert math.isnan(means.reduce()["x"])
