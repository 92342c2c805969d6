"""The training loop for code of the user's own that takes the batches of an epoch one by one."""

from collections.abc import Generator
from typing import Any

from paceline.engine.schedule._training_schedule import StopReason
from paceline.engine.training._training_loop import TrainingLoop


class DrivenLoop(TrainingLoop):
    """A training loop that can also hand out the batches of an epoch to a loop of the user's own.

    Attributes:
        is_left: Whether the user's loop has ended before the epoch; the batch that it had is done.
    """

    is_left = False

    def shards(self) -> Generator[Any, None, StopReason]:
        """Yield this rank's shards to the end of the epoch; each is trained on before the next.

        What `run` does between two batches happens when the next shard is asked for.

        Returns:
            Why it ended; `StopReason.LENGTH` at the end of the epoch and where `is_left` is set.

        Raises:
            RuntimeError: The user's loop has left within a batch of several shards.
        """
        epoch, is_over = self.position.epochs, False
        self.is_left = False
        with self._running():
            self._agreement.compare_start(self.position, is_idle=not self.data.own_shards)
            reason = self._agreement.agree_now().stop_reason
            while reason is None and not is_over:
                before = self.position
                for data, _ in self.shards_of_batch():
                    self._check_not_left()
                    with self._stepper.autocast():
                        yield self._loop_hooks.to_device(data)
                if self.position is before:
                    return StopReason.DATA
                is_over = self.is_left or self.position.epochs != epoch
                reason = self._listen(is_at_end=is_over)
            self.timeline.flush()
        return StopReason.LENGTH if is_over or reason is None else reason

    def num_shards_left(self) -> int:
        """Return how many shards `shards` yields.

        Raises:
            TypeError: The data have no length.
        """
        order = self.data.order(self.position.epochs)
        if order is None:
            raise TypeError("Iterable data have no length.")
        batches = range(self.position.batch_in_epoch, order.num_batches)
        if self._stepper.is_divided:
            return len(batches)
        return sum(len(order.sizes(batch, self.data.own_shards)) for batch in batches)

    def _check_not_left(self) -> None:
        if self.is_left:
            raise RuntimeError(
                "A loop over the training data must train on whole batches, but it was left within"
                f" one of the {self.data.num_shards} shards that the ranks have together. Hint: go"
                " on with as many ranks as the training began with, or do not leave the loop."
            )

    def end_epoch(self) -> None:
        """Leave out the rest of an epoch that was begun."""
        if self.position.batch_in_epoch:
            self._end_epoch()
