"""Wait for a process that is about to listen."""

import socket
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
