"""How the statistics of all workers are put together."""

import math
from typing import Any

import pytest

from paceline.creators._pass_reports import PassResult
from paceline.creators._pass_reports import reduced_statistics as reduced


def result(num_samples: int, **statistics: Any) -> PassResult:
    counts = {"epoch": 2, "batch_count": 3, "num_samples": num_samples}
    return PassResult({**counts, **statistics}, num_samples, 3)


def test_statistics_are_weighted_by_samples() -> None:
    """A plain mean would give 3 in place of (6 * 1 + 2 * 5) / 8 = 2."""
    told = reduced(
        [
            result(6, loss=1.0, name="a", nested={"x": 0.0}, flag=True),
            result(2, loss=5.0, name="b", nested={"x": 4.0}, flag=False),
        ]
    )
    counts = {"epoch": 2, "batch_count": 3, "num_samples": 8}
    assert told == {**counts, "loss": 2.0, "name": "a", "nested": {"x": 1.0}, "flag": True}
    assert list(told)[0] == "epoch"


def test_statistics_of_a_worker_without_samples_count_for_nothing() -> None:
    told = reduced([result(4, loss=1.0), result(0)])
    assert (told["loss"], told["num_samples"]) == (1.0, 4)


def test_not_a_number_is_not_hidden() -> None:
    told = reduced([result(1, loss=math.nan, last_loss=0.0), result(1, loss=1.0, last_loss=0.0)])
    assert math.isnan(told["loss"])
    assert told["last_loss"] == 0.0


def test_functions_that_count_no_samples_weigh_alike() -> None:
    assert reduced([result(0, loss=1.0), result(0, loss=2.0)])["loss"] == 1.5


def test_the_last_batch_is_that_of_all_workers() -> None:
    """Of its two samples the first worker has one, and the third worker has none."""
    lasts = [(4, 1), (4, 1), (3, 2)]
    results = [
        result(5, loss=1.0, last_loss=value)._replace(last_own=last)
        for last, value in zip(lasts, [2.0, 6.0, 100.0], strict=True)
    ]
    assert reduced(results)["last_loss"] == 4.0
    # What a function of the user's calls so is a value like others.
    assert reduced([one._replace(last_own=None) for one in results])["last_loss"] == pytest.approx(
        36
    )
