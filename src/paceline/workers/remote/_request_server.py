"""The driver's side of what workers on other nodes ask, and of the files that they forward."""

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from paceline.workers.pools._channel import BlockingChannel, ChannelFrame, FrameKind
from paceline.workers.remote._driver_link import answer_of

logger = logging.getLogger(__name__)

# How long forwarded records wait for space on a full disk until they count as lost.
_FULL_DISK_S = 5.0
_RETRY_S = 0.2


class RequestHandler(Protocol):
    """Handler of one worker's requests; each other method serves one kind of request."""

    def close(self) -> None:
        """Give up what the worker has begun and not finished."""


MakeHandler = Callable[[], RequestHandler]


class RequestServer:
    """Deal with the frames of one worker's host.

    Args:
        make_handler: Makes what answers the worker, in one thread; it is closed at the end.
        channel: Leads to the host.
    """

    def __init__(self, make_handler: MakeHandler, channel: BlockingChannel) -> None:
        self._make_handler = make_handler
        self._channel = channel
        self._requests: SimpleQueue[ChannelFrame | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_disk_full = False

    def take(self, frame: ChannelFrame) -> None:
        """Write what was forwarded, or have a request answered; called by one thread."""
        if frame.kind is FrameKind.APPEND:
            self._append(*pickle.loads(frame.body))  # noqa: S301 - written by our own host
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._answer, name="paceline-requests", daemon=True
            )
            self._thread.start()
        self._requests.put(frame)

    def hurry(self) -> None:
        """Wait for space on a full disk no more."""
        self._is_closing = True

    def close(self) -> None:
        """Answer no more, and give up what the worker has begun."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join()

    def _answer(self) -> None:
        handler = self._make_handler()
        try:
            while (frame := self._requests.get()) is not None:
                answer = answer_of(handler, frame.body)
                # A worker that has gone needs none.
                with suppress(OSError):
                    self._channel.send(ChannelFrame(FrameKind.ANSWER, body=answer))
        finally:
            handler.close()

    def _append(self, path: str, offset: int, data: bytes) -> None:
        """Write to a file, after a wait if the disk is full; what comes later goes on after it."""
        give_up_at = time.monotonic() + (0.0 if self._is_disk_full else _FULL_DISK_S)
        while True:
            try:
                _write_at(path, offset, data)
            except OSError as error:
                self._is_disk_full = True
                if time.monotonic() < give_up_at and not self._is_closing:
                    time.sleep(_RETRY_S)
                    continue
                logger.error("Forwarded records for %s are lost: %s.", path, error.strerror)
            else:
                self._is_disk_full = False
            return


def _write_at(path: str, offset: int, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            num_written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[num_written:], offset + num_written
    finally:
        os.close(descriptor)
