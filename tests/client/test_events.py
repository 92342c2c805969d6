"""The event stream, followed across broken connections."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from paceline.client import ApiError, Client, MasterUnreachableError
from paceline.client._event_stream import EventStream
from paceline.client._http_session import HttpSession


def event_text(number: int) -> bytes:
    event = {
        "id": number,
        "time": 0.0,
        "experiment_id": 1,
        "trial_id": None,
        "kind": "progress",
        "data": {"progress": 0.5},
    }
    return f"id: {number}\ndata: {json.dumps(event)}\n\n".encode()


class BreakingStream(BaseHTTPRequestHandler):
    """A server of events that breaks every connection after three of them."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self.headers["Authorization"] != "Bearer good":
            problem = {"title": "No", "status": 401, "code": "bad_token", "detail": "Bad token."}
            self.answer(401, json.dumps(problem).encode())
        elif url.path == "/api/v1/events":
            after = int(parse_qs(url.query).get("after", ["0"])[0])
            last = min(after + 3, 10)
            self.answer(
                200, b"event: connected\n\n" + b"".join(map(event_text, range(after + 1, last + 1)))
            )
        else:
            self.answer(200, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stream_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BreakingStream)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_events_go_on_after_a_broken_connection_without_loss_or_repeats(stream_url: str) -> None:
    with Client(stream_url, "good") as client:
        events = client.events(after=0)
        assert [next(events).id for _ in range(10)] == list(range(1, 11))


def test_a_stream_is_current_when_the_master_has_nothing_more_to_send() -> None:
    class Quiet(BreakingStream):
        def do_GET(self) -> None:
            self.answer(
                200, b"event: connected\n\n" + event_text(1) + b"event: alive\n\n" + event_text(2)
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with HttpSession(f"http://127.0.0.1:{server.server_port}", "good") as session:
            stream = EventStream(session, after=0)
            events = iter(stream)
            seen = [
                (event and event.id, stream.is_current)
                for event, _ in zip(events, range(5), strict=False)
            ]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert seen == [(None, False), (1, False), (None, True), (2, False), (None, False)]


def test_a_refused_token_ends_the_stream(stream_url: str) -> None:
    with (
        Client(stream_url, "bad") as client,
        pytest.raises(ApiError, match="Bad token") as caught,
    ):
        next(client.events())
    assert (caught.value.status, caught.value.code) == (401, "bad_token")


def test_an_answer_that_is_no_stream_of_events_is_named() -> None:
    class Page(BreakingStream):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"{}")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with HttpSession(f"http://127.0.0.1:{server.server_port}", "good") as session:
            stream = iter(EventStream(session, patience_s=-1))
            with pytest.raises(MasterUnreachableError, match="must answer with events"):
                next(stream)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_stream_gives_up_when_no_master_answers_for_long(free_port: int) -> None:
    with HttpSession(f"http://127.0.0.1:{free_port}", "good") as session:
        stream = iter(EventStream(session, patience_s=-1))
        with pytest.raises(MasterUnreachableError, match="paceline up --detach"):
            next(stream)
