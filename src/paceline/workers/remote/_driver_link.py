"""Client of the driver for workers on other nodes: sends requests and files.

Both go through the host, the process that started the worker. The host outlives the worker, so the
files of a killed worker still arrive.
"""

import pickle
import threading
from pathlib import Path
from typing import Any, NamedTuple

from paceline.workers.pools._channel import BlockingChannel, ChannelFrame, FrameKind
from paceline.workers.pools._pickling import dump_error, load_error


class Forwarding(NamedTuple):
    """Requests and files that a host forwards.

    Attributes:
        root: The directory that is removed when the worker has ended.
        source: A directory in it, to whose files the worker appends.
        target: The driver's directory that gets the same files.
    """

    root: str
    source: str
    target: str


class DriverLink:
    """A worker's requests to its driver, one at a time; may be used from any thread.

    Args:
        channel: Leads to the worker's host.
    """

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def forward(self, root: Path, source: Path, target: Path) -> None:
        """Have what is appended to files of a directory appended to the driver's, from now on.

        Whatever was appended before a request has arrived when that is answered.

        Args:
            root: The directory that is removed after this process, if it still exists then.
            source: A directory in it. Its files only grow, those before the last by name not even
                that. When it is removed its forwarding ends.
            target: The driver's directory.
        """
        self._channel.send(
            ChannelFrame(
                FrameKind.FORWARD,
                body=pickle.dumps(Forwarding(str(root), str(source), str(target))),
            )
        )

    def ask(self, name: str, *args: Any) -> Any:
        """Call a method of the driver's request handler, and return what it returned.

        Args:
            name: A method of the handler that the pool was given.
            args: What the method is given.

        Raises:
            ConnectionError: The driver has gone.
            Exception: What the method raised.
        """
        with self._lock:
            self._channel.send(ChannelFrame(FrameKind.ASK, body=pickle.dumps((name, args))))
            answer = self._channel.receive()
        if answer is None:
            raise ConnectionError(f"The driver must answer {name!r}, but has gone.")
        value, error, text = pickle.loads(answer.body)  # noqa: S301 - written by our own driver
        if text is not None:
            raise load_error(error) or RuntimeError(text)
        return value


def answer_of(handler: object, request: bytes | bytearray) -> bytes:
    """Return the answer of a driver's handler to what a worker has asked."""
    try:
        name, args = pickle.loads(request)  # noqa: S301 - written by this driver's own worker
        return pickle.dumps((getattr(handler, name)(*args), b"", None))
    except Exception as error:
        return pickle.dumps((None, dump_error(error), f"{type(error).__name__}: {error}"))


_links: list[DriverLink] = []


def open_driver_link(channel: BlockingChannel) -> None:
    """Note how this process reaches its driver."""
    _links.append(DriverLink(channel))


def driver_link() -> DriverLink | None:
    """Return how this process reaches its driver, or None if that is on the same machine."""
    return _links[-1] if _links else None
