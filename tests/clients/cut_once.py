"""A way to a server that breaks once, in the middle of what a client sends."""

import socket
import threading
from contextlib import suppress


class CutOnce:
    """Passes bytes to a server on this machine; the first connection that sends many is cut.

    Args:
        port: The server's.
        num_bytes: How many it sends before.
    """

    def __init__(self, port: int, num_bytes: int) -> None:
        self.is_cut = False
        self._port = port
        self._num_bytes = num_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            back = threading.Thread(target=self._pass, args=[server, client], daemon=True)
            back.start()
            self._pass(client, server, limit=self._num_bytes)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, limit: int | None = None) -> None:
        num_sent = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                num_sent += len(data)
                if limit is not None and num_sent > limit and not self.is_cut:
                    self.is_cut = True
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "CutOnce":
        return self

    def __exit__(self, *_: object) -> None:
        # It wakes the thread that waits for a connection.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
