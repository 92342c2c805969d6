"""`PyTorchTrial`, the base class of users' trials."""

from abc import ABC, abstractmethod
from typing import Any

from paceline.engine import Reducer
from paceline.pytorch._batches_and_loaders import DataLoader, TorchData, data_length
from paceline.pytorch._pytorch_callback import PyTorchCallback


class PyTorchTrial(ABC):
    """A model, its data, and what happens on a batch.

    Implement `__init__` (wrap models and optimizers by the context), `train_batch`, the two
    loaders, and one of `evaluate_batch` and `evaluate_full_dataset`.
    """

    @abstractmethod
    def __init__(self, context: Any) -> None:
        """Build and wrap models, optimizers and schedulers."""

    @abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Any:
        """Train on one shard: forward, `context.backward`, `context.step_optimizer`.

        Args:
            batch: What the training loader gave, on this rank's device.
            epoch_idx: The epoch, from 0.
            batch_idx: The global batch, counted from the start of training, from 0.

        Returns:
            A dictionary of metrics, or a tensor, which becomes {"loss": tensor}.
        """

    @abstractmethod
    def build_training_data_loader(self) -> "DataLoader[Any]":
        """Return the training data; the batch size is one shard's."""

    @abstractmethod
    def build_validation_data_loader(self) -> "DataLoader[Any]":
        """Return the validation data; the batch size is one shard's."""

    def evaluate_batch(self, batch: TorchData, batch_idx: int = 0) -> dict[str, Any]:
        """Return the metrics of one validation batch."""
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: "DataLoader[Any]") -> dict[str, Any]:
        """Return the metrics of the whole validation set; runs on the chief alone."""
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return how validation metrics are combined: one way, or one per metric."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return named callbacks."""
        return {}

    def get_batch_length(self, batch: TorchData) -> int:
        """Return the number of samples of a batch; override it for types of your own."""
        return data_length(batch)
