"""Routes that read: a thread or a second process makes an answer, and the event loop sends it.

FastAPI would take two threads one after the other, and check and encode a second time what is of
the declared type already.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute
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
T = TypeVar("T")

_JSON = "application/json"
_REQUEST = "reading_request"


class ReadingRoute(APIRoute):
    """A route whose endpoint is answered by `app.state.readers` if it reads and returns data.

    Endpoints that write, that are coroutines, or that make a response of their own are FastAPI's.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if _is_reading(endpoint, options):
            endpoint = _read_in_one_thread(endpoint)
        super().__init__(path, endpoint, **options)


class ReadingThreads:
    """The threads in which reads are answered: one for quick routes, others for slow ones.

    `num_quick` is how many quick reads wait or are answered.

    Python runs one thread at a time. Two that are busy and the event loop take turns, which makes
    every answer later and their number smaller. But quick reads must not wait for slow ones.
    """

    def __init__(self) -> None:
        self.num_quick = 0
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="paceline-reader")
        self._slow = ThreadPoolExecutor(_NUM_SLOW, thread_name_prefix="paceline-slow-reader")
        self._slow_until: dict[object, float] = {}

    async def answer(self, route: object, make: Callable[[], T]) -> T:
        """Return what a function returns, which reads for a route.

        Args:
            route: The route, whose reads take alike long.
            make: The function.
        """
        loop = asyncio.get_running_loop()
        if self.is_slow(route):
            return await loop.run_in_executor(self._slow, self._timed, route, make)
        self.num_quick += 1
        try:
            return await loop.run_in_executor(self._quick, self._timed, route, make)
        finally:
            self.num_quick -= 1

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

    Args:
        database_path: The database.
        num_cores: How many cores this process may use.
    """

    def __init__(self, database_path: Path, num_cores: int) -> None:
        self._threads = ReadingThreads()
        self._process = ReadingProcess(database_path) if num_cores > 1 else None

    async def answer(self, endpoint: Callable[..., Any], arguments: dict[str, Any]) -> Response:
        """Return what a route's function returns, as a response."""
        threads, name = self._threads, records_parameter(endpoint)
        if (
            name is not None
            and self._process is not None
            and not threads.is_slow(endpoint)
            and self._process.would_answer_before(threads.num_quick)
        ):
            others = {key: value for key, value in arguments.items() if key != name}
            with suppress(NotAnsweredError):
                answer = await self._process.answer(endpoint, others)
                threads.note(endpoint, answer.seconds)
                return Response(answer.body, media_type=answer.media_type)
        return await threads.answer(endpoint, lambda: response_of(endpoint(**arguments)))

    def close(self) -> None:
        """Answer nothing that waits any more."""
        self._threads.close()
        if self._process is not None:
            self._process.close()


def response_of(found: Any) -> Response:
    """Return what a route's function has returned as a response."""
    if isinstance(found, Response):
        return found
    return Response(to_json(found, inf_nan_mode="null"), media_type=_JSON)


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

    # What FastAPI looks at: the parameters of the endpoint, and the request.
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in signature.parameters.values()]
    if not own:
        parameters.append(inspect.Parameter(_REQUEST, keyword, annotation=Request))
    answer.__signature__ = signature.replace(  # type: ignore[attr-defined] # of all functions
        parameters=parameters
    )
    return answer
