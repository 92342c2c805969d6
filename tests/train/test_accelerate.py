"""Measures that speed training up, in one process: what they change and what they must not."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

from paceline import core, train

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
X = torch.arange(22, dtype=torch.float32).view(11, 2) / 10
Y = X.sum(1, keepdim=True)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loop(model: Any, optimizer: Any, loader: Any, zero_first: bool = True) -> None:
    for x, y in loader:
        if zero_first:
            optimizer.zero_grad()
        train.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("is_prepared", [True, False])
def test_accumulation_equals_the_large_batch(zero_first: bool, is_prepared: bool) -> None:
    # Batches of 2 in windows of 3, where the last ones have fewer: 6 samples, then 5 (2, 2, 1).
    bare, bare_optimizer = make()
    ends = [6, 11] if is_prepared else [6]
    for start, end in zip([0, *ends], ends, strict=False):
        bare_optimizer.zero_grad()
        nn.functional.mse_loss(bare(X[start:end]), Y[start:end]).backward()
        bare_optimizer.step()
    model, optimizer = train.accelerate(*make(), gradient_accumulation=3)
    data = TensorDataset(X[: ends[-1]], Y[: ends[-1]])
    loader: Any = DataLoader(data, batch_size=2)
    loop(model, optimizer, train.prepare_data_loader(loader) if is_prepared else loader, zero_first)
    for found, expected in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["hook", "by hand"])
def test_only_whole_gradients_of_an_accumulated_step_are_clipped(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    bare, bare_optimizer = make()
    for start in (0, 4):
        bare_optimizer.zero_grad()
        for first in (start, start + 2):
            batch = slice(first, first + 2)
            (nn.functional.mse_loss(bare(X[batch]), Y[batch]) / 2).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.01)
        bare_optimizer.step()
    model, optimizer = train.accelerate(*make(), gradient_accumulation=2)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    if way == "hook":
        optimizer.register_step_pre_hook(clip)
    loader = train.prepare_data_loader(DataLoader(TensorDataset(X[:8], Y[:8]), batch_size=2))
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        if way == "by hand":
            clip()
        optimizer.step()
        optimizer.zero_grad()
    is_equal = [
        torch.equal(a, b) for a, b in zip(model.parameters(), bare.parameters(), strict=True)
    ]
    warnings = [record.getMessage() for record in caplog.records]
    assert all(is_equal) == (way == "hook")
    assert len(warnings) == (way == "by hand")
    assert all("must not change gradients before they are complete" in text for text in warnings)


def test_next_training_in_the_process_forgets_what_was_accumulated() -> None:
    model, optimizer = train.accelerate(*make(), gradient_accumulation=3)
    loop(model, optimizer, [(X, Y)])
    bare, bare_optimizer = make()
    bare = train.prepare_model(bare)
    bare_optimizer = train.prepare_optimizer(bare_optimizer)
    before = copy.deepcopy(bare.state_dict())
    loop(bare, bare_optimizer, [(X, Y)])
    assert not torch.equal(bare.state_dict()["0.weight"], before["0.weight"])


def test_accumulation_needs_a_prepared_optimizer_and_one_backward_pass() -> None:
    model = train.accelerate(make()[0], gradient_accumulation=2)
    with pytest.raises(RuntimeError, match="above 1 the optimizer must be prepared"):
        model(X).mean().backward()
    model, optimizer = train.accelerate(*make(), gradient_accumulation=2)
    loader = train.prepare_data_loader(DataLoader(TensorDataset(X, Y), batch_size=6))

    def two_passes() -> None:
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(x), y).backward()

    with pytest.raises(RuntimeError, match="each batch must have one backward pass"):
        two_passes()


def test_schedulers_step_with_a_prepared_optimizer() -> None:
    model, optimizer = train.accelerate(*make())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = copy.deepcopy(model.state_dict())
    loop(model, optimizer, [(X, Y)])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_mixed_precision_computes_in_16_bits_and_returns_32() -> None:
    seen: list[torch.dtype] = []
    model: Any = make()[0]
    model[1].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    model = train.accelerate(model, nn.MSELoss(), mixed_precision=True)
    output = model(X)
    assert (seen, output.dtype) == ([torch.bfloat16], torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model[1]._forward_hooks.clear()
    seen.clear()
    # What is returned from a worker is the user's own again.
    again = pickle.loads(pickle.dumps(model))
    again[1].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    again(X)
    assert seen == [torch.float32]


def test_losses_are_scaled_in_fp16() -> None:
    model, optimizer = train.accelerate(*make(), precision="fp16")
    bare, bare_optimizer = make()
    for _ in range(3):
        # Small enough for the first scale, so that no step is left out.
        train.backward(nn.functional.mse_loss(model(X), Y) / 100)
        assert model[0].weight.grad.abs().max() > 1
        optimizer.step()
        optimizer.zero_grad()
        (nn.functional.mse_loss(bare(X), Y) / 100).backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight, bare[0].weight, atol=1e-4, rtol=1e-3)  # type: ignore[index]
    nn.functional.mse_loss(model(X), Y).backward()
    model, optimizer = train.accelerate(*make(), precision="fp16")
    nn.functional.mse_loss(model(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"call train\.backward\(loss\) in place of"):
        optimizer.step()


def test_fp16_needs_a_prepared_optimizer() -> None:
    model = train.accelerate(make()[0], precision="fp16")
    with pytest.raises(RuntimeError, match="fp16 the optimizer must be prepared"):
        train.backward(model(X).mean())


def test_blocks_are_computed_again_with_gradient_checkpointing() -> None:
    calls: list[int] = []
    model, _ = make()
    expected = nn.functional.mse_loss(model(X), Y)
    expected.backward()
    gradient = model[0].weight.grad
    model.zero_grad()
    model[2].register_forward_hook(lambda *_: calls.append(1))
    model = train.accelerate(model, gradient_checkpointing=True)
    nn.functional.mse_loss(model(X), Y).backward()
    assert torch.equal(model[0].weight.grad, gradient)
    assert len(calls) == 1
    own: Any = make()[0]
    own.gradient_checkpointing_enable = lambda: calls.append(2)
    train.accelerate(own, gradient_checkpointing=True)
    assert calls[-1] == 2
    with pytest.raises(ValueError, match="needs blocks to compute again"):
        train.accelerate(nn.Linear(1, 1), gradient_checkpointing=True)


def test_model_is_compiled_in_place() -> None:
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return graph.forward

    model, optimizer = train.accelerate(
        *make(), compile={"backend": backend}, mixed_precision="bf16"
    )
    loop(model, optimizer, [(X, Y)])
    assert seen
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_arguments_are_told_apart_by_type() -> None:
    model, optimizer = make()
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    assert train.accelerate(loss, optimizer, model) == (model, optimizer)
    assert train.accelerate(model, loss) is model
    assert train.accelerate(model, nn.functional.mse_loss) is model
    with pytest.raises(TypeError, match="one model, .* but got SGD"):
        train.accelerate(optimizer)
    with pytest.raises(TypeError, match="one model, .* but got Sequential, int"):
        train.accelerate(model, 3)
    with pytest.raises(TypeError, match="one model, .* but got Sequential, MSELoss, CrossEntropy"):
        train.accelerate(model, nn.MSELoss(), loss)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"strategy": "fsdp", "precision": "fp16"}, ValueError, '"fp32" or "bf16" with .* "fp16"'),
        ({"strategy": "fsdp", "data_parallel": "flat"}, ValueError, "must agree, but got 'flat'"),
        ({"shard_units": nn.Linear}, ValueError, '`shard_units` must be None without .*"fsdp"'),
        ({"shard_precision": BF16}, ValueError, "`shard_precision` must be None without"),
        (
            {"strategy": "fsdp", "shard_precision": 16},
            TypeError,
            "MixedPrecisionPolicy, but got 16",
        ),
        (
            {"strategy": "fsdp", "shard_precision": BF16, "precision": "bf16"},
            ValueError,
            '`precision` must be "fp32" with `shard_precision`',
        ),
        ({"shard_size": 2}, ValueError, '`shard_size` must be used with `data_parallel="fsdp"`'),
        ({"strategy": "zero"}, ValueError, "`strategy` must be one of 'auto', 'ddp', 'flat'"),
        ({"data_parallel": "zero"}, ValueError, "`data_parallel` must be 'flat', 'overlapped', "),
        ({"data_parallel": "horovod"}, core.NotOfferedError, "not offered for train functions"),
        ({"precision": "fp8"}, ValueError, "`precision` must be one of .* but got 'fp8'"),
        ({"mixed_precision": "fp8"}, ValueError, "`precision` must be one of .* but got 'fp8'"),
        ({"precision": "fp32", "mixed_precision": True}, ValueError, "must agree"),
        ({"gradient_accumulation": 0}, ValueError, "`gradient_accumulation` must be an integer"),
        (
            {"strategy": "ddp", "gradient_accumulation": 2},
            ValueError,
            "`gradient_accumulation` must be 1 with",
        ),
    ],
)
def test_values_that_are_wrong_or_come_later_are_named(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        train.accelerate(make()[0], **options)


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, but got int"):
        train.prepare_model(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, but got int"):
        train.prepare_optimizer(3)
    with pytest.raises(TypeError, match=r"must be given a torch\.utils\.data\.DataLoader, but got"):
        train.prepare_data_loader([1, 2])
    with pytest.raises(core.NotOfferedError, match="the meta device are not .* 'weight' is there"):
        train.prepare_model(nn.Linear(1, 1, device="meta"))
