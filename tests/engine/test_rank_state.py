"""What each rank alone knows comes back, for any number of ranks."""

from typing import Any

import torch
from torch import nn

from paceline._training.engine.checkpoints.capture_and_restore import (
    load_buffers,
    load_gradients,
    own_buffers,
    restore_generators,
    summed_gradients,
)
from paceline.data._order_and_random_generators import capture_random_state


class Counting(nn.Module):
    """A module with a buffer that is stored, and one that is not."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.register_buffer("stored", torch.arange(size).double())
        self.register_buffer("left_out", torch.arange(size).double(), persistent=False)


def test_buffers_are_those_that_the_chiefs_model_does_not_hold() -> None:
    model = nn.Sequential(Counting())
    assert own_buffers(model, is_chief=True).keys() == {"0.left_out"}
    assert own_buffers(model, is_chief=False).keys() == {"0.stored", "0.left_out"}


def test_buffers_come_back_also_with_another_shape_and_unknown_ones_are_left_out() -> None:
    model = nn.Sequential(Counting())
    kept = model[0].stored
    load_buffers(
        model,
        {"0.stored": torch.ones(2), "0.left_out": torch.ones(5), "0.unknown": torch.ones(1)},
    )
    assert kept.tolist() == [1, 1]
    assert dict(model.named_buffers())["0.left_out"].tolist() == [1] * 5
    assert model[0].left_out.dtype is torch.float64


def test_gradients_are_summed_over_the_ranks_that_have_some() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert summed_gradients([None, [one, None, None], [two, two, None]]) == [3 * one, two, None]
    assert one == 1
    assert summed_gradients([None, None]) is None


def test_gradients_that_are_none_take_the_present_ones_away() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    load_gradients(parameters, [torch.ones(1), None])
    assert [parameter.grad for parameter in parameters] == [torch.ones(1), None]
    load_gradients(parameters, None)
    assert [parameter.grad for parameter in parameters] == [None, None]


def test_generators_come_back_and_ranks_without_any_draw_other_numbers() -> None:
    def drawn(stored: Any, **changes: int) -> float:
        restore_generators(stored, **{"seed": 1, "num_steps": 5, "rank": 0, **changes})
        return torch.rand(()).item()

    state = capture_random_state()
    assert drawn(state) == drawn(state, rank=1, num_steps=6)
    others = [drawn(None), drawn(None, rank=1), drawn(None, num_steps=6), drawn(None, seed=2)]
    assert len(set(others)) == 4
    assert others[0] == drawn(None)
