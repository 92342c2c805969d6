"""What is trained, captured and put back without a training."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from paceline._training.engine.checkpoints.capture_and_restore import (
    ModelsAndOptimizers,
    load_models,
)
from paceline._training.engine.checkpoints.resume_differences import SettingChanges, built_settings
from paceline._training.engine.tensor_copies_and_digests import named_parameters
from paceline.storage._checkpoint_errors import CheckpointMismatchError


class Remembering(torch.optim.SGD):
    """An optimizer that keeps something under a name of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.state["seen"] = {"sums": torch.zeros(3), "names": ["first"]}


def made() -> ModelsAndOptimizers:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return ModelsAndOptimizers(rank=0, models=[model], optimizers=[Remembering(model.parameters())])


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


def optimizing(order: str, *, wrapped: bool = False) -> ModelsAndOptimizers:
    """Return a model of three layers, and an optimizer of some of them in an order."""
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "uvw"})
    parameters = [model[name].weight for name in order]
    if wrapped:
        model = nn.ModuleDict({name: checkpoint_wrapper(layer) for name, layer in model.items()})
    optimizer = torch.optim.Adam(parameters)
    return ModelsAndOptimizers(
        rank=0, models=[model], optimizers=[optimizer], parameters=[*model.parameters()]
    )


def put_back(state: dict[str, Any], target: ModelsAndOptimizers) -> None:
    settings = built_settings([], target.optimizers, [])
    target.load_shared_state({**state, "frozen": []}, SettingChanges(None, settings))


def test_an_optimizer_with_its_parameters_in_another_order_is_refused() -> None:
    """Each got the moments of the other one."""
    state = optimizing("uv").shared_state()
    told = "'model_0.v.weight' is now where 'model_0.u.weight' was"
    with pytest.raises(CheckpointMismatchError, match=told):
        put_back(state, optimizing("vu"))
    put_back(state, optimizing("uv"))


def test_an_optimizer_with_another_parameter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    put_back(optimizing("uv").shared_state(), optimizing("uw"))
    assert "'model_0.w.weight' is now where 'model_0.v.weight' was" in caplog.text


@pytest.mark.parametrize("was_wrapped", [False, True])
def test_activation_checkpointing_may_be_changed(
    was_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives parameters other names, which are in no state."""
    state = optimizing("uv", wrapped=was_wrapped).shared_state()
    put_back(state, optimizing("uv", wrapped=not was_wrapped))
    assert "is now where" not in caplog.text
    with pytest.raises(CheckpointMismatchError, match="is now where"):
        put_back(state, optimizing("vu", wrapped=not was_wrapped))


def test_a_model_that_was_compiled_by_hand_is_told_as_such() -> None:
    model = nn.Linear(3, 3)
    compiled = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match="was compiled by `torch.compile` itself"):
        load_models([model], [compiled])


def with_loose(shape: tuple[int, ...] = (2,)) -> ModelsAndOptimizers:
    """Return a model and an optimizer that has a parameter besides, such as weights of losses."""
    model, loose = nn.Linear(3, 2), nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.SGD([{"params": [loose]}, {"params": model.parameters()}], lr=0.1)
    parameters = [*model.parameters(), loose]
    return ModelsAndOptimizers(
        rank=0, models=[model], optimizers=[optimizer], parameters=parameters
    )


def test_parameters_that_only_an_optimizer_has_are_put_back() -> None:
    first, second = with_loose(), with_loose()
    with torch.no_grad():
        first.parameters[-1].add_(torch.tensor([3.0, 4.0]))
    state = {**first.shared_state(), "frozen": []}
    assert state["optimizer_parameters"] == [[None, "model_0.weight", "model_0.bias"]]
    settings = SettingChanges(None, built_settings([], second.optimizers, []))
    second.load_shared_state(state, settings)
    assert second.parameters[-1].tolist() == [3, 4]
    with pytest.raises(CheckpointMismatchError, match=r"shapes are \[\[2\]\] there and \[\[3\]\]"):
        with_loose((3,)).load_shared_state(state, settings)


class Renaming(nn.Linear):
    """A model whose parameters have other names than torch gives them."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"own_{name}", each) for name, each in super().named_parameters(*args, **kwargs))


def tied_and_shared() -> nn.Module:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict(
        {
            "first": nn.Sequential(shared, nn.Linear(2, 2, bias=False), shared),
            "second": nn.Linear(2, 2),
            "list": nn.ParameterList([torch.ones(2), torch.zeros(3)]),
        }
    )
    model["second"].weight = shared.weight
    model.register_parameter("own", nn.Parameter(torch.ones(1)))
    model.register_parameter("missing", None)
    return model


@pytest.mark.parametrize(
    "model", [tied_and_shared(), nn.Linear(2, 2), Renaming(2, 2), nn.ReLU()], ids=type
)
def test_parameters_and_their_names_are_those_of_torch(model: nn.Module) -> None:
    found, expected = named_parameters(model), [*model.named_parameters()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))
