"""Leases of runners: how long each may be silent until its attempt is taken from it."""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

DEFAULT_LEASE_S = 60.0
LEAST_LEASE_S = 3.0

_TICK_S = 0.5
# A runner asks what is wanted at least so often within one lease.
_RENEWALS = 3


@dataclass(slots=True)
class _Lease:
    silent_s: float = 0.0
    seen_version: int = 0


class Leases:
    """Leases of the attempts that have a runner; for any thread.

    A runner renews its lease by each request. The time that counts is the time in which this
    process could hear: it is measured on the event loop that takes the requests, so that no runner
    is late because the master was stopped, suspended or busy. Leases are not stored: a master that
    starts gives each runner a new one. The number of an attempt is its fencing token, as no other
    attempt of the trial has it and what has ended is refused.

    Args:
        length_s: How long a runner may be silent, in seconds.

    Raises:
        ValueError: `length_s` is below the least.
    """

    def __init__(self, length_s: float = DEFAULT_LEASE_S) -> None:
        if not length_s >= LEAST_LEASE_S:
            raise ValueError(
                f"`runner_timeout` must be at least {LEAST_LEASE_S:g} seconds, but got"
                f" {length_s!r}."
            )
        self.length_s = length_s
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._last = 0.0

    @property
    def longest_wait_s(self) -> float:
        """How long a runner's request may wait for news, so that the next one comes in time."""
        return self.length_s / _RENEWALS

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Measure the time on an event loop; without one no lease ends."""
        self._last = time.monotonic()
        loop.call_later(_TICK_S, self._tick, loop)

    def begin(self, attempt_id: int) -> None:
        """Give an attempt a lease, unless it has one."""
        with self._lock:
            self._leases.setdefault(attempt_id, _Lease())

    def renew(self, attempt_id: int, seen_version: int = 0) -> None:
        """Note a sign of life of a runner, and which version of what is wanted it has seen."""
        with self._lock:
            if lease := self._leases.get(attempt_id):
                lease.silent_s = 0.0
                lease.seen_version = max(lease.seen_version, seen_version)

    def is_over(self, attempt_id: int) -> bool:
        """Tell whether a runner was silent for too long."""
        with self._lock:
            lease = self._leases.get(attempt_id)
            return lease is not None and lease.silent_s > self.length_s

    def has_seen(self, attempt_id: int, version: int) -> bool:
        """Tell whether a runner has seen what is wanted since a version."""
        with self._lock:
            lease = self._leases.get(attempt_id)
            return lease is not None and lease.seen_version >= version

    def end(self, attempt_id: int) -> None:
        """Forget the lease of an attempt whose runner has left."""
        with self._lock:
            self._leases.pop(attempt_id, None)

    def advance(self, elapsed_s: float) -> None:
        """Count time in which no runner was heard."""
        with self._lock:
            for lease in self._leases.values():
                lease.silent_s += elapsed_s

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        # After a pause, the requests that came meanwhile are taken before the next tick.
        self.advance(min(now - self._last, 2 * _TICK_S))
        self._last = now
        with suppress(RuntimeError):  # the loop was closed
            loop.call_later(_TICK_S, self._tick, loop)
