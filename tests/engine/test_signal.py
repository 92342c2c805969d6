"""The travelling signal: what is told is heard after the same step everywhere."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline._training.engine import gradient_reduction
from paceline._training.engine.gradient_reduction import TravellingSignal

CPU = torch.device("cpu")


def heard_after(signal: TravellingSignal, totals: list[float]) -> list[float]:
    heard = []
    for total in totals:
        signal.receive(torch.tensor(total))
        heard.append(signal.hear())
    return heard


def test_sum_is_heard_at_once_on_a_cpu() -> None:
    assert heard_after(TravellingSignal(CPU), [0.0, 0.5, 0.0]) == [0.0, 0.5, 0.0]


def test_sum_is_heard_so_many_steps_later_with_a_lag() -> None:
    signal = TravellingSignal(CPU, lag=3)
    assert heard_after(signal, [1.0, 0.0, 2.0, 0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0, 1.0, 0.0, 2.0]


def test_a_late_change_of_the_sum_is_not_heard() -> None:
    """The buffer of the reduction is used again by the next step."""
    signal, total = TravellingSignal(CPU, lag=1), torch.tensor(1.0)
    signal.receive(total)
    total.zero_()
    signal.receive(total)
    assert signal.hear() == 1.0


def test_what_is_told_travels_once() -> None:
    signal = TravellingSignal(CPU)
    signal.tell(0.5)
    assert (signal.take(), signal.take()) == (0.5, 0.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def heard_alone(
    signal: TravellingSignal, told: list[float], *, is_awaited: bool = False
) -> list[float]:
    """Return what is heard at each step if so much is told before it."""
    heard = []
    for value in told:
        if value:
            signal.tell(value)
        signal.travel_alone(CPU, is_awaited=is_awaited)
        heard.append(signal.hear())
    return heard


def test_a_sum_that_travels_alone_is_heard_a_step_later(group: None) -> None:
    heard = heard_alone(TravellingSignal(CPU), [1.0, 0.0, 2.0, 0.0, 0.0])
    assert heard == [0.0, 1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("lag", [0, 3])
def test_a_sum_that_is_awaited_is_heard_at_the_same_step(group: None, lag: int) -> None:
    heard = heard_alone(TravellingSignal(CPU, lag), [1.0, 0.0, 2.0, 0.0], is_awaited=True)
    assert heard == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("lag", [0, 3])
def test_a_sum_of_its_own_is_made_after_half_a_second_or_50_steps(
    group: None, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    begun: list[int] = []
    now, num_steps = 0.0, 0
    sum_up = dist.all_reduce

    def note(words: torch.Tensor, **options: Any) -> Any:
        begun.append(num_steps)
        return sum_up(words, **options)

    monkeypatch.setattr(dist, "all_reduce", note)
    monkeypatch.setattr(gradient_reduction, "time", SimpleNamespace(monotonic=lambda: now))
    signal = TravellingSignal(CPU, lag)

    def periods_of(num: int, step_s: float) -> list[int]:
        nonlocal now, num_steps
        begun.clear()
        for _ in range(num):
            now += step_s
            num_steps += 1
            signal.travel_alone(CPU)
        return [end - begin for begin, end in pairwise(begun)]

    periods = periods_of(800, 0.001)
    # The next one begins when the last one was read, at the earliest.
    assert periods[0] == 1 + lag
    steps = zip(periods, begun[:-1], strict=True)
    assert all(period <= max(1 + lag, step // 8) for period, step in steps)
    assert periods[-1] == 50
    # The first period of slow steps was found from fast ones.
    assert set(periods_of(200, 0.1)[1:]) <= {4, 5}


@pytest.mark.parametrize("at", [0, 100, 450, 777])
def test_what_is_told_between_two_sums_is_heard_after_the_next(group: None, at: int) -> None:
    told = [0.0] * at + [1.0] + [0.0] * 60
    heard = heard_alone(TravellingSignal(CPU), told)
    assert sum(heard) == 1.0
    assert at < heard.index(1.0) <= at + 51
