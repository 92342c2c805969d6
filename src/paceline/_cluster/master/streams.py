"""Bytes between users and their interactive tasks: bounded pipes in memory, for the event loop."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.messages.runner_messages import MAX_STREAM_BYTES

# Both sides ask more often while they are there.
SILENT_S = 90.0
STREAMS_PER_TASK = 64
_STREAMS_PER_USER = 128
_STREAMS = 512
TO_TASK, TO_USER = 0, 1


class StreamOverError(Exception):
    """Raised when a stream has ended, or was forgotten by a master that was started again."""


class _Changes:
    """Wakes those who wait for a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def note(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, until: float) -> bool:
        """Wait for the next change; False once the monotonic clock shows `until`."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), until - time.monotonic())
            return True
        return False


class Pipe:
    """Bytes of one direction; the receiver acknowledges them by its next question.

    A piece may be sent or asked for again, as after a broken connection.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        # Number of bytes acknowledged, so the place of the first byte of `_data`.
        self._start = 0
        self._is_ended = False
        self._changes = _Changes()

    @property
    def num_taken(self) -> int:
        """How many bytes the sender need not send again."""
        return self._start + len(self._data)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and all bytes were read."""
        return self._is_ended and not self._data

    def end(self) -> None:
        """Take no more bytes; those that are there can still be read."""
        self._is_ended = True
        self._changes.note()

    async def write(self, offset: int, data: bytes, wait_s: float) -> int:
        """Take bytes at an offset once there is room, and return how many were taken altogether.

        Raises:
            StreamOverError: It has ended.
            RefusedError: Bytes before the offset are missing.
        """
        until = time.monotonic() + wait_s
        while len(self._data) >= MAX_STREAM_BYTES and not self._is_ended:
            if not await self._changes.wait(until):
                return self.num_taken
        if self._is_ended:
            raise StreamOverError
        if offset > self.num_taken:
            raise RefusedError(
                "bytes_missing",
                f"`offset` must be at most {self.num_taken}, the bytes taken so far, but got"
                f" {offset}.",
            )
        if fresh := data[self.num_taken - offset :]:
            self._data += fresh
            self._changes.note()
        return self.num_taken

    async def read(self, offset: int, wait_s: float) -> bytes:
        """Return bytes from an offset on, none if there are none in time; those before are dropped.

        Raises:
            StreamOverError: All was read, and it has ended.
            RefusedError: Those bytes were dropped before, or are not there yet.
        """
        if not self._start <= offset <= self.num_taken:
            raise RefusedError(
                "bytes_missing",
                f"`offset` must be from {self._start} to {self.num_taken}, but got {offset}.",
            )
        if offset > self._start:
            del self._data[: offset - self._start]
            self._start = offset
            self._changes.note()
        until = time.monotonic() + wait_s
        while not self._data and not self._is_ended:
            if not await self._changes.wait(until):
                return b""
        if not self._data:
            raise StreamOverError
        return bytes(self._data)


@dataclass(slots=True)
class Stream:
    """A connection to an interactive task: a pipe in each direction."""

    experiment_id: int
    attempt_id: int
    user: str
    pipes: tuple[Pipe, Pipe] = field(default_factory=lambda: (Pipe(), Pipe()))
    # When user and task last asked for something, by the monotonic clock.
    asked_at: list[float] = field(default_factory=lambda: [time.monotonic()] * 2)

    def end(self) -> None:
        """End both directions."""
        for pipe in self.pipes:
            pipe.end()


@dataclass(slots=True)
class _Task:
    """Interactive task whose runner asks for streams."""

    link: str = ""
    is_ready: bool = False
    version: int = 0
    asked_at: float = 0.0
    changes: _Changes = field(default_factory=_Changes)


class Streams:
    """All streams of a master; for its event loop. They end with it, and clients open new ones."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Task] = {}
        self._streams: dict[str, Stream] = {}
        self._is_closed = False

    async def poll(
        self, attempt_id: int, link: str, *, is_ready: bool, after: int, wait_s: float
    ) -> tuple[int, list[str]]:
        """Return version and names of a task's streams for its runner; waits for another version.

        Args:
            attempt_id: The attempt.
            link: The path that opens the task, with its secret.
            is_ready: Whether the task listens.
            after: The version that the runner knows.
            wait_s: How long to wait.
        """
        self._sweep()
        task = self._tasks.setdefault(attempt_id, _Task())
        task.asked_at = time.monotonic()
        if (task.link, task.is_ready) != (link, is_ready):
            task.link, task.is_ready = link, is_ready
            task.changes.note()
        until = time.monotonic() + wait_s
        while task.version == after and not self._is_closed:
            if not await task.changes.wait(until):
                break
        task.asked_at = time.monotonic()
        names = [name for name, one in self._streams.items() if one.attempt_id == attempt_id]
        return task.version, names

    async def link(self, attempt_id: int, wait_s: float) -> str | None:
        """Return the path that opens a task; None if the task does not listen in time."""
        task = self._tasks.setdefault(attempt_id, _Task(asked_at=time.monotonic()))
        until = time.monotonic() + wait_s
        while not task.is_ready and not self._is_closed:
            if not await task.changes.wait(until):
                return None
        return task.link if task.is_ready else None

    def opened(self, name: str, experiment_id: int, attempt_id: int, user: str) -> Stream:
        """Return a new stream.

        Raises:
            RefusedError: There are too many.
        """
        self._sweep()
        for what, most, number in (
            ("the task", STREAMS_PER_TASK, self._number(attempt_id=attempt_id)),
            ("the user", _STREAMS_PER_USER, self._number(user=user)),
            ("the master", _STREAMS, len(self._streams)),
        ):
            if number >= most:
                raise RefusedError(
                    "too_many_streams",
                    f"The open connections of {what} to interactive tasks must be at most {most}."
                    " Hint: close pages, or end another `paceline open`.",
                )
        self._streams[name] = stream = Stream(experiment_id, attempt_id, user)
        self._note_streams(attempt_id)
        return stream

    def find(self, name: str) -> Stream | None:
        """Return a stream that is known, None otherwise."""
        return self._streams.get(name)

    def drop(self, name: str) -> None:
        """End a stream and forget it."""
        if (stream := self._streams.pop(name, None)) is not None:
            stream.end()
            self._note_streams(stream.attempt_id)

    def close(self) -> None:
        """End all streams, so that nobody waits any more."""
        self._is_closed = True
        for name in [*self._streams]:
            self.drop(name)
        for task in self._tasks.values():
            task.changes.note()

    def _number(self, *, attempt_id: int | None = None, user: str | None = None) -> int:
        return sum(
            attempt_id in (None, one.attempt_id) and user in (None, one.user)
            for one in self._streams.values()
        )

    def _note_streams(self, attempt_id: int) -> None:
        task = self._tasks.setdefault(attempt_id, _Task(asked_at=time.monotonic()))
        task.version += 1
        task.changes.note()

    def _sweep(self) -> None:
        """Forget streams that a side has left without a word, and tasks without a runner."""
        oldest = time.monotonic() - SILENT_S
        for name in [name for name, one in self._streams.items() if min(one.asked_at) < oldest]:
            self.drop(name)
        held = {one.attempt_id for one in self._streams.values()}
        for attempt_id in [key for key, one in self._tasks.items() if one.asked_at < oldest]:
            if attempt_id not in held:
                del self._tasks[attempt_id]
