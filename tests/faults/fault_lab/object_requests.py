"""Troubles on the way to a server of objects."""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

# A connection on which nothing comes for so long is given up, on both sides.
_GIVEN_UP_S = 60.0
_LENGTH = re.compile(rb"(?i)content-length: (\d+)")


class FaultyServer:
    """Pass requests on to a server, and do with each what `fault` says.

    A fault gets the request's first line and what may be sent to the client; it returns whether the
    request is passed on.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self.fault: Callable[[str, socket.socket], bool] = lambda _line, _client: True
        self.num_faults = 0
        self._reads_all = True
        # The body of the present request: its length, and what was read of it.
        self._local = threading.local()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Take no further connections."""
        self._over.set()
        # What waits for a connection does not notice that its socket is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def settle(self) -> None:
        """Wait until all requests that have come are answered or given up."""
        for thread in self._threads[1:]:
            thread.join()

    def _start(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def answer(
        self, status: str, code: str, *, said: str = "", when: str = "", times: int = 1_000_000
    ) -> None:
        """Answer requests whose first line has a text by an error, a number of times."""
        message = said or f"{code} here"
        error = f"<Error>\n<Code>{code}</Code>\n<Message>{message}</Message>\n</Error>"
        body = f'\ufeff<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"

        def fault(line: str, client: socket.socket) -> bool:
            if when not in line or self.num_faults >= times:
                return True
            self.num_faults += 1
            client.sendall(head.encode() + body)
            return False

        self.fault = fault

    def hang(self, when: str = "/model") -> None:
        """Never answer requests whose first line has a text."""

        def fault(line: str, client: socket.socket) -> bool:
            if when in line:
                self.num_faults += 1
                self._over.wait()
            return when not in line

        self.fault = fault

    def cut(self, when: str = "/model", fraction: float = 0.3) -> None:
        """Close the connection of requests whose first line has a text, within their body.

        Args:
            when: The text.
            fraction: The part of the body after which it is closed.
        """

        def fault(line: str, client: socket.socket) -> bool:
            if when not in line:
                return True
            self.num_faults += 1
            left = int(fraction * self._local.length) - self._local.num_read
            while left > 0 and (data := client.recv(min(left, 65536))):
                left -= len(data)
            return False

        self.fault, self._reads_all = fault, False

    def stall(self, when: str = "/model") -> None:
        """Read no more of requests whose first line has a text than their beginning."""
        self.hang(when)
        self._reads_all = False

    def delay(self, seconds: float, when: str = "/model") -> None:
        """Pass on requests whose first line has a text later."""

        def fault(line: str, client: socket.socket) -> bool:
            if when in line:
                self.num_faults += 1
                self._over.wait(seconds)
            return True

        self.fault = fault

    def lose_answers(self, when: str = "PUT") -> None:
        """Pass on requests whose first line has a text, but not the first answer to each."""
        seen: set[str] = set()

        def fault(line: str, client: socket.socket) -> bool:
            if when in line and line not in seen:
                seen.add(line)
                self.num_faults += 1
                self._local.is_answer_lost = True
            return True

        self.fault = fault

    def pass_on(self) -> None:
        """Pass on everything."""
        self.fault, self._reads_all = lambda _line, _client: True, True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(_GIVEN_UP_S)
        with suppress(OSError), client:
            data = b""
            length = 0
            while b"\r\n\r\n" not in data or len(data) < length:
                piece = client.recv(65536)
                if not piece:
                    return
                data += piece
                head, _, body = data.partition(b"\r\n\r\n")
                found = _LENGTH.search(head)
                self._local.length = int(found[1]) if found else 0
                self._local.num_read = len(body)
                if self._reads_all:
                    length = len(data) - len(body) + self._local.length
            if not self.fault(data.partition(b"\r\n")[0].decode(), client):
                return
            # One request per connection, so that each can have its fault.
            data = data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
            with socket.create_connection(self._target, _GIVEN_UP_S) as server:
                server.sendall(data)
                if getattr(self._local, "is_answer_lost", False):
                    server.recv(65536)
                    return
                sending = self._start(_copy, client, server)
                _copy(server, client)
                client.shutdown(socket.SHUT_RDWR)
                sending.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
