"""Who answers reads: threads of the master, and a second process while many wait."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fastapi import Response
from pydantic_core import to_json

from paceline.master.api._reading_process import NotAnsweredError, ReadingProcess
from paceline.master.api._row_helpers import records_parameter

# Threads that answer beside the one for quick reads: those of slow reads, which use the processor
# less than the database and files, and FastAPI's for requests that are no reads.
NUM_THREADS = 8
_NUM_SLOW = 3
# A route that took so long once is a slow one for a while, in seconds.
_SLOW_S = 0.1
_SLOW_FOR_S = 60.0
# From so many quick reads on that wait and that it can answer, the second process is started, and
# left to answer them, unless it has answered nothing for so many seconds.
_MANY = 4
_PATIENCE_S = 1.0
# How many quick reads are given to the thread, and to the second process: so many that it has the
# next one at once, however long the event loop takes to hear of an answer.
_HERE = 1
_THERE = 8
_JSON = "application/json"
T = TypeVar("T")


class _Waiting(NamedTuple):
    """A read in the line; its turn gets whether it goes to the second process."""

    turn: "asyncio.Future[bool]"
    can_leave: bool


class ReadingThreads:
    """The threads in which reads are answered: one for quick routes, others for slow ones.

    Python runs one thread at a time. Two that are busy and the event loop take turns, which makes
    every answer later and their number smaller. But quick reads must not wait for slow ones.
    """

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="paceline-reader")
        self._slow = ThreadPoolExecutor(_NUM_SLOW, thread_name_prefix="paceline-slow-reader")
        self._slow_until: dict[object, float] = {}

    async def answer(self, route: object, make: Callable[[], T]) -> T:
        """Return what a function returns, which reads for a route, in the thread of quick ones.

        Args:
            route: The route, whose reads take alike long.
            make: The function.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._quick, self._timed, route, make)

    async def answer_slow(self, route: object, make: Callable[[], T]) -> T:
        """Return what a function returns, in one of the threads for slow routes."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._slow, self._timed, route, make)

    def is_slow(self, route: object) -> bool:
        """Tell whether a read of a route took long lately."""
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
        """Answer nothing that waits any more."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)


class Readers:
    """Where reads are answered: by threads, and by a second process while many wait for them.

    Quick reads wait in one line. The second process is given those that it can answer, some at a
    time. The thread takes the others, and those as well while few wait: it shares Python's lock
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
        self._num_there = 0

    async def answer(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Response:
        """Return what a route's function returns, as a response."""
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
            can_leave = False
        return await threads.answer_slow(endpoint, make)

    def close(self) -> None:
        """Answer nothing that waits any more."""
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
        look_again = loop.call_later(_PATIENCE_S, self._give_turns)
        try:
            yield await one.turn
        finally:
            look_again.cancel()
            if one.turn.cancelled():
                self._waiting.remove(one)
            elif one.turn.result():
                self._num_there -= 1
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
        """Tell whether reads are left to the second process; starts it if so."""
        num_leaving = self._num_there + sum(one.can_leave for one in self._waiting)
        if self._process is None or num_leaving < _MANY:
            return False
        self._process.start()
        return self._process.is_ready and not self._process.is_late(_PATIENCE_S)

    def _has_room_there(self) -> bool:
        return self._process is not None and self._process.is_ready and self._num_there < _THERE

    def _next(self, is_wanted: Callable[[_Waiting], bool]) -> "asyncio.Future[bool] | None":
        """Take the first one out of the line that is wanted."""
        for index, one in enumerate(self._waiting):
            # One that is done was cancelled: whoever asked has gone.
            if not one.turn.done() and is_wanted(one):
                del self._waiting[index]
                return one.turn
        return None


def response_of(found: Any) -> Response:
    """Return what a route's function has returned as a response."""
    if isinstance(found, Response):
        return found
    return Response(to_json(found, inf_nan_mode="null"), media_type=_JSON)
