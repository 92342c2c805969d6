"""Measurement of throughput."""

from collections import deque

# Long enough that a validation does not make the rest jump, short enough to follow a change.
_WINDOW_S = 60.0
_SAMPLE_INTERVAL_S = 1.0
# Below this a rate says more about the start than about the rest.
_SHORTEST_S = 0.5


class Throughput:
    """Rates over the last minute of what is counted; times are in seconds of one clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()
        self._first = 0.0
        self._last: tuple[float, tuple[float, ...]] = (0.0, ())

    @property
    def elapsed_s(self) -> float:
        """The seconds between the first and the last addition."""
        return self._last[0] - self._first

    def add(self, now: float, *counters: float) -> None:
        """Note how far counters are at a time, always the same ones."""
        samples = self._samples
        self._last = (now, counters)
        if not samples:
            self._first = now
        if not samples or now - samples[-1][0] >= _SAMPLE_INTERVAL_S:
            samples.append(self._last)
            while len(samples) > 2 and now - samples[1][0] >= _WINDOW_S:
                samples.popleft()

    def rates(self) -> tuple[float, ...]:
        """Return what is done per second by each counter; 0 as long as that cannot be told."""
        if not self._samples:
            return ()
        begin, before = self._samples[0]
        now, counters = self._last
        seconds = now - begin
        if seconds < _SHORTEST_S:
            return (0.0,) * len(counters)
        return tuple((b - a) / seconds for a, b in zip(before, counters, strict=True))
