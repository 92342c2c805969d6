"""Receivers on loopback: an HTTP server that answers as told, and a small mail server.

The HTTP server is also a proxy to hosts of the internet, for which it answers itself.
"""

import base64
import hashlib
import hmac
import json
import queue
import socket
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

SECRET = "whsec_" + base64.b64encode(b"a key of 24 bytes at least").decode()


@dataclass
class Request:
    """A request as received."""

    path: str
    headers: dict[str, str]
    body: bytes
    host: str = ""

    def json(self) -> dict[str, Any]:
        """Return the body of a signed request, after checking the signature."""
        key = base64.b64decode(SECRET.removeprefix("whsec_"))
        content = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode()
        digest = hmac.new(key, content + self.body, hashlib.sha256).digest()
        assert self.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
        data: dict[str, Any] = json.loads(self.body)
        assert data["id"] == self.headers["webhook-id"]
        return data

    def titles(self) -> list[str]:
        """Return the titles of the notices in a signed request."""
        return [group["notice"]["title"] for group in self.json()["groups"]]


@dataclass
class Receiver:
    """An HTTP server; each request takes the next of `answers`, or is answered with 200.

    An answer is a status, a status with headers, or a function of the open handler. With `tls`, it
    is every host of the internet for those who come by it as their proxy.
    """

    answers: list[Any] = field(default_factory=list)
    requests: "queue.Queue[Request]" = field(default_factory=queue.Queue)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    body: bytes = b""
    tls: ssl.SSLContext | None = None

    def next(self, timeout_s: float = 60.0) -> Request:
        """Return the next request; fail if none comes."""
        return self.requests.get(timeout=timeout_s)


def _handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        host = ""

        def do_CONNECT(self) -> None:
            self.host = self.path
            self.send_response(200)
            self.end_headers()
            assert receiver.tls is not None
            self.rfile.close()
            self.connection = receiver.tls.wrap_socket(self.connection, server_side=True)
            self.rfile = self.connection.makefile("rb")
            self.wfile = self.connection.makefile("wb", 0)
            # What follows on this connection is a request to the host.
            self.close_connection = False

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            answer = receiver.answers.pop(0) if receiver.answers else 200
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.requests.put(Request(self.path, headers, body, self.host))
            if callable(answer):
                answer(self)
                return
            status, headers = answer if isinstance(answer, tuple) else (answer, {})
            self.send_response(status)
            size = str(len(receiver.body))
            for name, value in {"Content-Length": size, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(receiver.body)

        def finish(self) -> None:
            super().finish()
            self.connection.close()

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@pytest.fixture
def make_receiver() -> Iterator[Callable[..., Receiver]]:
    """Return a function that starts a receiver, on a port if one is given."""
    servers = []

    def make(*answers: Any, port: int = 0) -> Receiver:
        receiver = Receiver([*answers])
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler_of(receiver))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((receiver, server, thread))
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        return receiver

    yield make
    for receiver, server, thread in servers:
        receiver.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def internet(
    make_receiver: Callable[..., Receiver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Receiver:
    """Return a receiver that programs find at the addresses of Slack, Discord and Teams."""
    from test_tls import Authority

    authority = Authority(tmp_path / "authority")
    hosts = ("hooks.slack.com", "discord.com", "prod-1.westeurope.logic.azure.com")
    files = authority.issue(*hosts)
    receiver = make_receiver()
    receiver.body = b"ok"  # in these words, Slack takes a message
    receiver.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    receiver.tls.load_cert_chain(files["tls_cert"], files["tls_key"])
    for name in ("NO_PROXY", "no_proxy", "https_proxy", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", receiver.url)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.ca_file))
    return receiver


@pytest.fixture
def secret() -> str:
    """Return the secret that receivers check signatures with."""
    return SECRET


@pytest.fixture
def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class MailServer(socketserver.ThreadingTCPServer):
    """Takes mail as RFC 5321 says, as far as a client asks for it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _MailHandler)
        self.mails: queue.Queue[tuple[list[str], bytes]] = queue.Queue()


class _MailHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self._say("220 test")
        recipients: list[str] = []
        while line := self.rfile.readline():
            command = line[:4].upper()
            if command == b"RCPT":
                recipients.append(line.decode().partition(":")[2].strip())
            if command == b"DATA":
                self._say("354 go on")
                lines = iter(self.rfile.readline, b".\r\n")
                server = self.server
                assert isinstance(server, MailServer)
                server.mails.put((recipients, b"".join(lines)))
            self._say("221 bye" if command == b"QUIT" else "250 ok")
            if command == b"QUIT":
                return

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@pytest.fixture
def mail_server() -> Iterator[MailServer]:
    """Return a mail server that runs."""
    with MailServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
