"""The trial that a trainer of config objects hands to the engine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline import pytorch
from paceline.engine import ExplainedVariance, accuracy

if TYPE_CHECKING:
    from paceline.declarative._built_trainer import BuiltTrainer

# The entry of a history in a checkpoint that is none of its lists.
_DONE = "num_epochs_done"


class ConfiguredTrial(pytorch.PyTorchTrial):
    """Call the trainer's methods for each batch, and name what they return.

    Args:
        trainer: The trainer, with its data and loss built.

    Attributes:
        part: What metrics are of now: "train", "val" or "test".
    """

    def __init__(self, trainer: "BuiltTrainer") -> None:
        self.part = "train"
        self._trainer = trainer
        terms = ["", *(f"_{term}" for term in trainer.loss_tracker.terms)]
        self._names = {
            "train": [f"loss{term}" for term in terms],
            "val": [f"val_loss{term}" for term in terms],
            "test": [f"test_loss{term}" for term in terms],
        }
        # The loss of an only prediction is the total, and is reported once.
        reports_one = trainer.reports_one_loss()
        self._reported = {
            part: names[: 1 if reports_one else None] for part, names in self._names.items()
        }
        self._is_plain = trainer.is_plain()
        self._rates: list[float] = trainer.loss_tracker["lrs"]
        wanted = trainer.configs.task_type or ""
        has_labels = trainer.configs.data_label_separation_index is not None
        by_kind: dict[str, list[int]] = {"cls": [], "regr": []}
        for index, prediction in enumerate(trainer.predictions if has_labels else ()):
            by_kind[prediction.kind].append(index)
        self._classified = by_kind["cls"] if "classification" in wanted else []
        self._estimated = by_kind["regr"] if "regression" in wanted else []
        self._measures_accuracy = bool(self._classified or self._estimated)
        names = [trainer.predictions[index].name for index in self._estimated]
        self._variance = ExplainedVariance(names, lambda name: f"{self.part}_acc_{name}")
        if names:
            trainer.context.wrap_reducer(self._variance)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train on one shard."""
        trainer = self._trainer
        if len(self._rates) < batch_idx:
            # The rate after the batch before, as schedulers step between the two.
            self._rates.append(trainer.optimizer.param_groups[0]["lr"])
        if self._is_plain:
            loss, preds, labels = trainer.train_plainly(batch)
            metrics: dict[str, Any] = {"loss": loss}
            if self._measures_accuracy:
                self._add_accuracies(metrics, preds, labels)
            return metrics
        records, loss, preds, labels = trainer.load_data_and_get_loss(
            batch, trainer.get_epoch_loss_buffer()
        )
        trainer.run_model_update_step(loss)
        return self._metrics(records, preds, labels)

    @property
    def own_code(self) -> "BuiltTrainer":
        """What a user's own methods belong to."""
        return self._trainer

    def evaluate_batch(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Evaluate one batch."""
        trainer = self._trainer
        records, _, preds, labels = trainer.load_data_and_get_loss(
            batch, trainer.get_epoch_loss_buffer()
        )
        return self._metrics(records, preds, labels)

    def build_training_data_loader(self) -> Any:
        """Return the trainer's loader."""
        return self._trainer.training_dataloader

    def build_validation_data_loader(self) -> Any:
        """Return the trainer's loader."""
        return self._trainer.validation_dataloader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        """Return what keeps the history in checkpoints."""
        return {"history": _History(self, self._trainer)}

    def names_of(self, part: str) -> list[str]:
        """Return the names of the losses of "train", "val" or "test", the total first."""
        return self._names[part]

    def _metrics(
        self, records: Sequence[Any], preds: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> dict[str, Any]:
        metrics = dict(zip(self._reported[self.part], records, strict=False))
        if self._measures_accuracy:
            self._add_accuracies(metrics, preds, labels)
        return metrics

    def _add_accuracies(
        self, metrics: dict[str, Any], preds: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> None:
        for index in self._classified:
            name, pred = self._trainer.predictions[index].name, preds[index]
            if pred.dim() < 2 or pred.shape[1] < 2:
                raise ValueError(
                    f"The prediction `{name}` of kind 'cls' must be [batch, classes] with two"
                    f" classes or more, but is {list(pred.shape)}. Hint: say 'regr' for a single"
                    " score, or task_type=None for no accuracy."
                )
            metrics[f"{self.part}_acc_{name}"] = accuracy(pred, labels[index])
        for index in self._estimated:
            self._variance.add(self._trainer.predictions[index].name, preds[index], labels[index])


class _History(pytorch.PyTorchCallback):
    """Keep the trainer's losses in checkpoints, and tell it of each that was stored."""

    def __init__(self, trial: ConfiguredTrial, trainer: "BuiltTrainer") -> None:
        self._trial = trial
        self._trainer = trainer

    def on_validation_start(self) -> None:
        self._trial.part = "val"

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._trial.part = "train"

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self._trainer.note_checkpoint(uuid)

    def state_dict(self) -> dict[str, Any]:
        return {**self._trainer.loss_tracker.state_dict(), _DONE: self._trainer.num_epochs_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tracker = self._trainer.loss_tracker
        rates = tracker["lrs"]
        # Earlier versions counted by the history, of which a method of a subclass may add nothing.
        done = state_dict.pop(_DONE, None)
        tracker.load_state_dict(state_dict)
        self._trainer.num_epochs_done = tracker.current_epoch + 1 if done is None else done
        # The trial appends to the list that it knows.
        rates[:] = tracker["lrs"]
        tracker["lrs"] = rates
