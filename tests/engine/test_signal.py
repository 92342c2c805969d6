"""The travelling signal: what is told is heard after the same step everywhere."""

from pathlib import Path

import torch
import torch.distributed as dist

from paceline.engine.gradients._signal_with_gradients import TravellingSignal

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


def test_a_sum_that_travels_alone_is_heard_a_step_later(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0,
                            world_size=1)  # fmt: skip
    try:
        signal, heard = TravellingSignal(CPU), []
        for told in (1.0, 0.0, 2.0, 0.0, 0.0):
            signal.tell(told)
            signal.travel_alone(CPU)
            heard.append(signal.hear())
    finally:
        dist.destroy_process_group()
    assert heard == [0.0, 1.0, 0.0, 2.0, 0.0]
