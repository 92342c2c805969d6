"""Progress of a training towards its length: the display, and a fraction."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline import core
from paceline.display import TrainingProgress, ending_of, locations_of
from paceline.engine.schedule._train_units import Batch, Epoch, Position, Record, TrainUnit
from paceline.engine.schedule._training_schedule import StopReason
from paceline.engine.training._training_loop import TrainingLoop

_UNIT_NAMES: dict[type[TrainUnit], str] = {Batch: "batches", Epoch: "epochs", Record: "records"}
_ENDINGS = {
    StopReason.LENGTH: "completed",
    StopReason.REQUESTED: "stopped",
    StopReason.TEST: "completed (test mode)",
}


class LengthProgress:
    """Progress towards a length, from `begin` to `end`.

    A master shows what it is told, so nothing is shown in a trial of a master.

    Args:
        context: The core context.
    """

    def __init__(self, context: core.Context) -> None:
        has_master = context.info is not None and bool(context.info.cluster_id)
        self._is_quiet = has_master or context.distributed.rank != 0
        self._context = context
        self._length: TrainUnit | None = None
        self._loop: TrainingLoop | None = None
        self._display: TrainingProgress | None = None
        self._reason: StopReason | None = None
        self._reported: dict[str, Any] = {}

    def begin(self, length: TrainUnit | None, loop: TrainingLoop) -> None:
        """Show progress towards a length, or go on if that is shown already.

        Args:
            length: Where training ends; None if that is not known, as it goes piece by piece.
            loop: What trains.
        """
        position = loop.position
        is_shown = self._display is not None and length == self._length
        self._length, self._loop, self._reason = length, loop, None
        if is_shown:
            return
        if self._display is not None:
            self._display.close()
        self._display = TrainingProgress(
            None if length is None else length.length,
            "batches" if length is None else _UNIT_NAMES[type(length)],
            is_quiet=self._is_quiet,
        )
        self._display.start(
            self._completed(position),
            position.records,
            batches=position.batches,
            epoch=_present_epoch(position),
        )

    @contextmanager
    def towards(self, length: TrainUnit | None, loop: TrainingLoop) -> Iterator[None]:
        """Show progress towards a length within a block, and then how it has ended."""
        self.begin(length, loop)
        with self:
            yield

    def __enter__(self) -> None:
        """Do nothing: `begin` tells more."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Show how training has ended, and no more."""
        if self._display is None or self._loop is None:
            return
        self.update(self._loop.position)
        display, self._display = self._display, None
        run_dir, latest = self._context.run_dir, self._context.latest_checkpoint
        places = locations_of(run_dir, self._context.checkpoint.storage.url, latest)
        display.end(self._ending(error), *places)

    def note(self, text: str) -> None:
        """Show what goes on in place of training."""
        if self._display is not None:
            self._display.note(text)

    def update(self, position: Position) -> None:
        """Show how far training is."""
        if self._display is not None:
            self._display.update(
                self._completed(position),
                position.records,
                self._newest_metrics(),
                batches=position.batches,
                epoch=_present_epoch(position),
            )

    def report(self, position: Position, metrics: Mapping[str, Any], group: str) -> None:
        """Show metrics of training or of a validation."""
        if group == "training":
            self._reported = dict(metrics)
        self.update(position)
        if self._display is not None:
            self._display.report(metrics, group)

    def note_reason(self, reason: StopReason) -> None:
        """Take note of why training has ended."""
        self._reason = reason

    def fraction(self, position: Position) -> float | None:
        """Return what part of the length is done, at most 1; None without a length."""
        length = self._length
        if length is None:
            return None
        completed = self._completed(position)
        done = length.count(position) if completed is None else completed
        return min(done / length.length, 1.0)

    def _newest_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the last report, or newer ones that need no waiting."""
        if self._loop is None or self._display is None or not self._display.is_live:
            return None
        return {**self._reported, **self._loop.means.peek()}

    def _completed(self, position: Position) -> float | None:
        """Return what is done in units of the length; None within an epoch of unknown length."""
        length = self._length
        if length is None:
            return float(position.batches)
        part = 0.0
        if isinstance(length, Epoch) and position.batch_in_epoch and self._loop is not None:
            order = self._loop.data.order(position.epochs)
            if order is None:
                return None
            part = position.batch_in_epoch / order.num_batches
        return length.count(position) + part

    def _ending(self, error: BaseException | None) -> str:
        ending = ending_of(error)
        if ending != "completed":
            return ending
        if self._reason is not None and self._reason is not StopReason.LENGTH:
            return _ENDINGS.get(self._reason, str(self._reason.value))
        length, loop = self._length, self._loop
        is_short = length is not None and loop is not None and not length.is_reached(loop.position)
        return "stopped" if is_short else "completed"


def _present_epoch(position: Position) -> int:
    """Return the epoch of the last batch, from 1."""
    return max(position.epochs + bool(position.batch_in_epoch), 1)
