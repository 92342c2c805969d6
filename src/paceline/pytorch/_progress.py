"""How far training is towards its length, on a terminal and as a fraction."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.display import TrainingProgress
from paceline.engine import Batch, Epoch, Position, Record, ShardedData, TrainUnit

_UNIT_NAMES: dict[type[TrainUnit], str] = {Batch: "batches", Epoch: "epochs", Record: "records"}


class LengthProgress:
    """Progress towards a length; outside `towards` there is none.

    Args:
        is_quiet: Whether nothing is shown, as on ranks other than the chief.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._length: TrainUnit | None = None
        self._data: ShardedData | None = None
        self._display: TrainingProgress | None = None

    @contextmanager
    def towards(
        self, length: TrainUnit | None, data: ShardedData, position: Position
    ) -> Iterator[None]:
        """Show progress towards a length; without one, show batches.

        Args:
            length: Where training ends.
            data: The training data.
            position: Where training begins.
        """
        self._length, self._data = length, data
        self._display = TrainingProgress(
            None if length is None else length.length,
            "batches" if length is None else _UNIT_NAMES[type(length)],
            is_quiet=self._is_quiet,
        )
        self._display.start(self._completed(position), position.records)
        try:
            yield
        finally:
            self._display.close()
            self._display = None

    def note(self, text: str) -> None:
        """Show what goes on in place of training."""
        if self._display is not None:
            self._display.note(text)

    def update(self, position: Position, metrics: Mapping[str, Any]) -> None:
        """Show how far training is."""
        if self._display is not None:
            self._display.update(self._completed(position), position.records, metrics)

    def fraction(self, position: Position) -> float | None:
        """Return what part of the length is done, at most 1; None without a length."""
        length = self._length
        return None if length is None else min(self._completed(position) / length.length, 1.0)

    def _completed(self, position: Position) -> float:
        """Return what is done in units of the length; within an epoch with a fraction."""
        length = self._length
        if length is None:
            return float(position.batches)
        part = 0.0
        if isinstance(length, Epoch) and position.batch_in_epoch and self._data is not None:
            order = self._data.order(position.epochs)
            part = 0.0 if order is None else position.batch_in_epoch / order.num_batches
        return length.count(position) + part
