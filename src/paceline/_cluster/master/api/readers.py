"""Who answers reads: threads and a second process with its program."""

import asyncio
import functools
import gc
import hashlib
import inspect
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from io import BufferedRWPair
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastapi import Request, Response
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute
from pydantic_core import to_json

import paceline
from paceline._cluster.master.api.requests_and_answers import records_parameter
from paceline._cluster.master.store.api_models_from_rows import EncodingCache
from paceline._cluster.master.store.database import DatabaseReader
from paceline._cluster.master.store.experiment_list import NameCache
from paceline._cluster.master.store.reach import Reach, acting, current_reach

logger = logging.getLogger(__name__)

# After so long without a read it ends.
_IDLE_S = 60.0
# Limit for loading its modules on a busy machine.
_START_S = 120.0
# Limit for an unresponsive process: it is ended, and its questions are answered here.
_LATE_S = 20.0
_LOOK_S = 5.0
# After one that failed, none is started for a while.
_PAUSE_S = 10.0
_LENGTH_BYTES = 4
READY = b"r"
# Program of the second process, with this process's module path from any directory.
_PROGRAM = """
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from paceline._cluster.master.api.readers import main
main()
"""


@functools.cache
def source_state() -> str:
    """Return a digest of the installed package's state at the time of the first call.

    After an upgrade of the package under a running master, the versions would differ.
    """
    root = Path(paceline.__file__).parent
    found = sorted(
        (str(path.relative_to(root)), path.stat().st_mtime_ns) for path in root.rglob("*.py")
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


class NotAnsweredError(Exception):
    """Raised when the second process gave no answer, so the first process has to."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Body of an answer, and the time taken to make the body."""

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
    """Handle of the second process for the event loop of the first.

    Python runs one thread at a time, so one process answers with one core. The second process
    answers its questions one after the other, over a socket, and ends with this process.

    Args:
        database_path: The database, which this process has open.
        on_ready: Called once it can be asked.
    """

    def __init__(self, database_path: Path, on_ready: Callable[[], object]) -> None:
        self._database_path = database_path
        self._on_ready = on_ready
        # Beside the start of the server, which it would delay.
        asyncio.get_running_loop().run_in_executor(None, source_state)
        # Pending questions with their times; `_answered_at` is the time of the last answer.
        self._asked: deque[tuple[asyncio.Future[Answer | None], float]] = deque()
        self._answered_at = 0.0
        self._is_closed = False
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the second process can take questions."""
        return self._writer is not None

    def is_late(self, seconds: float) -> bool:
        """Return whether questions have been pending for `seconds` without any answer."""
        return bool(self._asked) and time.monotonic() >= self._waits_since() + seconds

    def start(self) -> None:
        """Start the process, unless running or failed a moment ago."""
        can_start = time.monotonic() > self._not_before and not self._is_closed
        if self._task is None and can_start:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def answer(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Answer:
        """Return the answer of a route's function from the second process.

        Args:
            endpoint: The function, which is found there by its module and its name.
            arguments: Its arguments besides the `StoredRecords`.

        Raises:
            NotAnsweredError: It failed, or the process has ended.
        """
        if self._writer is None:
            raise NotAnsweredError
        question = packed((endpoint, arguments, current_reach()))
        future = asyncio.get_running_loop().create_future()
        # Order of questions: answers are matched by position, so no await may come before `write`.
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
                    *(str(theirs.fileno()), str(self._database_path), source_state()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            # Socket kept only if still wanted: `close` may have been called during the start.
            if not self._is_closed:
                undo.pop_all()
        return ours

    def _end(self) -> None:
        """End the process, and wake the callers waiting for answers."""
        self._writer = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None
        while self._asked:
            asked, _ = self._asked.popleft()
            if not asked.done():
                asked.set_result(None)


# Threads that answer beside the one for quick reads: the threads of slow reads, which use the
# processor less than the database and files, and FastAPI's for requests that are no reads.
NUM_THREADS = 8
_NUM_SLOW = 3
# A route that took so long once is a slow one for a while, in seconds.
_SLOW_S = 0.1
_SLOW_FOR_S = 60.0
# Number of waiting quick reads at which the second process starts and takes reads, unless it
# has answered nothing for `_PATIENCE_S` seconds.
_MANY = 4
_PATIENCE_S = 1.0
# How many quick reads are given to the thread, and to the second process: so many that it has the
# next one at once, however long the event loop takes to hear of an answer.
_HERE = 1
# How many reads of the thread may turn out to be slow while they run: others take their turns.
_MAX_OVERDUE = 4
_THERE = 8
_JSON = "application/json"
T = TypeVar("T")


class _Waiting(NamedTuple):
    """Waiting read; its turn resolves to True for the second process, False for the thread."""

    turn: "asyncio.Future[bool]"
    can_leave: bool


class ReadingThreads:
    """Threads answering reads: for quick routes, of which one runs at a time, and for slow routes.

    Python runs one thread at a time. Two busy threads and the event loop take turns, so all
    answers come later. But quick reads must not wait for slow ones.
    """

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(_HERE + _MAX_OVERDUE, thread_name_prefix="paceline-reader")
        self._slow = ThreadPoolExecutor(_NUM_SLOW, thread_name_prefix="paceline-slow-reader")
        self._slow_until: dict[object, float] = {}

    async def answer(self, route: object, make: Callable[[], T]) -> T:
        """Return a function's result for a route, computed in a thread for quick reads.

        Args:
            route: The route, whose reads take alike long.
            make: The function.
        """
        loop, run = asyncio.get_running_loop(), copy_context().run
        return await loop.run_in_executor(self._quick, run, self._timed, route, make)

    async def answer_slow(self, route: object, make: Callable[[], T]) -> T:
        """Return a function's result, computed in a thread for slow routes."""
        loop, run = asyncio.get_running_loop(), copy_context().run
        return await loop.run_in_executor(self._slow, run, self._timed, route, make)

    def is_slow(self, route: object) -> bool:
        """Return whether a read of a route took long lately."""
        return time.monotonic() < self._slow_until.get(route, 0.0)

    def note(self, route: object, seconds: float) -> None:
        """Note how long a read of a route took."""
        if seconds > _SLOW_S:
            self._slow_until[route] = time.monotonic() + _SLOW_FOR_S

    def _timed(self, route: object, make: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return make()
        finally:
            self.note(route, time.monotonic() - began)

    def close(self) -> None:
        """Cancel all waiting reads."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)


class Readers:
    """Where reads are answered: by threads, and by a second process while many wait for them.

    Quick reads wait in one line. The second process gets the reads that it can answer, some at a
    time. The thread takes the other reads, and all of them while few wait: it shares Python's lock
    with the event loop, which every answer needs.

    Args:
        database_path: The database.
        num_cores: How many cores this process may use.
    """

    def __init__(self, database_path: Path, num_cores: int) -> None:
        self._threads = ReadingThreads()
        self._process = ReadingProcess(database_path, self._give_turns) if num_cores > 1 else None
        self._waiting: deque[_Waiting] = deque()
        self._num_here = 0
        self._num_overdue = 0
        self._num_there = 0

    async def answer(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Response:
        """Return the result of a route's function as a response."""
        threads, name = self._threads, records_parameter(endpoint)

        def make() -> Response:
            return response_of(endpoint(**arguments))

        can_leave = name is not None and self._process is not None
        while not threads.is_slow(endpoint):
            async with self._turn(can_leave=can_leave) as leaves:
                if threads.is_slow(endpoint):
                    break  # found out meanwhile
                if not leaves:
                    return await threads.answer(endpoint, make)
                assert self._process is not None
                others = {key: value for key, value in arguments.items() if key != name}
                with suppress(NotAnsweredError):
                    answer = await self._process.answer(endpoint, others)
                    threads.note(endpoint, answer.seconds)
                    return Response(answer.body, media_type=answer.media_type)
            # A process that failed once is not asked again for this request.
            can_leave = False
        return await threads.answer_slow(endpoint, make)

    def close(self) -> None:
        """Cancel all waiting reads, and close the second process."""
        for one in self._waiting:
            one.turn.cancel()
        self._threads.close()
        if self._process is not None:
            self._process.close()

    @asynccontextmanager
    async def _turn(self, *, can_leave: bool) -> AsyncIterator[bool]:
        """Wait in the line; yields whether the turn is in the second process."""
        loop = asyncio.get_running_loop()
        one = _Waiting(loop.create_future(), can_leave)
        self._waiting.append(one)
        self._give_turns()
        # The second process may hang.
        timer = loop.call_later(_PATIENCE_S, self._give_turns)
        is_overdue = False

        def note_overdue() -> None:
            nonlocal is_overdue
            if self._num_overdue < _MAX_OVERDUE:
                is_overdue = True
                self._num_overdue += 1
                self._num_here -= 1
                self._give_turns()

        try:
            leaves = await one.turn
            timer.cancel()
            if not leaves:
                timer = loop.call_later(_PATIENCE_S, note_overdue)
            yield leaves
        finally:
            timer.cancel()
            if one.turn.cancelled():
                self._waiting.remove(one)
            elif one.turn.result():
                self._num_there -= 1
            elif is_overdue:
                self._num_overdue -= 1
            else:
                self._num_here -= 1
            self._give_turns()

    def _give_turns(self) -> None:
        is_for_process = self._has_many_for_process()
        if self._num_here < _HERE and (
            turn := self._next(lambda one: not (is_for_process and one.can_leave))
        ):
            self._num_here += 1
            turn.set_result(False)
        while self._has_room_there() and (turn := self._next(lambda one: one.can_leave)):
            self._num_there += 1
            turn.set_result(True)

    def _has_many_for_process(self) -> bool:
        """Return whether reads go to the second process; starts the process if needed."""
        num_leaving = self._num_there + sum(one.can_leave for one in self._waiting)
        if self._process is None or num_leaving < _MANY:
            return False
        self._process.start()
        return self._process.is_ready and not self._process.is_late(_PATIENCE_S)

    def _has_room_there(self) -> bool:
        return self._process is not None and self._process.is_ready and self._num_there < _THERE

    def _next(self, is_wanted: Callable[[_Waiting], bool]) -> "asyncio.Future[bool] | None":
        """Take the first matching waiting read out of the line; None without a match."""
        for index, one in enumerate(self._waiting):
            # Done futures were cancelled because the client has gone: never give them a turn.
            if not one.turn.done() and is_wanted(one):
                del self._waiting[index]
                return one.turn
        return None


def response_of(found: Any) -> Response:
    """Return a route function's result as a response."""
    if isinstance(found, Response):
        return found
    return Response(to_json(found, inf_nan_mode="null"), media_type=_JSON)


_REQUEST = "reading_request"


class ReadingRoute(APIRoute):
    """Route answered by `app.state.readers` if its endpoint only reads and returns data.

    Endpoints that write, that are coroutines, or that make a response of their own are FastAPI's.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if _is_reading(endpoint, options):
            endpoint = _read_in_one_thread(endpoint)
        super().__init__(path, endpoint, **options)


def _is_reading(endpoint: Callable[..., Any], options: dict[str, Any]) -> bool:
    return (
        set(options.get("methods") or ()) == {"GET"}
        and isinstance(options.get("response_class"), DefaultPlaceholder)
        and options.get("status_code") is None
        and not inspect.iscoroutinefunction(endpoint)
    )


def _read_in_one_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(endpoint)
    # FastAPI gives the request to one parameter only.
    own = [name for name, one in signature.parameters.items() if one.annotation is Request]
    request_name = own[0] if own else _REQUEST

    @functools.wraps(endpoint)
    async def answer(**arguments: Any) -> Response:
        request: Request = arguments[request_name] if own else arguments.pop(request_name)

        readers: Readers = request.app.state.readers
        return await readers.answer(endpoint, arguments)

    # Signature for FastAPI's inspection: the endpoint's parameters, and the request.
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in signature.parameters.values()]
    if not own:
        parameters.append(inspect.Parameter(_REQUEST, keyword, annotation=Request))
    answer.__signature__ = signature.replace(  # type: ignore[attr-defined] # of all functions
        parameters=parameters
    )
    return answer


@dataclass
class _Records:
    """Records available to routes in the second process."""

    database: DatabaseReader
    encodings: EncodingCache = field(default_factory=EncodingCache)
    kept_names: NameCache = field(default_factory=NameCache)


def main() -> None:
    """Answer the questions from a socket in order, until its other end is closed."""
    # Ctrl-C goes to all processes of a terminal; this one ends with the first process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[3] != source_state():
        raise SystemExit("Paceline was changed since the master started: reads are left to it.")
    # Imported objects live for ever: freezing them spares the garbage collector the scan.
    gc.freeze()
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
    records = _Records(DatabaseReader(Path(sys.argv[2])))
    stream.write(READY)
    stream.flush()
    while (question := _next_question(stream)) is not None:
        stream.write(packed(_answer(records, *question)))
        stream.flush()


def _next_question(stream: BufferedRWPair) -> Any:
    size = length_of(stream.read(4))
    return pickle.loads(stream.read(size)) if size else None  # noqa: S301 - from our own process


def _answer(
    records: _Records, endpoint: Callable[..., Any], arguments: dict[str, Any], reach: Reach | None
) -> Answer | None:
    """Return a function's answer; None on failure, so the first process repeats the read."""
    began = time.monotonic()
    name = records_parameter(endpoint)
    assert name is not None
    try:
        with acting(reach):
            found = response_of(endpoint(**arguments, **{name: records}))
    except Exception as error:
        logger.debug("Not answered: %s", error)
        return None
    return Answer(bytes(found.body), found.media_type, time.monotonic() - began)
