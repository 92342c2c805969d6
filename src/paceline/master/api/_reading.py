"""Routes that read: one thread makes an answer and encodes it, and the event loop only sends it.

FastAPI would take two threads one after the other, and check and encode a second time what is of
the declared type already.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute
from pydantic_core import to_json

# Threads that answer at a time. The event loop takes turns with those that run, so more of them
# would make every answer late without making more of them.
NUM_READERS = 8


class ReadingRoute(APIRoute):
    """A route whose endpoint runs in a thread of `app.state.readers` if it reads and returns data.

    Endpoints that write, that are coroutines, or that make a response of their own are FastAPI's.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if _is_reading(endpoint, options):
            endpoint = _in_one_thread(endpoint)
        super().__init__(path, endpoint, **options)


def make_readers() -> ThreadPoolExecutor:
    """Return the threads for an application."""
    return ThreadPoolExecutor(NUM_READERS, thread_name_prefix="paceline-reader")


def _is_reading(endpoint: Callable[..., Any], options: dict[str, Any]) -> bool:
    return (
        set(options.get("methods") or ()) == {"GET"}
        and isinstance(options.get("response_class"), DefaultPlaceholder)
        and options.get("status_code") is None
        and not inspect.iscoroutinefunction(endpoint)
    )


def _in_one_thread(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(endpoint)

    @functools.wraps(endpoint)
    async def answer(reading_request: Request, **arguments: Any) -> Response:
        def make() -> Response | bytes:
            found = endpoint(**arguments)
            return found if isinstance(found, Response) else to_json(found, inf_nan_mode="null")

        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(reading_request.app.state.readers, make)
        return made if isinstance(made, Response) else Response(made, media_type=_JSON)

    # What FastAPI looks at: the parameters of the endpoint, and the request.
    own = inspect.Parameter("reading_request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in signature.parameters.values()
    ]
    answer.__signature__ = signature.replace(  # type: ignore[attr-defined] # of all functions
        parameters=[*parameters, own]
    )
    return answer


_JSON = "application/json"
