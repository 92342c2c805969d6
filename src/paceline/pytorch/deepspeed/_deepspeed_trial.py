"""`DeepSpeedTrial`, the base class of users' trials for DeepSpeed."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from paceline.pytorch._pytorch_trial import PyTorchTrial


class DeepSpeedTrial(PyTorchTrial):
    """A DeepSpeed engine, its data, and what happens on a micro-batch.

    Implement `__init__` (`deepspeed.initialize`, then `context.wrap_model_engine`), `train_batch`,
    the two loaders, and one of `evaluate_batch` and `evaluate_full_dataset`. The batch size of the
    loaders is `context.get_train_micro_batch_size_per_gpu()`.
    """

    @abstractmethod
    def train_batch(self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int) -> Any:
        """Train on one micro-batch: forward, `engine.backward`, `engine.step`.

        It is called `gradient_accumulation_steps` times for each batch.

        Args:
            dataloader_iter: Gives one micro-batch, on this rank's device.
            epoch_idx: The epoch, from 0.
            batch_idx: The batch, which is one optimizer step, counted from the start of training,
                from 0.

        Returns:
            A dictionary of metrics, or a tensor, which becomes {"loss": tensor}.
        """

    def evaluate_batch(self, dataloader_iter: Iterator[Any], batch_idx: int = 0) -> dict[str, Any]:
        """Return the metrics of one validation batch, which the iterator gives."""
        raise NotImplementedError
