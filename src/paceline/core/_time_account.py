"""What a training spends its time on, for the chief's journal."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

TRAINING, VALIDATION, CHECKPOINT, OTHER = "training", "validation", "checkpoint", "other"
LOST = "lost"
# How often there is a record at most, besides those that a restart needs, in seconds.
_INTERVAL_S = 1.0

TimeEvent = Literal["start", "report", "checkpoint", "end"]
Record = Callable[[TimeEvent, int, dict[str, float]], None]


class TimeAccount:
    """Count seconds by what they are spent on, from the first `begin` on.

    Args:
        record: Called with an event, the completed batches and the seconds so far; None on ranks
            that record nothing.
    """

    def __init__(self, record: Record | None) -> None:
        self._record = record
        self._has_ended = False
        self._seconds = {VALIDATION: 0.0, CHECKPOINT: 0.0, OTHER: 0.0, LOST: 0.0}
        self._present: str | None = None
        self._since = self._recorded = 0.0
        self._data_wait_s = 0.0

    def begin(self, num_batches: int, what: str = TRAINING) -> None:
        """Begin to count, or spend the time on something else from now on."""
        is_new = self._present is None or self._has_ended
        self._switch(what)
        if is_new:
            self._note("start", num_batches)

    @contextmanager
    def spent_on(self, what: str, num_batches: int) -> Iterator[None]:
        """Count the time of a block; it may lie within another."""
        before = self._present or OTHER
        self.begin(num_batches, what)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, what: str, seconds: float) -> None:
        """Count seconds that were counted as training as spent on something else."""
        self._seconds[what] += seconds

    def report(self, num_batches: int, data_wait_s: float) -> None:
        """Record the seconds so far, if that was not done lately.

        Args:
            num_batches: The completed batches.
            data_wait_s: The wait for data since the first batch.
        """
        self._data_wait_s = data_wait_s
        if perf_counter() - self._recorded >= _INTERVAL_S:
            self._note("report", num_batches)

    def stored(self, num_batches: int, data_wait_s: float) -> None:
        """Record that training goes on from a checkpoint."""
        self._data_wait_s = data_wait_s
        self._note("checkpoint", num_batches)

    def end(self, num_batches: int, data_wait_s: float) -> None:
        """Record that training has ended; it may begin once more."""
        if self._present is not None and not self._has_ended:
            self._data_wait_s = data_wait_s
            self._switch(OTHER)
            self._note("end", num_batches)

    def _switch(self, what: str) -> None:
        now = perf_counter()
        if self._present in self._seconds:
            self._seconds[self._present] += now - self._since
        self._present, self._since = what, now

    def _note(self, event: TimeEvent, num_batches: int) -> None:
        assert self._present is not None
        self._has_ended = event == "end"
        self._switch(self._present)
        self._recorded = perf_counter()
        if self._record is not None:
            seconds = {"data_wait": self._data_wait_s, **self._seconds}
            if not seconds[LOST]:
                del seconds[LOST]
            self._record(event, num_batches, seconds)


class ScriptTimes:
    """What a script without a trainer spends its time on, from its first report on.

    It knows the steps that the script reports. What the script does between its reports and
    checkpoints counts as training. A block within a thread other than the main one counts nothing,
    as training may go on beside it.

    Args:
        record: As that of a `TimeAccount`.
        steps_completed: The step from which the script goes on.
    """

    def __init__(self, record: Record | None, steps_completed: int) -> None:
        self._account = TimeAccount(record)
        self._is_counting = record is not None
        self._has_begun = False
        self._steps_completed = steps_completed
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Count no longer, as a trainer records its times itself."""
        self._is_counting = False

    def reported(self, steps_completed: int) -> None:
        """Count the time up to a report."""
        if self._is_counting:
            with self._lock:
                self._begin()
                if steps_completed > self._steps_completed:
                    self._steps_completed = steps_completed
                self._account.report(self._steps_completed, 0.0)

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Count the time of a block."""
        is_main = threading.current_thread() is threading.main_thread()
        if not self._is_counting or not is_main:
            yield
            return
        with self._lock:
            self._begin()
        with self._account.spent_on(what, self._steps_completed):
            yield

    def stored(self, steps_completed: int) -> None:
        """Record that the script can go on from a checkpoint."""
        if self._is_counting:
            with self._lock:
                self._begin()
                self._steps_completed = max(self._steps_completed, steps_completed)
                self._account.stored(steps_completed, 0.0)

    def end(self) -> None:
        """Record that the script has come to its end."""
        if self._is_counting and self._has_begun:
            with self._lock:
                self._account.end(self._steps_completed, 0.0)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._account.begin(self._steps_completed)
