"""Messages between a driver and its fork server: JSON with file descriptors."""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
# The three standard streams, the leash, and what a worker gets besides.
_MOST_DESCRIPTORS = 16


def send_message(
    end: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send a message.

    Raises:
        OSError: The other side has gone.
    """
    body = json.dumps(content).encode()
    socket.send_fds(end, [_LENGTH.pack(len(body))], list(descriptors))
    end.sendall(body)


def receive_message(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message and the descriptors that come with it; None if the other side has gone.

    Raises:
        TimeoutError: The socket has a timeout, and it passed.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(
            end, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not header:
            return None
        header += _receive_all(end, _LENGTH.size - len(header))
        body = _receive_all(end, _LENGTH.unpack(header)[0])
    except TimeoutError:
        raise
    except OSError:
        return None
    return json.loads(body), descriptors


def _receive_all(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("The other side has gone in the middle of a message.")
        data += piece
    return bytes(data)
