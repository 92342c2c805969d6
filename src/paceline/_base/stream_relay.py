"""Relay between a socket here and a stream that a master passes on."""

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024


class StreamGoneError(Exception):
    """Raised when the other side has closed a stream, or the master knows it no more."""


class FarStream(ABC):
    """Other side of a stream, as this side's requests see it; reads and writes have a thread each.

    The other methods say what is missing in place of bytes, so that none are lost or doubled.
    """

    @abstractmethod
    def read(self, offset: int) -> bytes | None:
        """Return bytes from an offset on, none if there are none yet; None at the end.

        Raises:
            StreamGoneError: There is no such stream any more.
        """

    @abstractmethod
    def write(self, offset: int, data: bytes, *, is_end: bool) -> int:
        """Send bytes, and return how many were taken altogether, those before included.

        Raises:
            StreamGoneError: There is no such stream any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the stream for the other side, too; errors are of no interest."""


def relay(
    near: socket.socket, far: FarStream, on_bytes: Callable[[], object] = lambda: None
) -> None:
    """Pass bytes on in both directions until both have ended, or one fails.

    A side that reads slowly is sent no more than the buffers between hold.

    Args:
        near: The connection here, which is closed then.
        far: The stream.
        on_bytes: Called for each piece.
    """
    reader = threading.Thread(target=_pull, args=(near, far, on_bytes), daemon=True)
    reader.start()
    try:
        _push(near, far, on_bytes)
        reader.join()
    finally:
        far.close()
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
        near.close()


def _push(near: socket.socket, far: FarStream, on_bytes: Callable[[], object]) -> None:
    offset = 0
    try:
        is_end = False
        while not is_end:
            data = near.recv(_READ_BYTES)
            is_end, wanted = not data, offset + len(data)
            while True:
                taken = far.write(offset, data[len(data) - (wanted - offset) :], is_end=is_end)
                offset = taken
                if offset >= wanted:
                    break
            on_bytes()
    except (OSError, StreamGoneError) as error:
        logger.debug("A stream ends: %s", error)
        # The other direction has nobody to read for.
        far.close()
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)


def _pull(near: socket.socket, far: FarStream, on_bytes: Callable[[], object]) -> None:
    offset = 0
    try:
        while (data := far.read(offset)) is not None:
            if data:
                on_bytes()
                near.sendall(data)
                offset += len(data)
        near.shutdown(socket.SHUT_WR)
    except (OSError, StreamGoneError) as error:
        logger.debug("A stream ends: %s", error)
        far.close()
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
