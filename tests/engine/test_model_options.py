"""What is done to a model before it is trained, on one rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from paceline._training.engine.gradient_reduction import DataParallel
from paceline._training.engine.model_preparation import ModelOptions, compile_counts
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.precision import Precision
from paceline.core import DistributedContext

CPU = torch.device("cpu")


def stepper(**options: Any) -> Stepper:
    return Stepper(DistributedContext.single(), CPU, **options)


class Scaled(nn.Module):
    """A module whose parameter and buffer nothing initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("counts", torch.ones(2, dtype=torch.int64))


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 2)))


def test_a_model_on_the_meta_device_gets_the_weights_of_one_that_was_built() -> None:
    torch.manual_seed(3)
    built = made().state_dict()
    with torch.device("meta"):
        model = made()
    torch.manual_seed(3)
    stepper().add_model(model)
    found = model.state_dict()
    assert built.keys() == found.keys()
    assert all(torch.equal(built[name], found[name]) for name in built)


def test_modules_without_weights_on_the_meta_device_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Scaled())
    with pytest.raises(
        ValueError, match=r"`init_weights` must set them, but '1\.scale' and 1 more"
    ):
        stepper().add_model(model)

    def init_weights(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            nn.init.constant_(module.scale, 5)
            module.counts.zero_()

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Scaled())
    stepper().add_model(model, ModelOptions(init_weights=init_weights))
    assert model[1].scale.tolist() == [5.0] * 3
    assert model[1].counts.tolist() == [0, 0]


def test_a_model_is_on_the_meta_device_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"but '1\.weight' is there and '0\.weight' is not"):
        stepper().add_model(model)


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        (torch.bfloat16, TypeError, "a torch.distributed.fsdp.MixedPrecisionPolicy, but got torch"),
        (MixedPrecisionPolicy(param_dtype=torch.float16), ValueError, "without torch.float16"),
        (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            ValueError,
            '`precision` must be "fp32"',
        ),
    ],
)
def test_a_wrong_policy_is_refused(policy: Any, error: type[Exception], text: str) -> None:
    options = ModelOptions(shard_precision=policy)
    with pytest.raises(error, match=text):
        stepper(precision=Precision.BF16).add_model(nn.Linear(1, 1), options)


def test_a_policy_without_effect_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    stepper().add_model(nn.Linear(1, 1), ModelOptions())
    assert caplog.text == ""
    options = ModelOptions(shard_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    stepper().add_model(nn.Linear(1, 1), options)
    assert "`shard_precision` has no effect" in caplog.text


@pytest.mark.parametrize("shard_size", [0, 1, True, 2.0])
def test_a_wrong_number_of_ranks_for_a_copy_is_refused(shard_size: Any) -> None:
    with pytest.raises(ValueError, match=f"integer of at least 2, but got {shard_size!r}"):
        stepper(data_parallel=DataParallel.FSDP, shard_size=shard_size)
    with pytest.raises(ValueError, match="but that is 'flat'"):
        stepper(shard_size=2)
    # One rank is no copy of several, and the script stays the same.
    assert not stepper(data_parallel=DataParallel.FSDP, shard_size=2).is_sharded


@pytest.mark.long
def test_blocks_are_computed_again_and_compiled() -> None:
    calls: list[int] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        calls.append(len(example_inputs))
        return graph.forward

    def trained(options: ModelOptions) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = stepper().add_model(
            nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)), options
        )
        for size in (3, 5):
            model(torch.ones(size, 4)).sum().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    plain = trained(ModelOptions())
    compile_options = {"backend": backend, "dynamic": False}
    both = trained(ModelOptions(gradient_checkpointing=True, compile=compile_options))
    assert all(torch.equal(one, other) for one, other in zip(plain, both, strict=True))
    assert calls
    # For the second size.
    assert compile_counts()["num_recompiles"] > 0
