"""A second process that answers reads of the database while many wait for the first one."""

import asyncio
import functools
import hashlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline

logger = logging.getLogger(__name__)

# After so long without a read it ends.
_IDLE_S = 60.0
# How long it may take to load what it needs, on a busy machine.
_START_S = 120.0
# One that answers nothing for so long is ended, and what it was asked is answered here.
_LATE_S = 20.0
_LOOK_S = 5.0
# After one that failed, none is started for a while.
_PAUSE_S = 10.0
_LENGTH_BYTES = 4
READY = b"r"
# With the modules of this process, wherever it was started.
_PROGRAM = """
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from paceline.master.api._reading_program import main
main()
"""


@functools.cache
def state_of_sources() -> str:
    """Return what tells apart two states of the installed package, as at the first call.

    A package that is replaced while the master runs would have the second process another version.
    """
    root = Path(paceline.__file__).parent
    found = sorted(
        (str(path.relative_to(root)), path.stat().st_mtime_ns) for path in root.rglob("*.py")
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


class NotAnsweredError(Exception):
    """Raised when the second process has not answered: the first one has to."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, and how long it took to make."""

    body: bytes
    media_type: str | None
    seconds: float


def packed(value: object) -> bytes:
    """Return a message to the other process: its length and its content."""
    content = pickle.dumps(value)
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def length_of(head: bytes) -> int:
    """Return how many bytes follow the first ones of a message."""
    return int.from_bytes(head, "big")


class ReadingProcess:
    """The second process, as the event loop of the first one sees it.

    Python runs one thread at a time, so one process answers with one core. The second one answers
    its questions one after the other. It has a socket to this process, whose end is its own.

    Args:
        database_path: The database, which this process has open.
        on_ready: Called once it can be asked.
    """

    def __init__(self, database_path: Path, on_ready: Callable[[], object]) -> None:
        self._database_path = database_path
        self._on_ready = on_ready
        # Beside the start of the server, which it would delay.
        asyncio.get_running_loop().run_in_executor(None, state_of_sources)
        # What waits for an answer, and since when; and since when nothing did.
        self._asked: deque[tuple[asyncio.Future[Answer | None], float]] = deque()
        self._answered_at = 0.0
        self._is_closed = False
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked."""
        return self._writer is not None

    def is_late(self, seconds: float) -> bool:
        """Tell whether it was asked so long ago and has answered nothing since."""
        return bool(self._asked) and time.monotonic() >= self._waits_since() + seconds

    def start(self) -> None:
        """Start it, unless it runs or has failed a moment ago."""
        can_start = time.monotonic() > self._not_before and not self._is_closed
        if self._task is None and can_start:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def answer(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Answer:
        """Return what a function of a route returns in the second process.

        Args:
            endpoint: The function, which is found there by its module and its name.
            arguments: Its arguments besides the `StoredRecords`.

        Raises:
            NotAnsweredError: It failed, or the process has ended.
        """
        if self._writer is None:
            raise NotAnsweredError
        question = packed((endpoint, arguments))
        future = asyncio.get_running_loop().create_future()
        self._asked.append((future, time.monotonic()))
        self._writer.write(question)
        found: Answer | None = await future
        if found is None:
            raise NotAnsweredError
        return found

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._end()

    async def _run(self) -> None:
        try:
            logger.info("Many reads wait: a second process answers some of them.")
            ours = await asyncio.to_thread(self._start)
            reader, writer = await asyncio.open_connection(sock=ours)
            with closing(writer):
                await asyncio.wait_for(reader.readexactly(len(READY)), _START_S)
                self._writer, self._answered_at = writer, time.monotonic()
                self._on_ready()
                await self._take_answers(reader)
        except Exception as error:
            self._not_before = time.monotonic() + _PAUSE_S
            reason = str(error) or type(error).__name__
            logger.warning("The second process for reads does not answer and is ended: %s", reason)
        finally:
            self._end()
            self._task = None

    async def _take_answers(self, reader: asyncio.StreamReader) -> None:
        while (head := await self._next_head(reader)) is not None:
            content = await asyncio.wait_for(reader.readexactly(length_of(head)), _LATE_S)
            answer = pickle.loads(content)  # noqa: S301 - our own process
            asked, _ = self._asked.popleft()
            self._answered_at = time.monotonic()
            # Whoever asked may have gone.
            if not asked.done():
                asked.set_result(answer)

    async def _next_head(self, reader: asyncio.StreamReader) -> bytes | None:
        """Return the beginning of the next answer, None once nobody has asked for a while."""
        while True:
            try:
                return await asyncio.wait_for(reader.readexactly(_LENGTH_BYTES), _LOOK_S)
            except asyncio.TimeoutError:
                now = time.monotonic()
                if not self._asked and now > self._answered_at + _IDLE_S:
                    return None
                if self.is_late(_LATE_S):
                    raise

    def _waits_since(self) -> float:
        _, asked_at = self._asked[0]
        return max(asked_at, self._answered_at)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _PROGRAM, os.pathsep.join(sys.path)),
                    *(str(theirs.fileno()), str(self._database_path), state_of_sources()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            if not self._is_closed:
                undo.pop_all()
        return ours

    def _end(self) -> None:
        """End the process, and let those who wait for it know."""
        self._writer = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None
        while self._asked:
            asked, _ = self._asked.popleft()
            if not asked.done():
                asked.set_result(None)
