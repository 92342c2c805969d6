"""A worker's host between it and its driver: requests and answers, and files that grow."""

import os
import pickle
import shutil
import threading
from contextlib import suppress
from queue import SimpleQueue
from socket import socket

from paceline.workers.pools._channel import BlockingChannel, ChannelFrame, FrameKind
from paceline.workers.remote._driver_link import Forwarding

# How often files are looked at.
_LOOK_INTERVAL_S = 0.01
_CHUNK_BYTES = 1024 * 1024
# What the last that a dead worker has sent takes to be read.
_READ_S = 1.0


class Forwarder:
    """Pass on what a worker asks, and what it appends to files.

    Args:
        end: The host's end of the socket to the worker.
        channel: The host's channel to the driver.
    """

    def __init__(self, end: socket, channel: BlockingChannel) -> None:
        self._link = BlockingChannel(end)
        self._channel = channel
        self._lock = threading.Lock()
        self._forwardings: list[Forwarding] = []
        self._offsets: dict[str, int] = {}
        self._is_over = threading.Event()
        self._answers: SimpleQueue[ChannelFrame | None] = SimpleQueue()
        self._relay = threading.Thread(target=self._pass_on, name="paceline-relay", daemon=True)
        self._answering = threading.Thread(
            target=self._give_answers, name="paceline-answer", daemon=True
        )
        self._pump: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen to the worker."""
        self._relay.start()
        self._answering.start()

    def answer(self, frame: ChannelFrame) -> None:
        """Give the worker an answer of the driver's, without waiting until it reads that."""
        self._answers.put(frame)

    def finish(self) -> None:
        """Send the rest of what a worker has left that has ended."""
        self._relay.join(_READ_S)
        self._is_over.set()
        self._answers.put(None)
        self._link.close()
        self._answering.join()
        if self._pump is not None:
            self._pump.join()
        self._send_news()
        for forwarding in self._forwardings:
            shutil.rmtree(forwarding.root, ignore_errors=True)

    def _pass_on(self) -> None:
        while (frame := self._link.receive()) is not None:
            if frame.kind is FrameKind.ASK:
                # What was written before the request arrives before it.
                self._send_news()
                with suppress(OSError):
                    self._channel.send(frame)
            elif frame.kind is FrameKind.FORWARD:
                with self._lock:
                    # The host unpickles what its own worker has written.
                    self._forwardings.append(pickle.loads(frame.body))  # noqa: S301
                if self._pump is None:
                    self._pump = threading.Thread(
                        target=self._look, name="paceline-forward", daemon=True
                    )
                    self._pump.start()

    def _give_answers(self) -> None:
        while (frame := self._answers.get()) is not None:
            with suppress(OSError):
                self._link.send(frame)

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_INTERVAL_S):
            self._send_news()

    def _send_news(self) -> None:
        """Send what was appended since the last time."""
        with self._lock, suppress(OSError):
            for forwarding in list(self._forwardings):
                try:
                    names = sorted(os.listdir(forwarding.source))
                except FileNotFoundError:
                    if not os.path.isdir(forwarding.root):
                        self._forwardings.remove(forwarding)
                    continue
                for name in names:
                    self._send_file(forwarding, name)

    def _send_file(self, forwarding: Forwarding, name: str) -> None:
        source = os.path.join(forwarding.source, name)
        offset = self._offsets.get(source, 0)
        if os.stat(source).st_size <= offset:
            return
        with open(source, "rb") as file:
            file.seek(offset)
            while data := file.read(_CHUNK_BYTES):
                target = os.path.join(forwarding.target, name)
                self._channel.send(
                    ChannelFrame(FrameKind.APPEND, body=pickle.dumps((target, offset, data)))
                )
                offset += len(data)
                self._offsets[source] = offset
