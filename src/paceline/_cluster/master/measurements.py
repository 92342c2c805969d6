"""Measurements of a running master: its requests, its queues and the size of its home."""

import os
import shutil
import threading
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram

_REQUEST_BOUNDS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
_LAG_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 300.0)
DEFAULT_SLOW_REQUEST_S = 1.0


class Measurements:
    """Counts since the start of the master; safe to use from any thread.

    Args:
        slow_request_s: Seconds until the answer begins, from which on a request is slow.
    """

    def __init__(self, slow_request_s: float = DEFAULT_SLOW_REQUEST_S) -> None:
        self.slow_request_s = slow_request_s
        self.newest_lag_s: float | None = None
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "paceline_http_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._slow = Counter(
            "paceline_slow_requests", "Slow requests.", ["route"], registry=registry
        )
        self._seconds = Histogram(
            "paceline_http_request_seconds",
            "Seconds until an answer began.",
            ["route"],
            registry=registry,
            buckets=_REQUEST_BOUNDS_S,
        )
        self._lag = Histogram(
            "paceline_ingest_lag_seconds",
            "How old the newest record of a request was when it was stored.",
            registry=registry,
            buckets=_LAG_BOUNDS_S,
        )

    def note_request(self, method: str, route: str, status: int, seconds: float | None) -> bool:
        """Count a request; return whether the request was slow; `seconds` None: a long poll."""
        is_slow = seconds is not None and seconds >= self.slow_request_s
        self._requests.labels(method, route, str(status)).inc()
        if seconds is not None:
            self._seconds.labels(route).observe(seconds)
        if is_slow:
            self._slow.labels(route).inc()
        return is_slow

    def note_lag(self, seconds: float) -> None:
        """Record the age of a request's newest record at the time of storing."""
        self.newest_lag_s = max(seconds, 0.0)
        self._lag.observe(self.newest_lag_s)

    def num_requests(self) -> int:
        """Return the number of requests."""
        return _total(self._requests)

    def num_slow_requests(self) -> int:
        """Return the number of slow requests."""
        return _total(self._slow)


def _total(counter: Counter) -> int:
    return int(sum(sample.value for metric in counter.collect() for sample in metric.samples))


_MAX_AGE_S = 600.0
_DIRECTORIES = ("logs", "contexts", "attempts", "files")


class HomeSizes:
    """The bytes of the parts of a home; the directories' are up to ten minutes old."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._measured_at = -_MAX_AGE_S
        self._is_measuring = False
        self._sizes: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return bytes by part; the directories are missing until they were measured once."""
        with self._lock:
            is_due = time.monotonic() - self._measured_at >= _MAX_AGE_S
            if is_due and not self._is_measuring:
                self._is_measuring = True
                threading.Thread(target=self._measure, name="home-sizes", daemon=True).start()
            found = dict(self._sizes)
        for name, suffix in (("database", ""), ("write_ahead_log", "-wal")):
            path = self._home / f"master.sqlite{suffix}"
            found[name] = path.stat().st_size if path.exists() else 0
        return found

    def free_bytes(self) -> int:
        """Return how many bytes are free on the home's disk."""
        return shutil.disk_usage(self._home).free

    def _measure(self) -> None:
        try:
            sizes = {name: _bytes_below(f"{self._home}/{name}") for name in _DIRECTORIES}
        finally:
            with self._lock:
                self._is_measuring = False
                self._measured_at = time.monotonic()
        with self._lock:
            self._sizes = sizes


def _bytes_below(directory: str) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(f"{root}/{name}").st_size
            except OSError:
                # Gone meanwhile.
                continue
    return total
