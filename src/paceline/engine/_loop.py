"""The training loop: from one batch to the next, and what is due in between."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, Protocol

import torch

from paceline.core import Context
from paceline.engine._accumulation import Accumulation
from paceline.engine._data import ShardedData
from paceline.engine._metrics import WeightedMeans, sum_over_ranks
from paceline.engine._units import Position, TrainUnit

# How often the chief looks whether it shall leave, in seconds; a look costs two microseconds.
_LOOK_INTERVAL_S = 0.05
# What ranks tell each other with the gradients: halves stand for preemption, wholes for a stop.
_PREEMPT, _STOP = 0.5, 1.0


class StopReason(str, Enum):
    """Why training ended."""

    LENGTH = "reached max_length"
    PREEMPTED = "preempted"
    REQUESTED = "stop requested"
    DATA = "no more data"
    TEST = "test mode"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What happens when; None means never."""

    max_length: TrainUnit | None
    reporting: TrainUnit | None
    validation: TrainUnit | None
    checkpoint: TrainUnit | None


class Door(Protocol):
    """What a front door does for the loop; called on every rank alike."""

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on one shard and return its metrics."""

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""

    def step_without_data(self) -> None:
        """Take part in an optimizer step on a rank that has no samples in it."""

    def after_batch(self, position: Position, is_epoch_end: bool) -> None:
        """Step schedulers and the like."""

    def epoch_started(self, epoch: int) -> None:
        """Tell that an epoch begins."""

    def epoch_ended(self, epoch: int) -> None:
        """Tell that an epoch has ended."""

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report averaged training metrics."""

    def validate(self, position: Position) -> bool:
        """Validate and report; tell whether the result asks for a checkpoint."""

    def save(self, position: Position) -> None:
        """Store a checkpoint."""

    def at_edge(self) -> None:
        """Raise what went wrong in the background."""

    @property
    def is_stop_requested(self) -> bool:
        """Whether this rank asks for a stop."""


