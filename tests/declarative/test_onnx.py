"""Models written as ONNX, and read by another implementation."""

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.utils.data import TensorDataset

from paceline._training.engine.checkpoints.weight_exports import export_onnx
from paceline.declarative import Trainer, TrainingConfig

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A model whose training draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, 3] of samples [batch, 4]."""
        scores: torch.Tensor = self.layers(x)
        return scores


def trained(**changes: Any) -> Trainer:
    config = TrainingConfig(
        model_class=Net,
        dataset=TensorDataset(X, X[:, :3].argmax(1)),
        validation_ratio=0.2,
        pred_names=["kind"],
        loss_function=nn.CrossEntropyLoss(),
        batch_size_per_process=8,
        num_epochs=2,
        random_seed=1,
        **changes,
    )
    trainer = Trainer(config)
    trainer.build()
    trainer.run_training()
    return trainer


@pytest.mark.long
def test_models_are_written_as_onnx_and_training_is_the_same_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = trained(save_onnx=True, model_save_dir="with")
    models = [onnx.load(f"with/{name}_model.onnx") for name in ("best", "final")]
    for model in models:
        onnx.checker.check_model(model, full_check=True)
    final = ReferenceEvaluator(models[1])
    assert [each.name for each in models[1].graph.output] == ["kind"]
    net = trainer.get_model_object().eval()
    # The number of samples is open.
    for samples in (X[:8], X[:3]):
        (scores,) = final.run(None, {models[1].graph.input[0].name: samples.numpy()})
        torch.testing.assert_close(torch.from_numpy(scores), net(samples).detach())
    other = trained(model_save_dir="without").get_model_object()
    for name, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


class Named(Net):
    """Two predictions by name, in another order than that of the config."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"size": x.sum(1, keepdim=True), "kind": self.layers(x)}


class Pair(Net):
    """Two predictions in the order of the config, one with the name of the input."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x), 2 * x


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "names", "outputs"),
    [(Named, ["kind", "size"], ["size", "kind"]), (Pair, ["kind", "x"], ["kind", "x"])],
)
def test_outputs_are_named_as_the_predictions_are(
    tmp_path: Path, model: type[nn.Module], names: list[str], outputs: list[str]
) -> None:
    net = model().eval()
    export_onnx(net, [X[:4]], tmp_path / "model.onnx", names)
    written = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert [each.name for each in written.graph.output] == outputs
    found = ReferenceEvaluator(written).run(None, {written.graph.input[0].name: X[:4].numpy()})
    returned = net(X[:4])
    expected = returned.values() if isinstance(returned, dict) else returned
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), other.detach())


def test_without_onnx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    match = r"`save_onnx` needs onnx.*pip install 'paceline\[onnx\]'"
    with pytest.raises(ModuleNotFoundError, match=match):
        trained(save_onnx=True)
