"""The sum of gradients over ranks, with both ranks in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline._training.engine.gradient_reduction import FlatReduction


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradient_that_one_rank_lacks_is_that_of_the_other(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    def all_reduce(flat: torch.Tensor) -> None:
        own = flat.clone()
        flat += sum(sent)
        sent.append(own)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ranks = [[nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(3)] for _ in range(2)]
    for parameter in (ranks[0][0], ranks[0][1], ranks[1][0]):
        parameter.grad = torch.full((2,), 2.0, dtype=dtype)
    totals = [
        FlatReduction(parameters, torch.device("cpu")).reduce(signal=1.0) for parameters in ranks
    ]
    both, other, none = (parameter.grad for parameter in ranks[1])
    assert both is not None
    assert other is not None
    assert both.tolist() == [4.0, 4.0]
    assert other.tolist() == [2.0, 2.0]
    assert none is None
    assert float(totals[1]) == 2.0
