"""Stream of events from the master: parsing, and following across restarts."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import msgspec

from paceline._base.process_and_network import take
from paceline.client._http_session import (
    ApiError,
    HttpSession,
    MasterUnreachableError,
    raise_for_problem,
)

if TYPE_CHECKING:
    import httpx

    from paceline._cluster.messages.master_models import Event

# The master sends a comment line every few seconds; a longer silence is a dead connection.
_SILENCE_S = 60.0
_RECONNECT_S = 0.5
# How many lines are read ahead, and how often to look whether reading has ended.
_MOST_LINES = 1000
_LOOK_INTERVAL_S = 0.01


class StreamedEvent(msgspec.Struct, frozen=True):
    """Event of a `text/event-stream`: its `id` and `data` fields."""

    id: str | None
    data: str


def parse_stream(lines: Iterable[str]) -> Iterator[StreamedEvent | None]:
    """Yield the events of a `text/event-stream`, and None for each comment (keep-alive)."""
    event_id: str | None = None
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield StreamedEvent(event_id, "\n".join(data))
            event_id, data = None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not field:
            yield None
        elif field == "id":
            event_id = value
        elif field == "data":
            data.append(value)


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

    def __iter__(self) -> Iterator["Event | None"]:
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

    def _connect(self) -> Iterator["Event | None"]:
        """Yield the events of a single connection; return when the connection breaks."""
        import httpx

        from paceline._cluster.messages.master_models import Event

        # A look at the master first: it finds one that moved, and names a refused token.
        self._session.send("GET", "master")
        params = {"after": self.cursor, "experiment_id": self._experiment_id}
        known = {key: value for key, value in params.items() if value is not None}
        timeout = httpx.Timeout(30.0, read=_SILENCE_S)
        try:
            with self._session.http().stream(
                "GET", "events", params=known, timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    _raise_unless_passing(response)
                    return
                self.is_connected = True
                is_greeted = False
                for streamed in parse_stream(_stream_lines_of(response)):
                    if streamed is None:
                        # The first comment greets; later ones come when there is nothing to send.
                        self.is_current, is_greeted = is_greeted, True
                        yield None
                        continue
                    self.is_current = False
                    event = Event.model_validate_json(streamed.data)
                    # Cursor before the yield: a consumer leaving the loop has received this event.
                    self.cursor = event.id
                    yield event
        except httpx.TransportError:
            return


def _stream_lines_of(response: "httpx.Response") -> Iterator[str]:
    """Yield the lines of an answer as they come; signals take effect while there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield from response.iter_lines()
        return
    lines: Queue[str | Exception | None] = Queue(_MOST_LINES)
    is_over = threading.Event()

    def read() -> None:
        end: Exception | None = None
        try:
            for line in response.iter_lines():
                lines.put(line)
                if is_over.is_set():
                    return
        except Exception as error:  # raised by the thread that takes the lines
            end = error
        lines.put(end)

    thread = threading.Thread(target=read, name="paceline-events", daemon=True)
    thread.start()
    try:
        while (line := take(lines)) is not None:
            if isinstance(line, Exception):
                raise line
            yield line
    finally:
        is_over.set()
        _end_reading(response, thread, lines)


def _end_reading(response: "httpx.Response", thread: threading.Thread, lines: "Queue[Any]") -> None:
    """End the thread reading an answer, wherever the thread waits."""
    connection = response.extensions["network_stream"].get_extra_info("socket")
    with suppress(OSError):
        # Shutdown instead of close: it wakes the reading thread from a blocked `recv`.
        connection.shutdown(socket.SHUT_RDWR)
    while thread.is_alive():
        with suppress(Empty):
            # Room in the full queue: the reading thread may be blocked in `put`.
            lines.get_nowait()
        thread.join(_LOOK_INTERVAL_S)


def _raise_unless_passing(response: "object") -> None:
    """Raise the answer's error unless the master is only busy or going down."""
    import httpx

    assert isinstance(response, httpx.Response)
    try:
        raise_for_problem(response)
    except ApiError as error:
        if error.status < 500:
            raise
