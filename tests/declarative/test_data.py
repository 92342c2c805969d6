"""Samples, labels and losses: which forms work, and what is refused with both shapes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline.declarative import (
    InferenceConfig,
    LossTracker,
    MarginLoss,
    NegativeCosineSimilarity,
    PretrainingConfig,
    SymmetricNegativeCosineSimilarity,
    TotalVariationLoss,
    Trainer,
    TrainingConfig,
)
from paceline.declarative import Tester as ModelTester

MakeConfig = Callable[..., TrainingConfig]
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
CLASSES = X[:, :3].argmax(1)
ONE_HOT = nn.functional.one_hot(CLASSES, 3)
NUMBERS = X[:, 2:].clone()


class Samples(Dataset[Any]):
    """A data set of any items."""

    def __init__(self, *columns: torch.Tensor, axis: bool = False) -> None:
        self.columns = columns
        self.axis = axis

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        rows = slice(index, index + 1) if self.axis else index
        return tuple(column[rows] for column in self.columns)


class Batches(Samples):
    """The same, in whole batches, item by item."""

    def __getitems__(self, indices: list[int]) -> Any:
        return tuple(column[indices] for column in self.columns)


def trained(config: TrainingConfig) -> Trainer:
    trainer = Trainer(config)
    trainer.build()
    trainer.run_training()
    return trainer


FORMS: list[tuple[str, Any]] = [
    ("ordinary ones", Samples(X, CLASSES, NUMBERS)),
    ("tensors with a first", Samples(X, CLASSES, NUMBERS, axis=True)),
    ("", Batches(X, CLASSES, NUMBERS)),
    ("ordinary ones", Samples(X, ONE_HOT, NUMBERS)),
    ("tensors with a first", Samples(X, ONE_HOT.double(), NUMBERS.double(), axis=True)),
]


@pytest.mark.parametrize(("told", "dataset"), FORMS)
def test_samples_of_each_form_train_alike(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, told: str, dataset: Any
) -> None:
    """Indices, one-hot labels and an axis for the sample are the same numbers to the losses."""
    with caplog.at_level(logging.INFO):
        trainer = trained(make_config(dataset=dataset, random_seed=1, num_epochs=1))
    reference = trained(
        make_config(dataset=TensorDataset(X, CLASSES, NUMBERS), random_seed=1, num_epochs=1)
    )
    assert trainer.loss_tracker["val_loss"] == pytest.approx(reference.loss_tracker["val_loss"])
    assert ("are taken as" in caplog.text) == bool(told)
    assert told in caplog.text


def test_the_axis_of_the_sample_can_be_said() -> None:
    images = torch.rand(12, 1, 4)
    config = TrainingConfig(
        model_class=nn.Linear,
        dataset=Samples(images, images),
        pred_names=["image"],
        loss_function=nn.MSELoss(),
        leading_sample_axis=False,
        num_epochs=1,
    )
    config.model_params = config.model_params.of({"in_features": 4, "out_features": 4})
    trainer = Trainer(config)
    trainer.build()
    assert next(iter(trainer.validation_dataloader))[0].shape == (2, 1, 4)
    trainer.cleanup()
    config.leading_sample_axis = True
    trainer.build()
    assert next(iter(trainer.validation_dataloader))[0].shape == (2, 4)
    trainer.cleanup()


WRONG_DATA: list[tuple[dict[str, Any], str]] = [
    (
        {"dataset": TensorDataset(X, CLASSES.unsqueeze(1), NUMBERS)},
        r"`phase` must have the shape \[8, 3\] as one-hot or \[8\] as indices.* got \[8, 1\]",
    ),
    (
        {"dataset": TensorDataset(X, CLASSES, NUMBERS[:, :1])},
        r"`energy` must have the shape \[8, 2\], as the prediction is \[8, 2\], but got \[8, 1\]",
    ),
    ({"dataset": TensorDataset(X, CLASSES)}, r"a label for each of the 2 predictions, but has 1"),
    ({"dataset": TensorDataset(X)}, r"labels from item 1 on.* but has 1 item"),
    ({"dataset": TensorDataset(X[:1], CLASSES[:1])}, r"0.2 of 1 are 1. Hint: give `training_data"),
    ({"validation_ratio": 0.99}, r"`validation_ratio` must leave samples for training and"),
    (
        {
            "training_dataset": TensorDataset(X, CLASSES, NUMBERS),
            "validation_dataset": TensorDataset(X[:0], CLASSES[:0], NUMBERS[:0]),
        },
        r"`validation_dataset` must have samples, but is empty",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_DATA)
def test_data_that_do_not_fit_are_refused(
    make_config: MakeConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trained(make_config(**changes))


def test_a_first_sample_that_cannot_be_read_is_named(make_config: MakeConfig) -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index // index)

    data = Broken(X, CLASSES, NUMBERS)
    with pytest.raises(ZeroDivisionError) as caught:
        trained(make_config(training_dataset=data, validation_dataset=data))
    assert caught.value.__notes__ == ["While reading sample 0 of Broken."]


def test_a_stream_is_no_data_set(make_config: MakeConfig) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(TypeError, match=r"`dataset` must be a data set with .*lacks __len__"):
        make_config(dataset=Stream())


def test_a_single_score_is_no_class(make_config: MakeConfig) -> None:
    config = make_config(
        model_class=nn.Linear,
        dataset=TensorDataset(X, CLASSES.unsqueeze(1).float()),
        pred_names_and_types=[("phase", "cls")],
        loss_function=nn.BCEWithLogitsLoss(),
        task_type="classification",
    )
    config.model_params = config.model_params.of({"in_features": 4, "out_features": 1})
    with pytest.raises(ValueError, match=r"must be \[batch, classes\].* but is \[8, 1\].*'regr'"):
        trained(config)


# ---- without labels --------------------------------------------------------------------------


class Views(nn.Module):
    """Predictions and projections of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.predictor = nn.Linear(3, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        za, zb = self.encoder(a), self.encoder(b)
        return self.predictor(za), self.predictor(zb), za, zb


def test_a_model_is_trained_without_labels() -> None:
    config = PretrainingConfig(
        model_class=Views,
        dataset=TensorDataset(X, X + 0.1),
        pred_names=["p1", "p2", "z1", "z2"],
        learning_rate_per_process=0.05,
        batch_size_per_process=8,
        num_epochs=4,
    )
    trainer = trained(config)
    losses = trainer.loss_tracker["loss"]
    assert losses[-1] < losses[0]
    config.loss_function = [SymmetricNegativeCosineSimilarity(), lambda *all: all[2].mean() * 0]
    tracker = trained(config).loss_tracker
    assert tracker["loss"] == pytest.approx(tracker["loss_regularizer_1"])


# ---- losses ----------------------------------------------------------------------------------


def test_losses_that_torch_lacks_follow_their_formulas() -> None:
    a, b = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([[4.0, 3.0]])
    assert NegativeCosineSimilarity()(b, a).item() == pytest.approx(-24 / 25)
    assert not NegativeCosineSimilarity()(b, a).requires_grad
    assert NegativeCosineSimilarity(stop_gradient=False)(b, a).requires_grad
    assert SymmetricNegativeCosineSimilarity()(a, b, b, a).item() == pytest.approx(-1)
    x, labels = torch.tensor([[0.5, 0.3]]), torch.tensor([[1.0, 0.0]])
    assert MarginLoss()(x, labels).item() == pytest.approx(0.4**2 + 0.5 * 0.2**2)
    image = torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    assert TotalVariationLoss(weight=10)(image, more=image).item() == pytest.approx(
        2 * 10 * (2 + 1)
    )


# ---- the history -----------------------------------------------------------------------------


def test_the_history_keeps_the_best_and_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = LossTracker(["a"])
    assert not tracker.update_losses([2.0, 2.0], lr=0.5)
    assert tracker.update_losses([3.0, 3.0], "val_loss", 0)
    tracker.update_losses([1.0, 1.0])
    assert not tracker.update_losses([3.0, 1.0], "val_loss", 1)
    assert not tracker.update_losses([float("nan"), 1.0], "val_loss", 1)
    assert (tracker["best_val_loss"], tracker["epoch_best_val_loss"]) == (3.0, 0)
    assert tracker["epochs"] == [0, 1]
    assert tracker.get_all_losses() == [[2.0, 1.0], [2.0, 1.0]]
    names = ["best_val_loss", "best_val_loss_a", "epoch_best_val_loss"]
    assert tracker.get_metric_names_for_hyperparam_tuning() == names
    with caplog.at_level(logging.INFO):
        tracker.print_losses()
    assert "Epoch 2: loss of a: training 1, validation 1" in caplog.text
    tracker["val_loss"].pop()
    tracker["val_loss_a"].pop()
    tracker.dump(tmp_path / "info.txt")
    again = LossTracker(["a"])
    again.load(tmp_path / "info.txt")
    assert again == tracker
    (tmp_path / "info.txt").write_text("loss = [1.0]\nnonsense\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is 'nonsense'"):
        again.load(tmp_path / "info.txt")
    with pytest.raises(ValueError, match=r"one of loss, val_loss, test_loss, but got 'x'"):
        tracker.update_losses([1.0, 1.0], "x")
    with pytest.raises(ValueError, match=r"the total and 1 terms, but got \[1.0\]"):
        tracker.update_losses([1.0])


# ---- predictions of a trained model ----------------------------------------------------------


def test_a_tester_hands_out_predictions_in_order(make_config: MakeConfig) -> None:
    trainer = trained(make_config(num_epochs=1))

    class Kept(ModelTester):
        def update_result_holders(self, preds: Any, labels: Any) -> None:
            kept.append((preds[0], labels[0]))

    kept: list[Any] = []
    config = InferenceConfig(
        model_class=trainer.configs.model_class,
        model_params=trainer.configs.model_params,
        dataset=TensorDataset(X, CLASSES, NUMBERS),
        pretrained_model_path="out/final_model.pth",
        prediction_output_path="predictions",
        batch_size_per_process=8,
        prediction_postprocessor=lambda preds: [preds[0].softmax(1)],
    )
    tester = Kept(config)
    with pytest.raises(RuntimeError, match=r"`run` must follow `build`"):
        tester.run()
    tester.build()
    tester.run()
    trainer.model.eval()
    expected = trainer.model(X)[0].softmax(1)
    assert torch.allclose(torch.cat([preds for preds, _ in kept]), expected)
    assert torch.equal(torch.cat([labels for _, labels in kept]), CLASSES)
    assert Path("predictions").is_dir()
    with pytest.raises(
        ValueError, match=r"lacks `model_class`, `dataset`, `pretrained_model_path`"
    ):
        ModelTester(InferenceConfig())
