"""Waking requests that wait: for a change of an attempt's control, or for events."""

import asyncio
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
        """Bind to the server's event loop; notifications before that have no listeners."""
        self._loop = loop

    def notify(self, key: int = _ALL) -> None:
        """Wake whoever waits for `key`."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._wake, key)

    @contextmanager
    def listen(self, key: int = _ALL) -> Iterator[asyncio.Event]:
        """Give an event that notifications set; open it before looking at what may change."""
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