class TrainingLoop:
    """Train to a length; can be continued, by a longer length or from a restored position.

    Args:
        core: The core context.
        door: What to do on a batch and at boundaries.
        data: The training data.
        accumulation: Shared with whoever scales losses and steps optimizers.
        position: Where to begin.
    """

    def __init__(
        self,
        core: Context,
        door: Door,
        data: ShardedData,
        accumulation: Accumulation,
        position: Position,
    ) -> None:
        self._core = core
        self._door = door
        self._data = data
        self._accumulation = accumulation
        self.position = position
        self.means = WeightedMeans(core.distributed, "training")
        self.last_validation = -1
        self.last_checkpoint = position.batches if position.batches else -1
        self._iterator: Iterator[Any] | None = None
        self._stop_reason: StopReason | None = None
        self._next_look = 0.0

    def open_epoch(self) -> None:
        """Make the data iterator at the present position; it may draw random numbers."""
        self._iterator = self._data.iterate(self.position.epochs, self.position.batch_in_epoch)

    def run(self, schedule: Schedule) -> StopReason:
        """Train until the length is reached or something asks to stop earlier."""
        self._stop_reason = None
        while self._stop_reason is None:
            if schedule.max_length is not None and schedule.max_length.is_reached(self.position):
                self._stop_reason = StopReason.LENGTH
                break
            before = self.position
            if not self._train_batch():
                self._stop_reason = StopReason.DATA
                break
            self._serve_boundaries(schedule, before)
            self._listen()
        return self._stop_reason

    # ---- one global batch ----------------------------------------------------------------

    def _train_batch(self) -> bool:
        """Train one global batch; False when the data are empty."""
        position = self.position
        if self._iterator is None:
            self.open_epoch()
        if position.batch_in_epoch == 0:
            self._door.epoch_started(position.epochs)
        order = self._data.order(position.epochs)
        if order is None:
            return self._train_stream_batch()
        batch = position.batch_in_epoch
        sizes = [len(order.shard(batch, shard)) for shard in self._data.own_shards]
        is_window_end = self._accumulation.is_window_end(position.batches)
        assert self._iterator is not None
        self._train_shards(
            self._iterator,
            [size for size in sizes if size],
            1.0 / self._window_records(),
            is_window_end,
        )
        self._advance(order.num_records(batch), is_epoch_end=batch + 1 == order.num_batches)
        return True

    def _train_shards(
        self, shards: Iterator[Any], sizes: list[int], scale: float, is_window_end: bool
    ) -> None:
        accumulation = self._accumulation
        for index, size in enumerate(sizes):
            accumulation.weight = size * scale
            accumulation.is_boundary = is_window_end and index + 1 == len(sizes)
            self.means.add(self._door.train_shard(next(shards), self.position), size)
        if is_window_end and not sizes:
            accumulation.is_boundary = True
            self._door.step_without_data()

    def _window_records(self) -> int:
        """Return the samples over which the present window's gradient is a mean."""
        accumulation, position = self._accumulation, self.position
        epoch, batch = position.epochs, position.batch_in_epoch
        order = self._data.order(epoch)
        assert order is not None
        if accumulation.frequency == 1 or not accumulation.average:
            return order.num_records(batch)
        # The window may have begun in the epoch before and may end in the next one.
        first = position.batches - position.batches % accumulation.frequency
        batch -= position.batches - first
        while batch < 0:
            epoch -= 1
            earlier = self._data.order(epoch)
            assert earlier is not None
            batch += earlier.num_batches
        total = 0
        for _ in range(accumulation.frequency):
            order = self._data.order(epoch)
            assert order is not None
            total += order.num_records(batch)
            batch += 1
            if batch == order.num_batches:
                epoch, batch = epoch + 1, 0
        return total

    def _train_stream_batch(self) -> bool:
        """Train one batch of data that have no length: the epoch ends where all ranks' end.

        Only these data cost an exchange per batch. Over a window of several batches, each batch
        counts alike, as the number of samples to come is not known.
        """
        assert self._iterator is not None
        shards = list(islice(self._iterator, len(self._data.own_shards)))
        sizes = [self._door.num_samples(shard) for shard in shards]
        num_records = sum(sizes)
        if self._core.distributed.size > 1:
            counts = torch.tensor([float(num_records)], dtype=torch.float64)
            num_records = int(sum_over_ranks(counts)[0])
        if not num_records:
            return self._end_stream()
        accumulation = self._accumulation
        is_window_end = accumulation.is_window_end(self.position.batches)
        scale = 1.0 / num_records / (accumulation.frequency if accumulation.average else 1)
        self._train_shards(iter(shards), sizes, scale, is_window_end)
        self._advance(num_records, is_epoch_end=False)
        return True

    def _end_stream(self) -> bool:
        epoch = self.position.epochs
        if self.position.batch_in_epoch == 0:
            return False
        self._door.epoch_ended(epoch)
        self.position = replace(self.position, epochs=epoch + 1, batch_in_epoch=0)
        self._iterator = None
        return True

    def _advance(self, num_records: int, *, is_epoch_end: bool) -> None:
        position = self.position
        # Made directly: `replace` would cost a tenth of the engine's budget per step.
        self.position = Position(
            position.batches + 1,
            position.epochs,
            position.records + num_records,
            position.batch_in_epoch + 1,
        )
        self._door.after_batch(self.position, is_epoch_end)
        if is_epoch_end:
            self._door.epoch_ended(position.epochs)
            self.position = replace(self.position, epochs=position.epochs + 1, batch_in_epoch=0)
            self._iterator = None

    # ---- between batches -----------------------------------------------------------------

    def _serve_boundaries(self, schedule: Schedule, before: Position) -> None:
        after = self.position
        if schedule.reporting is not None and schedule.reporting.is_due(before, after):
            self.report()
        wants_checkpoint = False
        if schedule.validation is not None and schedule.validation.is_due(before, after):
            wants_checkpoint = self.validate()
        if schedule.checkpoint is not None and schedule.checkpoint.is_due(before, after):
            wants_checkpoint = True
        if wants_checkpoint:
            self.save()
        self._door.at_edge()

    def report(self) -> None:
        """Report the training metrics since the last report."""
        metrics = self.means.reduce()
        if metrics:
            self._door.report(self.position, metrics)

    def validate(self) -> bool:
        """Validate unless that was done at this step; tell whether to store a checkpoint."""
        if self.last_validation == self.position.batches:
            return False
        self.last_validation = self.position.batches
        return self._door.validate(self.position)

    def save(self) -> None:
        """Store a checkpoint unless this step has one."""
        if self.last_checkpoint != self.position.batches:
            self.last_checkpoint = self.position.batches
            self._door.save(self.position)

    def _listen(self) -> None:
        """Learn, at the same step on every rank, whether to leave."""
        accumulation = self._accumulation
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_INTERVAL_S
            wants = self._core.distributed.rank == 0 and self._core.preempt.is_wanted()
            accumulation.signal = _PREEMPT if wants else 0.0
        told = accumulation.signal + (_STOP if self._door.is_stop_requested else 0.0)
        if self._core.distributed.size > 1:
            accumulation.signal = told
            told, accumulation.heard = accumulation.heard or 0.0, None
        if told % 1.0:
            self._stop_reason = StopReason.PREEMPTED
        elif told:
            self._stop_reason = StopReason.REQUESTED
