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

        loop = asyncio.get_running_loop()
        made = await loop.run_in_executor(request.app.state.readers, make)
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
