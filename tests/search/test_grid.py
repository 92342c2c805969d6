from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Shutdown,
    SimulationResult,
    SpaceError,
    Started,
    Train,
    simulate,
)
from paceline.search._grid_random_single import GridConfig
from paceline.search._search import Search

SPACE = {"a": {"type": "int", "minval": 0, "maxval": 3, "count": 4}}


def _created(operations: Any) -> list[int]:
    return [op.hparams["a"] for op in operations if isinstance(op, Create)]


def test_grid_begins_with_the_last_point(trace: Callable[[SimulationResult], list[str]]) -> None:
    # S-22, S-23.
    config = GridConfig(metric="loss", max_concurrent_trials=2)
    result = simulate(config, SPACE, 0, lambda create, time: 1.0)
    order = [value for operations in result.operations for value in _created(operations)]
    assert order == [3, 2, 1, 0]
    assert trace(result) == [
        "init C1 C2",
        "t1@1",
        "x1 C3",
        "t2@1",
        "x2 C4",
        "t3@1",
        "t4@1",
        "x4 SHUTDOWN",
    ]


@pytest.mark.parametrize(("max_concurrent", "expected"), [(0, 4), (3, 3), (16, 4)])
def test_grid_starts_as_many_as_may_run(max_concurrent: int, expected: int) -> None:
    config = GridConfig(metric="loss", max_concurrent_trials=max_concurrent)
    assert len(_created(Search(config, SPACE, 0).apply(Started()))) == expected


@pytest.mark.parametrize("reason", list(ExitReason))
def test_grid_goes_on_whatever_a_trial_ends_with(reason: ExitReason) -> None:
    search = Search(GridConfig(metric="loss", max_concurrent_trials=1), SPACE, 0)
    operations = search.apply(Started())
    points = []
    while isinstance(create := operations[0], Create):
        points += _created(operations)
        operations = search.apply(Exited(request_id=create.request_id, reason=reason))
    assert points == [3, 2, 1, 0]
    is_error = reason in (ExitReason.ERROR, ExitReason.INVALID_HP)
    is_cancel = reason is ExitReason.CANCELED
    assert operations == [Shutdown(failure=is_error, cancel=is_cancel)]


def test_grid_trains_to_the_configured_length() -> None:
    operations = Search(GridConfig(metric="loss", max_length=5), SPACE, 0).apply(Started())
    assert {op.length for op in operations if isinstance(op, Train)} == {5}


def test_grid_without_counts_is_refused_before_it_starts() -> None:
    space = {"lr": {"type": "double", "minval": 0, "maxval": 1}}
    with pytest.raises(SpaceError, match="`lr.count` must be given for a grid search"):
        Search(GridConfig(metric="loss"), space, 0)
