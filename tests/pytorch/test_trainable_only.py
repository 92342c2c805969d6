"""Checkpoints without the frozen base of a model, to which adapters were added."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline import pytorch
from paceline.storage._checkpoint_errors import CheckpointMismatchError

BASE_SEED = 7


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition that is trained, and a buffer."""

    def __init__(self, seed: int, rank: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.Linear(64, 64)
        self.base.requires_grad_(False)
        for parameter in self.base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.down = nn.Linear(64, rank, bias=False)
        self.up = nn.Linear(rank, 1, bias=False)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        return self.up(self.down(torch.tanh(self.base(x))))


class AdapterTrial(pytorch.PyTorchTrial):
    """Trains the addition; hyperparameters say on which base."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        get = context.get_hparams().get
        self.plain = Adapted(get("base", BASE_SEED), get("rank", 2))
        for name in get("thawed", ()):
            self.plain.get_parameter(name).requires_grad_(True)
        only = get("trainable_only", "the-base")
        self.model = context.wrap_model(self.plain, trainable_only=only)
        trained = [each for each in self.plain.parameters() if each.requires_grad]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(trained, lr=0.05))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        touched = self.context.get_hparams().get("touched")
        if touched is not None and batch_idx == 1:
            self.plain.get_parameter(touched).data.add_(1)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"loss": self.model(batch).square().mean()}

    def build_training_data_loader(self) -> Any:
        data = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
        return pytorch.DataLoader(data, batch_size=2, shuffle=True)

    build_validation_data_loader = build_training_data_loader


Fit = Callable[..., tuple[AdapterTrial, pytorch.Result, Path]]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Return a function that trains, and returns the trial, its result and its checkpoint."""
    monkeypatch.chdir(tmp_path)

    def fit(num_batches: int, resume: Any = None, **hparams: Any) -> Any:
        with pytorch.init({"global_batch_size": 2, **hparams}, seed=1, resume=resume) as context:
            trial = AdapterTrial(context)
            result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(num_batches))
            target = tmp_path / f"checkpoint-{num_batches}-{len(list(tmp_path.iterdir()))}"
            context.core.checkpoint.download(result.checkpoints[-1], target)
        return trial, result, target

    return fit


def stored_names(checkpoint: Path) -> set[str]:
    return set(pytorch.load_weights_from_checkpoint_path(checkpoint))


@pytest.mark.long
def test_the_base_is_left_out_and_training_goes_on_in_the_same_bits(fit: Fit) -> None:
    whole, _, everything = fit(9, trainable_only=False)
    _, first, small = fit(4)
    resumed, _, _ = fit(9, resume=first.run_dir)
    assert stored_names(small) == {"down.weight", "up.weight", "num_calls"}
    assert stored_names(everything) == {*whole.plain.state_dict()}
    state, expected = resumed.plain.state_dict(), whole.plain.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    sizes = [sum(f.stat().st_size for f in path.glob("model_0.*")) for path in (small, everything)]
    assert sizes[0] * 5 < sizes[1]


def test_a_trial_is_built_and_completed_by_its_base(fit: Fit) -> None:
    trained, _, checkpoint = fit(4)
    trial = pytorch.load_trial_from_checkpoint_path(checkpoint, AdapterTrial)
    assert isinstance(trial, AdapterTrial)
    for name, value in trained.plain.state_dict().items():
        assert torch.equal(trial.plain.state_dict()[name], value)
    # Without Paceline, the weights are added to the base.
    plain = Adapted(BASE_SEED)
    weights = pytorch.load_weights_from_checkpoint_path(checkpoint)
    assert plain.load_state_dict(weights, strict=False).unexpected_keys == []
    assert torch.equal(plain.up.weight, trained.plain.up.weight)


@pytest.mark.parametrize("trainable_only", [False, True, "another name"])
def test_another_base_is_refused_by_name(fit: Fit, trainable_only: Any) -> None:
    _, first, checkpoint = fit(4)
    expected = (
        r"must be built on the same base \(the-base\), but 2 of 2 parameters of the base have other"
        r" values here, the first is 'base\.weight'"
    )
    with pytest.raises(CheckpointMismatchError, match=expected):
        fit(9, resume=first.run_dir, base=8, trainable_only=trainable_only)


def test_adapters_that_would_be_dropped_or_are_missing_are_errors(fit: Fit) -> None:
    _, first, _ = fit(4)
    with pytest.raises(CheckpointMismatchError, match=r"'down\.weight' is \[2, 64\] there"):
        fit(9, resume=first.run_dir, rank=3)

    class WithoutAdapter(AdapterTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            del self.plain.down

    with pytorch.init({"global_batch_size": 2}, seed=1, resume=first.run_dir) as context:
        trainer = pytorch.Trainer(WithoutAdapter(context), context)
        with pytest.raises(CheckpointMismatchError, match=r"it has \['down\.weight'\] besides"):
            trainer.fit(max_length=pytorch.Batch(9))


def test_a_frozen_parameter_that_has_changed_is_stored(fit: Fit) -> None:
    straight, _, checkpoint = fit(9, touched="base.bias")
    assert stored_names(checkpoint) == {"base.bias", "down.weight", "up.weight", "num_calls"}
    _, first, _ = fit(4, touched="base.bias")
    resumed, _, again = fit(9, resume=first.run_dir, touched="base.bias")
    assert stored_names(again) == stored_names(checkpoint)
    assert torch.equal(resumed.plain.base.bias, straight.plain.base.bias)
    assert torch.equal(resumed.plain.up.weight, straight.plain.up.weight)


def test_a_parameter_that_is_thawed_later_is_stored(fit: Fit) -> None:
    _, first, _ = fit(4)
    with pytorch.init({"global_batch_size": 2}, seed=1, resume=first.run_dir) as context:
        trial = AdapterTrial(context)
        trial.plain.base.bias.requires_grad_(True)
        trainer = pytorch.Trainer(trial, context)
        trainer.train_for(pytorch.Batch(1))
        trial.plain.base.bias.requires_grad_(True)
        uuid = trainer.save_checkpoint()
        with context.core.checkpoint.restore_path(uuid) as path:
            assert "base.bias" in stored_names(path)


@pytest.mark.parametrize(
    ("hparams", "error", "text"),
    [
        ({"trainable_only": 3}, TypeError, "True, False or the name of the base, but got 3"),
        ({"thawed": ("base.weight", "base.bias")}, ValueError, "but the model has none"),
    ],
)
def test_wrong_arguments_are_refused(
    fit: Fit, hparams: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fit(2, **hparams)


@pytest.mark.long
def test_an_export_says_that_it_belongs_to_a_base(fit: Fit) -> None:
    _, _, checkpoint = fit(4)
    output = checkpoint.with_suffix(".safetensors")
    command = [sys.executable, "-m", "paceline.cli", "checkpoint", "export"]
    done = subprocess.run(
        [*command, str(checkpoint), str(output)], capture_output=True, text=True, check=True
    )
    assert set(load_file(output)) == stored_names(checkpoint)
    assert "It must be added to the base the-base" in done.stderr
