"""Models of train functions that are divided among the ranks."""

import copy
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, IterableDataset

from paceline import train
from paceline._training.engine.checkpoints.weight_exports import export_weights

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_EPOCHS = 3


class Net(nn.Module):
    """Blocks in a list, with sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.last = nn.Linear(5, 1)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def loader_of(num_samples: int, *, shuffle: bool = True, is_stream: bool = False) -> Any:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    data: Any = [(row, number) for number, row in enumerate(x)]
    if is_stream:
        return train.prepare_data_loader(DataLoader(Stream(data), 2))
    return train.prepare_data_loader(DataLoader(data, 2, shuffle=shuffle))


def fit(config: dict[str, Any]) -> dict[str, Any]:
    """Train on 5 global batches of 4 on 2 workers, and a last one.

    That is of 2 and 1 samples, or with a window of 2 for the first worker alone.
    """
    train.enable_reproducibility(5)
    model: Any = Net().double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if config.get("is_made_after"):
        units = nn.Linear if config["mode"] == "fsdp" else None
        model = train.prepare_model(model, data_parallel=config["mode"], shard_units=units)
        optimizer = train.prepare_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    else:
        window, precision = config.get("window") or 1, config.get("precision")
        options = {"gradient_accumulation": window, "precision": precision}
        options |= config.get("options", {})
        model, optimizer = train.accelerate(
            model, optimizer=optimizer, data_parallel=config["mode"], **options
        )
    is_stream = config.get("is_stream", False)
    loader = loader_of(22 if config.get("window") else 23, is_stream=is_stream)
    stored = train.load_checkpoint() or {"epoch": 0, "step": 0}
    if stored["step"]:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        if config.get("is_lazy"):
            check_lazy(stored)
    step = stored["step"]
    for epoch in range(stored["epoch"], NUM_EPOCHS):
        for x, numbers in loader:
            train.backward(nn.functional.mse_loss(model(x).squeeze(1), x.sin().sum(1)))
            if not config.get("window"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            train.report(step=step, samples=numbers.tolist())
            strike(config, step)
            if step in config.get("saves", ()):
                train.save_checkpoint(model=model, optimizer=optimizer, epoch=epoch, step=step)
        losses = [validate(model, n, is_stream) for n in config.get("validations", ())]
        train.report(step=step, losses=losses)
    num_own = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return {
        "model": train.full_state_dict(model),
        "optimizer": train.full_state_dict(optimizer),
        "num_own": num_own,
        "size": train.world_size(),
    }


def check_lazy(stored: dict[str, Any]) -> None:
    """Check that a sharded model has read its pieces alone, and that the whole can be used."""
    weights = stored["model"]["first.weight"], stored["optimizer"]["state"][0]["exp_avg"]
    assert not any(isinstance(weight.source, torch.Tensor) for weight in weights)
    for weight in weights:
        copies = copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight + 0
        assert all(type(each) is torch.Tensor for each in copies)
        assert all(torch.equal(each, weight) for each in copies)
        assert (weight.numpy() == copies[0].numpy()).all()
        weight.mul_(2)
        assert torch.equal(weight, 2 * copies[0])


@torch.no_grad()
def validate(model: Any, num_samples: int, is_stream: bool) -> float:
    model.eval()
    loader = loader_of(num_samples, shuffle=False, is_stream=is_stream)
    losses = [model(x).square().sum().item() for x, _ in loader]
    model.train()
    return sum(losses)


def strike(config: dict[str, Any], step: int) -> None:
    marker = Path("struck")
    if config.get("strike") == (step, train.world_rank()) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def assert_close(found: Any, expected: Any) -> None:
    """Check that two nested states agree to 1e-9."""
    for part in ("model", "optimizer"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-9, atol=1e-12)


def assert_same(found: Any, expected: Any) -> None:
    """Check that two nested states have the same bits."""
    for part in ("model", "optimizer"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)


def samples_of(results: Any) -> dict[int, list[list[int]]]:
    """Return what each rank was given in each step."""
    by_step: dict[int, list[list[int]]] = {}
    for rank in range(len(results)):
        for metrics in results.metrics_of(rank):
            if "samples" in metrics:
                by_step.setdefault(metrics["step"], []).append(metrics["samples"])
    return by_step


def run_of(workers: Any, config: dict[str, Any], directory: Path) -> Any:
    os.chdir(directory)
    return workers.run(fit, config)


@pytest.fixture(scope="module", params=[None, 3])
def window(request: pytest.FixtureRequest) -> int | None:
    """Return the batches of an optimizer step; the checkpoint after step 8 is within one of 3."""
    number: int | None = request.param
    return number


@pytest.fixture(scope="module")
def sharded(two_workers: Any, window: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of a sharded training, saved in the middle of an epoch."""
    config = {"mode": "fsdp", "saves": (8,), "validations": (6, 8, 3), "window": window}
    return run_of(two_workers, config, tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def whole(two_workers: Any, window: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of the same training, with the whole model on each worker."""
    config = {"mode": "flat", "saves": (8,), "validations": (6, 8, 3), "window": window}
    return run_of(two_workers, config, tmp_path_factory.mktemp("whole"))


@pytest.mark.long
def test_sharded_model_learns_what_a_whole_one_does(sharded: Any, whole: Any) -> None:
    assert samples_of(sharded) == samples_of(whole)
    for found, expected in zip(sharded, whole, strict=True):
        assert_close(found, expected)
        assert found["num_own"] < expected["num_own"]
    assert sum(each["num_own"] for each in sharded) == whole[0]["num_own"]
    # Workers that have unequally many batches validate as well.
    for rank in range(2):
        losses = [
            [m["losses"] for m in each.metrics_of(rank) if "losses" in m]
            for each in (sharded, whole)
        ]
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)


def test_training_goes_on_in_the_same_bits(
    two_workers: Any, sharded: Any, window: int | None, tmp_path: Path
) -> None:
    (checkpoint,) = sharded.checkpoints
    config = {"mode": "fsdp", "window": window, "is_lazy": True}
    resumed = two_workers.run(fit, config, checkpoint=checkpoint)
    for found, expected in zip(resumed, sharded, strict=True):
        assert_same(found, expected)
    assert samples_of(resumed).keys() == set(range(9, 19))
    # Each rank has stored its pieces alone.
    sizes = [(checkpoint.path / f"shard_{rank}.safetensors").stat().st_size for rank in range(2)]
    assert max(sizes) < 2 * min(sizes)
    assert checkpoint.metadata["version"] == 4
    stored = checkpoint.load()["model"]
    assert stored.keys() == resumed[0]["model"].keys()
    assert all(type(each) is torch.Tensor for each in stored.values())
    export_weights(checkpoint.path, tmp_path / "weights")
    exported = load_file(tmp_path / "weights")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], value) for name, value in stored.items())


@pytest.mark.long
def test_training_goes_on_with_another_form_of_the_model(
    two_workers: Any,
    sharded: Any,
    whole: Any,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Set by `enable_reproducibility` in this process.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    alone = train.Trainer(num_workers=0)
    later: dict[str, Any] = {"window": window}
    checkpoint, whole_checkpoint = sharded.checkpoints[0], whole.checkpoints[0]
    others = [
        two_workers.run(fit, {"mode": "flat", **later}, checkpoint=checkpoint),
        two_workers.run(fit, {"mode": "fsdp", **later}, checkpoint=whole_checkpoint),
        alone.run(fit, {"mode": "fsdp", **later}, checkpoint=checkpoint),
    ]
    for results in others:
        for found in results:
            assert_close(found, sharded[0])
    one = alone.run(fit, {"mode": "flat", "saves": (8,), **later})
    resumed = two_workers.run(fit, {"mode": "fsdp", **later}, checkpoint=one.checkpoints[0])
    for found in resumed:
        assert_close(found, one[0])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("mode", ["fsdp", "flat"])
def test_a_killed_worker_changes_no_bit(rank: int, mode: str) -> None:
    config = {"mode": mode, "saves": (5, 8, 13), "window": 3, "precision": "bf16"}
    with train.Trainer(num_workers=3, max_retries=1) as trainer:
        straight = trainer.run(fit, config)
        disturbed = trainer.run(fit, {**config, "strike": (10, rank)})
    assert (straight.num_restarts, disturbed.num_restarts) == (0, 1)
    for found, expected in zip(disturbed, straight, strict=True):
        assert_same(found, expected)


def compile_nothing(graph: Any, inputs: Any) -> Any:
    return graph.forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"gradient_checkpointing": True}},
        {"options": {"compile": {"backend": compile_nothing}}},
        {"is_made_after": True},
        {"is_stream": True},
        {"is_stream": True, "window": 2},
    ],
)
def test_other_ways_to_train_work_with_a_sharded_model(
    two_workers: Any, changes: dict[str, Any]
) -> None:
    config = {**changes, "validations": (3, 8)}
    results = two_workers.run(fit, {**config, "mode": "fsdp", "saves": (8,)})
    expected = two_workers.run(fit, {**config, "mode": "flat"})
    for found, other in zip(results, expected, strict=True):
        assert_close(found, other)
    assert samples_of(results) == samples_of(expected)
    (checkpoint,) = results.checkpoints
    resumed = two_workers.run(fit, {**config, "mode": "fsdp"}, checkpoint=checkpoint)
    for found, other in zip(resumed, results, strict=True):
        assert_same(found, other)


class Capacity(train.TrainingCallback):
    """A scheduler that takes a worker away after a loss, and gives it back later."""

    def __init__(self) -> None:
        self.capacity = 3
        self.sizes: list[int] = []

    def __call__(self) -> int:
        return self.capacity

    def handle_restart(self, error: Exception, generation: int) -> None:
        self.capacity = 2

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.sizes.append(num_workers)
        self.capacity = 3


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
def test_a_group_of_another_size_goes_on(window: int | None) -> None:
    capacity = Capacity()
    elastic = train.ElasticConfig(capacity=capacity)
    config = {"mode": "fsdp", "saves": (5, 8, 13), "window": window}
    with train.Trainer(num_workers=(2, 3), max_retries=1, elastic=elastic) as trainer:
        straight = trainer.run(fit, config)
        disturbed = trainer.run(fit, {**config, "strike": (10, 2)}, callbacks=[capacity])
        checkpoint = straight.checkpoints[1]
        assert capacity.sizes[0] == 2
        for found in disturbed:
            assert_close(found, straight[0])
    with train.Trainer(num_workers=4) as trainer:
        for found in trainer.run(fit, {"mode": "fsdp", "window": window}, checkpoint=checkpoint):
            assert_close(found, straight[0])


@pytest.mark.long
def test_a_model_is_gathered_in_another_type(two_workers: Any, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    config = {"mode": "fsdp", "options": {"shard_precision": policy}}
    (found, _), (exact, _) = (two_workers.run(fit, each) for each in (config, {"mode": "fsdp"}))
    for name, weight in exact["model"].items():
        torch.testing.assert_close(found["model"][name], weight, rtol=1e-3, atol=1e-4)
    # Their own pieces keep their type, and the sums of gradients are rounded.
    assert not torch.equal(found["model"]["first.weight"], exact["model"]["first.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
def test_several_copies_are_trained_as_one(
    window: int | None, two_workers: Any, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    config = {"mode": "fsdp", "saves": (8,), "window": window, "options": {"shard_size": 2}}
    with train.Trainer(num_workers=4) as trainer:
        copies = trainer.run(fit, config)
        whole = trainer.run(fit, {"mode": "flat", "window": window})
    for found, expected in zip(copies, whole, strict=True):
        assert_close(found, expected)
    (checkpoint,) = copies.checkpoints
    # The first copy alone has stored its pieces.
    names = {path.stem for path in Path(checkpoint.path).glob("shard_*.json")}
    assert names == {"shard_0", "shard_1"}
    for found in two_workers.run(fit, {"mode": "fsdp", "window": window}, checkpoint=checkpoint):
        assert_close(found, whole[0])


def refuse(config: dict[str, Any]) -> list[str]:
    """Return the messages of what a sharded model cannot do."""
    messages = []
    for case in (too_late, with_state, lbfgs, units, copies, other_state):
        try:
            case()
        except (TypeError, ValueError) as error:
            messages.append(f"{case.__name__}: {error}")
    return messages


def too_late() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train.prepare_model(model, data_parallel="fsdp")
    train.prepare_optimizer(optimizer)


def with_state() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    train.accelerate(model, optimizer=optimizer, strategy="fsdp")


def lbfgs() -> None:
    model = train.prepare_model(Net(), data_parallel="fsdp")
    train.prepare_optimizer(torch.optim.LBFGS(model.parameters()))


def units() -> None:
    train.prepare_model(Net(), data_parallel="fsdp", shard_units="all")  # type: ignore[arg-type]


def copies() -> None:
    train.prepare_model(Net(), data_parallel="fsdp", shard_size=3)


def other_state() -> None:
    train.accelerate(Net(), strategy="fsdp")
    if train.world_rank() == 1:
        train.save_checkpoint(None)


def test_what_a_sharded_model_cannot_do_is_refused(two_workers: Any) -> None:
    found, on_chief = two_workers.run(refuse), two_workers.run(refuse)[0]
    assert [message.partition(":")[0] for message in on_chief] == [
        *("too_late", "with_state", "lbfgs", "units", "copies")
    ]
    for message, text in zip(
        found[1],
        [
            "an optimizer must be made of the parameters of a model that was prepared before",
            "an optimizer must have no state when its model is prepared, but Adam has stepped",
            "an optimizer must step each parameter by itself, but LBFGS joins all of them",
            "`shard_units` must be a module class, a tuple of classes, a number of parameters,",
            "All models must have the same `shard_size`, but one has None and another 3",
            "on every rank, as each stores its pieces of the model, but got nothing on rank 1",
        ],
        strict=True,
    ):
        assert text in message


def call_alone(config: dict[str, Any]) -> None:
    """Call the model on one rank more often, in a batch or after all of them."""
    model = train.prepare_model(Net().double(), data_parallel="fsdp")
    for x, _ in loader_of(22):
        model(x).sum().backward()
        if config["is_in_batch"] and train.world_rank() == config["rank"]:
            model(x)
    for _ in range(2):
        model(x)
    if train.world_rank() == config["rank"]:
        model(x)
    model(x)


@pytest.mark.slow
@pytest.mark.parametrize("is_in_batch", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_call_on_one_rank_alone_is_refused(rank: int, is_in_batch: bool) -> None:
    options: Any = {"backend_config": train.TorchConfig(timeout_s=5)}
    told = (
        rf"[Rr]ank {rank} waits in `all_gather_single` \(test_sharding.py:\d+ in call_alone\)"
        r".* all ranks must make the same calls in the same order"
    )
    refusal = pytest.raises(RuntimeError, match=told)
    with train.Trainer(num_workers=3, max_retries=0, **options) as trainer, refusal:
        trainer.run(call_alone, {"rank": rank, "is_in_batch": is_in_batch})


def accumulate(config: dict[str, Any]) -> Any:
    """Train with two batches a step that come from no prepared loader."""
    torch.manual_seed(0)
    model: Any = Net().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = train.accelerate(
        model, optimizer=optimizer, data_parallel=config["mode"], gradient_accumulation=2
    )
    for number in range(4):
        x = torch.arange(6.0).double().view(2, 3) + number + train.world_rank()
        nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return train.full_state_dict(model)


def test_batches_of_no_prepared_loader_accumulate_too(two_workers: Any) -> None:
    whole, sharded = (two_workers.run(accumulate, {"mode": mode})[0] for mode in ("flat", "fsdp"))
    torch.testing.assert_close(sharded, whole, rtol=1e-9, atol=1e-12)


def validate_on_one_rank(config: dict[str, Any]) -> Any:
    """Validate with a batch for one worker alone, before the training and within it."""
    torch.manual_seed(0)
    # Each parameter is in a unit within the model.
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).double()
    model = train.prepare_model(model, data_parallel=config["mode"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with torch.no_grad():
            for x, _ in loader_of(2, shuffle=False):
                model(x)
        for x, _ in loader_of(8, shuffle=False):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return train.full_state_dict(model)


def test_training_goes_on_after_a_validation_on_one_rank(two_workers: Any) -> None:
    modes = ("flat", "fsdp")
    whole, sharded = (two_workers.run(validate_on_one_rank, {"mode": mode})[0] for mode in modes)
    torch.testing.assert_close(sharded, whole, rtol=1e-9, atol=1e-12)
