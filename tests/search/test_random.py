from __future__ import annotations

import math

import pytest

from paceline.search import (
    Create,
    Exited,
    ExitReason,
    Progressed,
    Reported,
    Shutdown,
    Started,
    Stop,
    Train,
    simulate,
)
from paceline.search._grid_random_single import RandomConfig, SingleConfig
from paceline.search._search import Search

SPACE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


def _ids(operations: list[object]) -> list[str]:
    return [op.request_id for op in operations if isinstance(op, Create)]


def test_random_trains_its_trials_and_stops_none() -> None:
    # S-24.
    config = RandomConfig(metric="loss", max_trials=4, max_concurrent_trials=2)
    result = simulate(config, SPACE, 0, lambda create, time: 1.0)
    assert result.counts() == {1: 4}
    assert not any(isinstance(op, Stop) for ops in result.operations for op in ops)
    assert len(_ids(list(result.operations[0]))) == 2


def test_single_trains_one_trial() -> None:
    # S-25. Ranges are sampled.
    result = simulate(SingleConfig(metric="loss", max_length=7), SPACE, 0, lambda *_: 1.0)
    assert result.counts() == {7: 1}
    create = result.operations[0][0]
    assert isinstance(create, Create)
    assert 0 < create.hparams["lr"] < 1


@pytest.mark.parametrize(("max_concurrent", "expected"), [(0, 5), (2, 2), (5, 5), (16, 5)], ids=str)
def test_random_starts_as_many_as_may_run(max_concurrent: int, expected: int) -> None:
    config = RandomConfig(metric="loss", max_trials=5, max_concurrent_trials=max_concurrent)
    assert len(_ids(list(Search(config, SPACE, 0).apply(Started())))) == expected


@pytest.mark.parametrize(("max_length", "length"), [(None, 1), (64, 64)])
def test_random_trains_to_the_configured_length(max_length: int | None, length: int) -> None:
    config = RandomConfig(metric="loss", max_trials=1, max_length=max_length)
    operations = Search(config, SPACE, 0).apply(Started())
    assert operations[1:] == [Train(request_id=_ids(list(operations))[0], length=length)]


def test_random_replaces_only_invalid_trials_beyond_its_number() -> None:
    search = Search(RandomConfig(metric="loss", max_trials=2), SPACE, 0)
    first, second = _ids(list(search.apply(Started())))
    replaced = search.apply(Exited(request_id=first, reason=ExitReason.INVALID_HP))
    (third,) = _ids(list(replaced))
    assert search.apply(Exited(request_id=second, reason=ExitReason.ERROR)) == []
    ended = search.apply(Exited(request_id=third, reason=ExitReason.COMPLETED))
    assert ended == [Shutdown(failure=False, cancel=False)]


def test_single_is_never_replaced() -> None:
    search = Search(SingleConfig(metric="loss"), SPACE, 0)
    (only,) = _ids(list(search.apply(Started())))
    ended = search.apply(Exited(request_id=only, reason=ExitReason.INVALID_HP))
    assert ended == [Shutdown(failure=True, cancel=False)]


def test_an_early_exit_is_counted_once() -> None:
    # The original's pending counter goes down twice, so that one more trial than allowed runs.
    search = Search(RandomConfig(metric="loss", max_trials=9, max_concurrent_trials=2), SPACE, 0)
    running = _ids(list(search.apply(Started())))
    for _ in range(7):
        given = Exited(request_id=running.pop(0), reason=ExitReason.ERROR)
        running += _ids(list(search.apply(given)))
        assert len(running) == 2


@pytest.mark.parametrize(
    ("told", "expected"),
    [(math.nan, 0), (math.inf, 0), (-math.inf, 0), (-1, 0), (2, 1), (0.5, 0.5)],
)
def test_progress_is_never_out_of_range(told: float, expected: float) -> None:
    search = Search(SingleConfig(metric="loss"), SPACE, 0)
    (only,) = _ids(list(search.apply(Started())))
    assert search.apply(Progressed(request_id=only, progress=told)) == []
    assert search.progress() == expected


def test_reports_change_nothing() -> None:
    search = Search(SingleConfig(metric="loss"), SPACE, 0)
    (only,) = _ids(list(search.apply(Started())))
    before = search.snapshot()
    assert search.apply(Reported(request_id=only, time=1, metric=math.nan)) == []
    assert search.snapshot() == before
    assert search.rungs() == ()
