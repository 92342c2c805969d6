"""What the master counts of itself while it runs: requests, and how far its records are behind."""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

REQUEST_BOUNDS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
LAG_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 300.0)
DEFAULT_SLOW_REQUEST_S = 1.0


@dataclass(slots=True)
class Histogram:
    """Values counted by size."""

    bounds: tuple[float, ...]
    sum: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.numbers[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Return how many values are at most each bound, and how many there are."""
        return list(accumulate(self.numbers))


class Measurements:
    """Counts since the start of the master; safe to use from any thread.

    Args:
        slow_request_s: Seconds until the answer begins, from which on a request is slow.
    """

    def __init__(self, slow_request_s: float = DEFAULT_SLOW_REQUEST_S) -> None:
        self.slow_request_s = slow_request_s
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: defaultdict[str, Histogram] = defaultdict(
            lambda: Histogram(REQUEST_BOUNDS_S)
        )
        self._slow: Counter[str] = Counter()
        self._lag = Histogram(LAG_BOUNDS_S)
        self._newest_lag_s: float | None = None

    def note_request(self, method: str, route: str, status: int, seconds: float | None) -> bool:
        """Count a request and tell whether it was slow; None if it waited on purpose."""
        is_slow = seconds is not None and seconds >= self.slow_request_s
        with self._lock:
            self._requests[method, route, status] += 1
            if seconds is not None:
                self._seconds[route].add(seconds)
            self._slow[route] += is_slow
        return is_slow

    def note_lag(self, seconds: float) -> None:
        """Note how old the newest record of a request was when it was stored."""
        with self._lock:
            self._newest_lag_s = max(seconds, 0.0)
            self._lag.add(self._newest_lag_s)

    def requests(self) -> dict[tuple[str, str, int], int]:
        """Return the number of requests by method, route and status."""
        with self._lock:
            return dict(self._requests)

    def seconds(self) -> dict[str, tuple[float, list[int]]]:
        """Return of each route the sum of its seconds and how many were at most each bound."""
        with self._lock:
            return {route: (one.sum, one.cumulative()) for route, one in self._seconds.items()}

    def slow(self) -> dict[str, int]:
        """Return the number of slow requests by route."""
        with self._lock:
            return {route: number for route, number in self._slow.items() if number}

    def lag(self) -> tuple[float | None, float, list[int]]:
        """Return the newest lag, their sum, and how many were at most each bound."""
        with self._lock:
            return self._newest_lag_s, self._lag.sum, self._lag.cumulative()
