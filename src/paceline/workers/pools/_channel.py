"""Frames on the sockets between a driver and its workers, and their hosts on other nodes."""

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from paceline.workers.processes._worker_program import EVENT_KIND, HEADER, OUTCOME_KIND


class FrameKind(IntEnum):
    """Type of a frame."""

    # From the driver.
    CALL = 1
    STOP = 2
    # From a worker.
    READY = 3
    BEAT = 4
    VALUE = 5
    ERROR = 6
    # To the host of a worker on another node.
    SIGNAL = 7
    END = 8
    # From it.
    LINE = 9
    STOPPED = 10
    EXIT = 11
    # From a worker to its host, which passes the second one on.
    FORWARD = 12
    ASK = 13
    # The driver's answer to it, the other way.
    ANSWER = 14
    # From a host: what was appended to a file.
    APPEND = 15
    # To a host, and its answer: that what the worker has printed so far was sent.
    DRAIN = 16
    DRAINED = 17
    # From a program, at its end; see `_program.ProgramOutcome`.
    OUTCOME = OUTCOME_KIND
    # From a worker: what it tells of its runs, see `_begun_runs`.
    EVENT = EVENT_KIND
    # Between the launchers of several nodes.
    NODE = 20
    # From a worker that does not reach the driver's memory, and the driver's answer: one segment.
    WANT = 21
    DATA = 22


# Less than this is copied, to be written in one go with its header.
_SMALL_BYTES = 2**16


class ChannelFrame(NamedTuple):
    """One message; `call` is 0 where it belongs to no call."""

    kind: FrameKind
    call: int = 0
    body: bytes | bytearray = b""

    def pieces(self) -> list[bytes | bytearray]:
        """Return what to write, one after the other."""
        header = HEADER.pack(self.kind, self.call, len(self.body))
        return [header + self.body] if len(self.body) < _SMALL_BYTES else [header, self.body]


class _Assembler:
    """Put frames together from what is read, without copying their bodies."""

    def __init__(self, longest_bytes: int | None = None) -> None:
        self._longest_bytes = longest_bytes
        self._header: tuple[int, int] | None = None
        self._begin(HEADER.size)

    def _begin(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._num_filled = 0

    def room(self) -> memoryview:
        """Return where the next bytes go."""
        return memoryview(self._buffer)[self._num_filled :]

    def filled(self, num_bytes: int) -> ChannelFrame | None:
        """Note that so many bytes were read; return the frame that they complete."""
        self._num_filled += num_bytes
        if self._num_filled < len(self._buffer):
            return None
        if self._header is None:
            kind, call, size = HEADER.unpack(self._buffer)
            if self._longest_bytes is not None and size > self._longest_bytes:
                raise ValueError(f"A frame must not be longer than {self._longest_bytes} bytes.")
            self._header = kind, call
            self._begin(size)
            if size:
                return None
        frame = ChannelFrame(FrameKind(self._header[0]), self._header[1], self._buffer)
        self._header = None
        self._begin(HEADER.size)
        return frame


class DriverChannel:
    """The driver's end; never blocks, and is used by one thread.

    Args:
        end: The socket.
        longest_bytes: The longest body that a frame may have; a longer one is a ValueError.
    """

    def __init__(self, end: socket.socket, longest_bytes: int | None = None) -> None:
        end.setblocking(False)
        self._socket = end
        self._assembler = _Assembler(longest_bytes)
        self._outgoing: deque[memoryview] = deque()
        self.is_open = True

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether there is something that could not be written yet."""
        return self.is_open and bool(self._outgoing)

    def send(self, frame: ChannelFrame) -> None:
        """Write a frame, or keep what does not fit for `flush`."""
        self._outgoing.extend(map(memoryview, frame.pieces()))
        self.flush()

    def flush(self) -> None:
        """Write as much as fits."""
        while self.wants_to_write:
            try:
                num_sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError:
                # The worker has ended; its exit tells the rest.
                self._outgoing.clear()
                return
            if num_sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][num_sent:]

    def receive(self) -> Iterator[ChannelFrame]:
        """Yield the frames that are there; `is_open` is false after the worker's end of file."""
        while self.is_open:
            try:
                num_read = self._socket.recv_into(self._assembler.room())
            except BlockingIOError:
                return
            except OSError:
                num_read = 0
            if num_read == 0:
                self.is_open = False
                return
            frame = self._assembler.filled(num_read)
            if frame is not None:
                yield frame

    def close(self) -> None:
        """Close this end."""
        self.is_open = False
        self._outgoing.clear()
        self._socket.close()


class BlockingChannel:
    """An end that blocks. `send` may be called from any thread.

    Args:
        end: The socket.
        longest_bytes: The longest body that a frame may have; a longer one is a ValueError.
    """

    def __init__(self, end: socket.socket, longest_bytes: int | None = None) -> None:
        self._socket = end
        self._socket.set_inheritable(False)
        self._assembler = _Assembler(longest_bytes)
        self._lock = threading.Lock()

    def send(self, frame: ChannelFrame) -> None:
        """Write a frame.

        Raises:
            OSError: The other side has gone.
        """
        with self._lock:
            for piece in frame.pieces():
                self._socket.sendall(piece)

    def receive(self) -> ChannelFrame | None:
        """Wait for a frame and return it, or None if the other side has gone."""
        while True:
            try:
                num_read = self._socket.recv_into(self._assembler.room())
            except OSError:
                return None
            if num_read == 0:
                return None
            frame = self._assembler.filled(num_read)
            if frame is not None:
                return frame

    def close(self) -> None:
        """Close this end; a thread that waits in `receive` gets None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WorkerChannel(BlockingChannel):
    """A worker's end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(socket.socket(fileno=descriptor))
        # What the worker forks must neither write here nor hold the connection open.
        os.register_at_fork(after_in_child=self._socket.close)
