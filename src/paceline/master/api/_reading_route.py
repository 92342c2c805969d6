"""Routes that read: one thread makes an answer and encodes it, and the event loop only sends it.

FastAPI would take two threads one after the other, and check and encode a second time what is of
the declared type already.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute
from pydantic_core import to_json

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
    """A route whose endpoint runs in a thread of `app.state.readers` if it reads and returns data.

    Endpoints that write, that are coroutines, or that make a response of their own are FastAPI's.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if _is_reading(endpoint, options):
            endpoint = _read_in_one_thread(endpoint)
        super().__init__(path, endpoint, **options)


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
        """Return what a function returns, which reads for a route.

        Args:
            route: The route, whose reads take alike long.
            make: The function.
        """
        is_slow = time.monotonic() < self._slow_until.get(route, 0.0)
        threads = self._slow if is_slow else self._quick
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._timed, route, make)

    def _timed(self, route: object, make: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return make()
        finally:
            now = time.monotonic()
            if now - began > _SLOW_S:
                self._slow_until[route] = now + _SLOW_FOR_S

    def close(self) -> None:
        """Answer nothing that waits any more."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)


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

        def make() -> Response | bytes:
            found = endpoint(**arguments)
            return found if isinstance(found, Response) else to_json(found, inf_nan_mode="null")

        made = await request.app.state.readers.answer(endpoint, make)
        return made if isinstance(made, Response) else Response(made, media_type=_JSON)

    # What FastAPI looks at: the parameters of the endpoint, and the request.
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in signature.parameters.values()]
    if not own:
        parameters.append(inspect.Parameter(_REQUEST, keyword, annotation=Request))
    answer.__signature__ = signature.replace(  # type: ignore[attr-defined] # of all functions
        parameters=parameters
    )
    return answer
