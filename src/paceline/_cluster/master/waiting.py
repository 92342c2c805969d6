"""Waiting until something changes: requests on the event loop, and threads between passes."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ALL = 0


class WaitingRequests:
    """Let coroutines wait for a key to be notified from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: defaultdict[int, set[asyncio.Event]] = defaultdict(set)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind to the server's event loop; earlier notifications have no listeners."""
        self._loop = loop

    def notify(self, key: int = _ALL) -> None:
        """Wake whoever waits for `key`."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._wake, key)

    @contextmanager
    def listen(self, key: int = _ALL) -> Iterator[asyncio.Event]:
        """Open an event set by notifications; open this before reading the watched state."""
        event = asyncio.Event()
        self._waiting[key].add(event)
        try:
            yield event
        finally:
            self._waiting[key].discard(event)
            if not self._waiting[key]:
                del self._waiting[key]

    def notify_all(self) -> None:
        """Wake everybody, whatever they wait for."""
        # Copy of the keys: the event loop's thread may change the dictionary meanwhile.
        for key in tuple(self._waiting):
            self.notify(key)

    def _wake(self, key: int) -> None:
        for event in self._waiting.get(key, ()):
            event.set()


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until an event is set; False after `timeout_s` seconds."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    return True


class Wakeups:
    """Wake the threads that make passes over the database; for any thread."""

    def __init__(self) -> None:
        self._events: list[threading.Event] = []

    def event(self) -> threading.Event:
        """Return a new event, which `wake` sets from now on."""
        self._events.append(threading.Event())
        return self._events[-1]

    def wake(self) -> None:
        """Have all threads make a pass soon."""
        for event in self._events:
            event.set()
