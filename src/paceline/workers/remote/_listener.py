"""Sockets between a driver and processes on other nodes that share a key with it.

Both sides prove that they know the key before anything else is read, as what follows is unpickled.
Nothing is encrypted: like the traffic of the workers among each other it needs a network that is
one's own.
"""

import hmac
import secrets
import socket
from contextlib import suppress
from typing import NamedTuple

_NONCE_BYTES = 32
_DIGEST_BYTES = 32
_HANDSHAKE_S = 10.0


class ListenerAddress(NamedTuple):
    """Address of a driver."""

    host: str
    port: int


class Listener:
    """Socket on which a driver accepts connections.

    Args:
        host: The address of this node on which to listen.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.key = secrets.token_bytes(_NONCE_BYTES)
        self.address = ListenerAddress(host, self._listener.getsockname()[1])

    def accept(self, timeout_s: float) -> tuple[str, socket.socket] | None:
        """Return the next process that connects, and the name that it gives; None after a time.

        One that does not know the key is turned away.
        """
        self._listener.settimeout(timeout_s)
        try:
            end, _ = self._listener.accept()
        except TimeoutError:
            return None
        try:
            name = _admit(end, self.key)
        except (OSError, ValueError):
            end.close()
            return None
        return name, _prepared_socket(end)

    def close(self) -> None:
        """Listen no more; connections stay."""
        self._listener.close()


def join_listener(address: ListenerAddress, key: bytes, name: str) -> socket.socket:
    """Connect to a driver's listener under a name.

    Raises:
        ConnectionError: The driver is not reached, or does not know the key.
    """
    try:
        end = socket.create_connection(address, timeout=_HANDSHAKE_S)
    except OSError as error:
        raise ConnectionError(
            f"The driver must be reachable at {address.host}:{address.port} from"
            f" {socket.gethostname()}, but is not: {error}. Hint: no firewall may be between the"
            " nodes."
        ) from None
    try:
        theirs = _read_from_peer(end, _NONCE_BYTES)
        ours, encoded = secrets.token_bytes(_NONCE_BYTES), name.encode()
        proof = _proof(key, b"worker", theirs, ours, encoded)
        end.sendall(ours + bytes([len(encoded)]) + encoded + proof)
        if not hmac.compare_digest(
            _read_from_peer(end, _DIGEST_BYTES), _proof(key, b"driver", ours, theirs)
        ):
            raise ConnectionError(f"What listens at {address} is not this worker's driver.")
    except BaseException:
        end.close()
        raise
    return _prepared_socket(end)


def _admit(end: socket.socket, key: bytes) -> str:
    end.settimeout(_HANDSHAKE_S)
    ours = secrets.token_bytes(_NONCE_BYTES)
    end.sendall(ours)
    theirs = _read_from_peer(end, _NONCE_BYTES)
    name = _read_from_peer(end, _read_from_peer(end, 1)[0])
    proof = _read_from_peer(end, _DIGEST_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"worker", ours, theirs, name)):
        raise ValueError("The key must be known.")
    end.sendall(_proof(key, b"driver", theirs, ours))
    return name.decode()


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _read_from_peer(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionError("The connection was closed too early.")
        data += more
    return data


def _prepared_socket(end: socket.socket) -> socket.socket:
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A node that is gone says nothing: let the system find out within a minute.
    with suppress(AttributeError):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return end
