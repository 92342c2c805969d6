"""Judging validations: what counts as a number, for the best checkpoint and for keeping it."""

import math
from typing import Any

import numpy
import pytest
import torch

from paceline._training.engine.checkpoints.checkpoint_saver import BestValidation


@pytest.mark.parametrize("kind", [int, float, numpy.float32, numpy.int64, torch.tensor])
def test_numbers_of_all_kinds_are_judged_alike(kind: Any) -> None:
    best_validation = BestValidation("best", "error")
    assert [best_validation.wants_checkpoint({"error": kind(value)}) for value in (5, 3, 4)] == [
        True, True, False,
    ]  # fmt: skip
    assert best_validation.best == 3.0
    assert best_validation.score({"error": kind(3)}) == -3.0


@pytest.mark.parametrize("value", [None, "3", [3], torch.ones(2), 1j])
def test_what_is_no_number_has_no_score_and_cannot_be_the_best(value: Any) -> None:
    best_validation = BestValidation("all", "error")
    assert best_validation.wants_checkpoint({"error": value})
    assert (best_validation.best, best_validation.score({"error": value})) == (None, None)
    with pytest.raises(ValueError, match=r"needs the metric 'error' to be a number, but"):
        BestValidation("best", "error").wants_checkpoint({"error": value})


@pytest.mark.parametrize("is_smaller_better", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_the_best(value: float, is_smaller_better: bool) -> None:
    best_validation = BestValidation("best", "error", is_smaller_better)
    assert not best_validation.wants_checkpoint({"error": value})
    assert best_validation.score({"error": value}) is None
    assert best_validation.wants_checkpoint({"error": 3.0})
    assert not best_validation.wants_checkpoint({"error": value})
    assert best_validation.best == 3.0
