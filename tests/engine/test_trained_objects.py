"""What is trained, captured and put back without a training."""

from typing import Any

import torch
from torch import nn

from paceline.engine import SettingChanges, TrainedObjects, built_settings


class Remembering(torch.optim.SGD):
    """An optimizer that keeps something under a name of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.state["seen"] = {"sums": torch.zeros(3), "names": ["first"]}


def made() -> TrainedObjects:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return TrainedObjects(rank=0, models=[model], optimizers=[Remembering(model.parameters())])


def test_what_an_optimizer_keeps_under_its_own_names_is_put_back() -> None:
    first, second = made(), made()
    first.models[0](torch.ones(1, 3)).sum().backward()
    first.optimizers[0].step()
    first.optimizers[0].state["seen"]["sums"] += 5
    state, settings = first.shared_state(), built_settings([], second.optimizers, [])
    second.load_shared_state({**state, "frozen": []}, SettingChanges(None, settings))
    kept = second.optimizers[0].state
    assert kept["seen"]["names"] == ["first"]
    assert kept["seen"]["sums"].tolist() == [5.0, 5.0, 5.0]
    for one, other in zip(first.models[0].parameters(), second.models[0].parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(
            first.optimizers[0].state[one]["momentum_buffer"], kept[other]["momentum_buffer"]
        )
