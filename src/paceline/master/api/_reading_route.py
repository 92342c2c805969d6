"""Routes that read: a thread or a second process makes an answer, and the event loop sends it.

FastAPI would take two threads one after the other, and check and encode a second time what is of
the declared type already.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute

from paceline.master.api._readers import Readers

_REQUEST = "reading_request"


class ReadingRoute(APIRoute):
    """A route whose endpoint is answered by `app.state.readers` if it reads and returns data.

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

    # What FastAPI looks at: the parameters of the endpoint, and the request.
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in signature.parameters.values()]
    if not own:
        parameters.append(inspect.Parameter(_REQUEST, keyword, annotation=Request))
    answer.__signature__ = signature.replace(  # type: ignore[attr-defined] # of all functions
        parameters=parameters
    )
    return answer
