"""Ports: one that is free, and a process that is about to listen on one."""

import socket
import sys
import time

_LOOK_INTERVAL_S = 0.01


def await_listener(host: str, port: int, timeout_s: float) -> OSError | None:
    """Wait until a process listens at an address; return why none could be reached in time.

    torch waits for a store itself, but looks twice a second at most, and prints pages of native
    stack traces while it does.

    Args:
        host: The address.
        port: The port.
        timeout_s: For how long to wait, in seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(timeout_s, 0.1)).close()
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return error
            time.sleep(_LOOK_INTERVAL_S)


class PortReservation:
    """Hold a free port until rank 0 listens on it.

    On Linux the port stays bound (without listening) for the life of the reservation: no other
    process is given it, while rank 0, whose store allows address reuse, can listen on it. Elsewhere
    the port is only known to have been free.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        if sys.platform == "linux":
            # Set after the bind, so that the port was really free at that moment.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            self._socket.close()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> "PortReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
