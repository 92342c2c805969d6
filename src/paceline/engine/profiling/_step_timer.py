"""Timing of the parts of a training step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from paceline.engine.schedule._train_units import Position


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingWindow:
    """The batches that are timed one by one.

    Attributes:
        enabled: Whether any are.
        sync_timings: Whether times on a GPU are those of its work, as events in its stream mark
            them; nothing waits for the GPU. Without it they are those of launching the work.
        begin_on_batch: The first batch, from 0.
        end_after_batch: The last batch, inclusive; None for all that follow.

    Raises:
        ValueError: The first batch is negative, or the last one lies before it.
    """

    enabled: bool = False
    sync_timings: bool = True
    begin_on_batch: int = 0
    end_after_batch: int | None = None

    def __post_init__(self) -> None:
        if self.begin_on_batch < 0:
            raise ValueError(f"`begin_on_batch` must be at least 0, but got {self.begin_on_batch}.")
        if self.end_after_batch is not None and self.end_after_batch < self.begin_on_batch:
            raise ValueError(
                f"`end_after_batch` must not lie before `begin_on_batch` ({self.begin_on_batch}),"
                f" but got {self.end_after_batch}."
            )

    def covers(self, batch: int) -> bool:
        """Tell whether a batch is to be timed."""
        if not self.enabled or batch < self.begin_on_batch:
            return False
        return self.end_after_batch is None or batch <= self.end_after_batch


class StepTimer:
    """Measure the parts of one batch, in seconds; parts may repeat and lie within one another.

    On a GPU events in its stream mark where a part begins and ends, so that nothing waits for it.

    Args:
        device: The device whose work is measured, or None for the clock of this process.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._has_events = device is not None and device.type == "cuda"
        self._times = MeasuredTimes()

    def add(self, part: str, seconds: float) -> None:
        """Add a time to a part."""
        self._times.add(part, seconds)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part."""
        if self._has_events:
            begin, end = _new_event(), _new_event()
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._times.add_events(part, begin, end)
            return
        now = perf_counter()
        try:
            yield
        finally:
            self._times.add(part, perf_counter() - now)

    def finish(self) -> "MeasuredTimes":
        """Return what was measured since the last call; the device may still be at it."""
        times, self._times = self._times, MeasuredTimes()
        return times

    def take(self) -> dict[str, float]:
        """Return the parts measured since the last call, after waiting for the device."""
        return self.finish().seconds()


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


class MeasuredTimes:
    """The parts of a batch; those between events are known when the device has passed them."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def add(self, part: str, seconds: float) -> None:
        """Add a time to a part."""
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def add_events(self, part: str, begin: Any, end: Any) -> None:
        """Add the time between two events of a stream to a part."""
        self._events.append((part, begin, end))

    def is_known(self) -> bool:
        """Tell whether the device has passed all events."""
        return all(end.query() for _, _, end in self._events)

    def seconds(self) -> dict[str, float]:
        """Return the parts, after waiting for the device where it has not passed an event."""
        events, self._events = self._events, []
        for part, begin, end in events:
            end.synchronize()
            self.add(part, begin.elapsed_time(end) / 1000)
        return self._parts


class StepThroughput:
    """Samples and batches per second since the last report, and the wait for data."""

    def __init__(self) -> None:
        self.data_wait_s = self._earlier_wait_s = 0.0
        self.start(Position())

    @property
    def all_data_wait_s(self) -> float:
        """The wait for data since the very beginning, in seconds."""
        return self._earlier_wait_s + self.data_wait_s

    @property
    def elapsed_s(self) -> float:
        """The seconds since the count began."""
        return perf_counter() - self._began

    def start(self, position: Position) -> None:
        """Begin to count at a position."""
        self._position, self._began = position, perf_counter()
        self._earlier_wait_s += self.data_wait_s
        self.data_wait_s = 0.0

    def wait_for(self, data: Iterator[Any], default: Any = None) -> Any:
        """Return the next item of data, and count the wait for it."""
        began = perf_counter()
        item = next(data, default)
        self.data_wait_s += perf_counter() - began
        return item

    def take(self, position: Position) -> dict[str, float]:
        """Return the rates up to a position, and begin anew there; empty if nothing was trained."""
        if position.batches == self._position.batches:
            return {}
        elapsed = self.elapsed_s
        rates = {
            "samples_per_second": (position.records - self._position.records) / elapsed,
            "batches_per_second": (position.batches - self._position.batches) / elapsed,
            "data_wait_fraction": self.data_wait_s / elapsed,
        }
        self.start(position)
        return rates
