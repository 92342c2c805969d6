"""Stream of the master's events, followed across reconnections."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from paceline._base.process_and_network import take
from paceline.client import _late_models as models
from paceline.client._http_session import (
    ApiError,
    HttpSession,
    MasterUnreachableError,
    raise_for_problem,
)

if TYPE_CHECKING:
    import httpx2


# The master sends an event without data every few seconds; a longer silence is a dead connection.
_SILENCE_S = 60.0


_RECONNECT_S = 0.5
# How many events are read ahead, and how often to look whether reading has ended.
_MOST_EVENTS = 1000


_LOOK_INTERVAL_S = 0.01


class EventStream:
    """Follow events with a cursor; reconnects when the connection or the master goes away.

    Attributes:
        cursor: The id of the last event that was yielded; None before the first one.
        is_connected: Whether the master answers.
        is_current: Whether all that had happened was yielded: the master had nothing to send.
    """

    def __init__(
        self,
        session: HttpSession,
        *,
        after: int | None = None,
        experiment_id: int | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self.cursor = after
        self.is_connected = False
        self.is_current = False
        self._session = session
        self._experiment_id = experiment_id
        self._patience_s = patience_s

    def __iter__(self) -> Iterator["models.Event | None"]:
        """Yield events, and None when nothing happened for a while or the connection changed.

        Raises:
            ApiError: The master refused the request.
            MasterUnreachableError: No master answered for `patience_s` seconds.
        """
        last_contact = time.monotonic()
        while True:
            try:
                for event in self._connect():
                    last_contact = time.monotonic()
                    yield event
            except MasterUnreachableError:
                if time.monotonic() - last_contact > self._patience_s:
                    raise
            self.is_connected = self.is_current = False
            yield None
            time.sleep(_RECONNECT_S)

    def _connect(self) -> Iterator["models.Event | None"]:
        """Yield the events of a single connection; return when the connection breaks."""
        import httpx2

        # A look at the master first: it finds one that moved, and names a refused token.
        self._session.send("GET", "master")
        params = {"after": self.cursor, "experiment_id": self._experiment_id}
        known = {key: value for key, value in params.items() if value is not None}
        timeout = httpx2.Timeout(30.0, read=_SILENCE_S)
        try:
            # Without a limit of size: an event carries the metrics that a user's code reports.
            with self._session.http().sse(
                "events", params=known, timeout=timeout, max_event_size=None
            ) as source:
                response = source.response
                if not response.is_success:
                    response.read()
                    _raise_unless_passing(response)
                    return
                self.is_connected = True
                for streamed in _events_of(source):
                    # The master greets, and shows life when there is nothing to send.
                    self.is_current = streamed.event == "alive"
                    if not streamed.data:
                        yield None
                        continue
                    event = models.Event.model_validate_json(streamed.data)
                    # Cursor before the yield: a consumer leaving the loop has received this event.
                    self.cursor = event.id
                    yield event
        except httpx2.SSEError as error:
            raise MasterUnreachableError(
                f"{self._session.url} must answer with events, but got no stream of them ({error})."
                " Hint: a proxy in between may have answered."
            ) from error
        except httpx2.TransportError:
            return


def _events_of(source: "httpx2.EventSource") -> "Iterator[httpx2.ServerSentEvent]":
    """Yield the events of an answer as they come; signals take effect while there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield from source
        return
    events: Queue[httpx2.ServerSentEvent | Exception | None] = Queue(_MOST_EVENTS)
    is_over = threading.Event()

    def read() -> None:
        end: Exception | None = None
        try:
            for event in source:
                events.put(event)
                if is_over.is_set():
                    return
        except Exception as error:  # raised by the thread that takes the events
            end = error
        events.put(end)

    thread = threading.Thread(target=read, name="paceline-events", daemon=True)
    thread.start()
    try:
        while (event := take(events)) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        is_over.set()
        _end_reading(source.response, thread, events)


def _end_reading(
    response: "httpx2.Response", thread: threading.Thread, events: "Queue[Any]"
) -> None:
    """End the thread reading an answer, wherever the thread waits."""
    connection = response.extensions["network_stream"].get_extra_info("socket")
    with suppress(OSError):
        # Shutdown instead of close: it wakes the reading thread from a blocked `recv`.
        connection.shutdown(socket.SHUT_RDWR)
    while thread.is_alive():
        with suppress(Empty):
            # Room in the full queue: the reading thread may be blocked in `put`.
            events.get_nowait()
        thread.join(_LOOK_INTERVAL_S)


def _raise_unless_passing(response: "httpx2.Response") -> None:
    """Raise the answer's error unless the master is only busy or going down."""
    try:
        raise_for_problem(response)
    except ApiError as error:
        if error.status < 500:
            raise
