"""What a loop of a subclass's own goes over in place of the loader of the training data."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.core import NonFiniteError


def check_finite_weights(model: torch.nn.Module, num_batches: int) -> None:
    """Refuse weights that a loss which is not finite has left; losses of an own loop are not known.

    Raises:
        NonFiniteError: Some parameter has such values.
    """
    for name, parameter in model.named_parameters():
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not torch.isfinite(values).all():
            raise NonFiniteError(
                f"The training loss must be finite, but `run_training_epoch` left `{name}` NaN or"
                f" infinite after {num_batches} batches. Hint: go on from the last checkpoint with"
                " a smaller learning rate or gradient clipping; stop_on_nan=False trains on.",
                batch=num_batches,
            )


class TrainingBatches:
    """The rest of an epoch, for a loop in `run_training_epoch`; else the same as the loader.

    Args:
        loader: The loader.
        batches: This process's batches of the epoch.
        count: Returns how many there are.

    Attributes:
        is_begun: Whether the loop has begun.
    """

    def __init__(
        self, loader: "DataLoader[Any]", batches: Iterator[Any], count: Callable[[], int]
    ) -> None:
        self.is_begun = False
        self._loader = loader
        self._batches = batches
        self._count = count
        self._num_batches: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._num_batches is None:
            self._num_batches = self._count()
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        if self.is_begun:
            raise RuntimeError(
                "`run_training_epoch` must go through `training_dataloader` once, but does so"
                " again. Hint: a larger `num_epochs` trains for longer."
            )
        self.is_begun = True
        # A loop that has ended may ask how many there were; those of a stream have no number.
        with suppress(TypeError):
            len(self)
        return self._batches
