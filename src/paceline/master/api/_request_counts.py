"""Counting of requests, and a line in the log for each slow one."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.master._measurements import Measurements
from paceline.master.api._scopes import PREFIX

logger = logging.getLogger(__name__)

# They answer when something happens, or when enough time has passed.
_WAITING_ROUTES = frozenset(
    {
        f"{PREFIX}/events",
        f"{PREFIX}/attempts/{{attempt_id}}/control",
        f"{PREFIX}/nodes/{{node_id}}/poll",
    }
)
_UNMATCHED = "other"


class RequestCounting:
    """ASGI middleware: measures each request of the API until its answer begins.

    It stands before all others, so that what they refuse is counted as well.
    """

    def __init__(self, app: ASGIApp, measurements: Measurements) -> None:
        self._app = app
        self._measurements = measurements

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        is_noted = False

        async def note(message: Message) -> None:
            nonlocal is_noted
            if message["type"] == "http.response.start" and not is_noted:
                is_noted = True
                self._note(scope, message["status"], time.monotonic() - began)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if not is_noted:
                # The client went away, or the answer failed before it began.
                self._note(scope, 499, time.monotonic() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route_of(scope)
        waits = route in _WAITING_ROUTES
        method = scope["method"] if route != _UNMATCHED else "*"
        if self._measurements.note_request(method, route, status, None if waits else seconds):
            # Without its query, which may hold a secret.
            logger.warning(
                "A slow request: %s %s was answered %d after %.2f s (%s).",
                scope["method"],
                scope["path"][:200],
                status,
                seconds,
                route,
            )


def _route_of(scope: Scope) -> str:
    """Return the path of the route with the names of its parts; few, whatever is asked for."""
    path = getattr(scope.get("route"), "path", None)
    if not isinstance(path, str):
        return _UNMATCHED
    return path if path.startswith(PREFIX) else f"{PREFIX}{path}"
