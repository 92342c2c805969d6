"""Size limits of request bodies: small by default, larger for routes that take files or records.

FastAPI's own limit needs a version that is newer than the oldest one that is supported.
"""

import asyncio
import re
from contextlib import suppress
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline._environment_settings import integer_setting
from paceline.master._connection_limits import Connection
from paceline.master.api._problem_answers import problem
from paceline.messages.attempts import MAX_PIECE_BYTES

_MIB = 1024 * 1024
MAX_CONTEXT_BYTES = 95 * _MIB
_MAX_CONFIG_BYTES = 8 * _MIB
# A runner sends a thousand records of each rank at once, and halves what is refused.
_MAX_RECORDS_BYTES = 256 * _MIB
# The list of a checkpoint's files, twice.
_MAX_MANIFEST_BYTES = 64 * _MIB
_MAX_BYTES = 1 * _MIB
# Of a request without token and sign-in: a name and a password.
_MAX_STRANGER_BYTES = 16 * 1024
# How long the rest of a body that is too large is read, and dropped; of a stranger's, how much.
_LINGER_S = 10.0
_LINGER_BYTES = 80 * _MIB


class BodyLimit(NamedTuple):
    """The largest body of a route in bytes, and the code of the answer to a larger one."""

    num_bytes: int
    code: str = "body_too_large"


LARGE_BODIES = {
    ("PUT", "/contexts/{digest}"): BodyLimit(MAX_CONTEXT_BYTES, "context_too_large"),
    ("POST", "/attempts/{attempt_id}/records"): BodyLimit(_MAX_RECORDS_BYTES),
    ("POST", "/attempts/{attempt_id}/logs"): BodyLimit(_MAX_RECORDS_BYTES),
    ("POST", "/attempts/{attempt_id}/checkpoints/{uuid}"): BodyLimit(_MAX_MANIFEST_BYTES),
    ("POST", "/attempts/{attempt_id}/checkpoints/{uuid}/shards"): BodyLimit(_MAX_MANIFEST_BYTES),
    ("PUT", "/attempts/{attempt_id}/checkpoints/{uuid}/pieces"): BodyLimit(MAX_PIECE_BYTES),
    ("PUT", "/runs/{run_id}"): BodyLimit(_MAX_CONFIG_BYTES),
    ("POST", "/runs/{run_id}/records"): BodyLimit(_MAX_RECORDS_BYTES),
    ("POST", "/check-config"): BodyLimit(_MAX_CONFIG_BYTES),
    ("POST", "/preview-search"): BodyLimit(_MAX_CONFIG_BYTES),
    ("POST", "/experiments"): BodyLimit(_MAX_CONFIG_BYTES),
    ("PATCH", "/experiments/{experiment_id}"): BodyLimit(_MAX_CONFIG_BYTES),
    ("POST", "/experiments/{experiment_id}/fork"): BodyLimit(_MAX_CONFIG_BYTES),
    ("POST", "/experiments/{experiment_id}/continue"): BodyLimit(_MAX_CONFIG_BYTES),
    ("POST", "/trials/{trial_id}/continue"): BodyLimit(_MAX_CONFIG_BYTES),
}


def _limits_of_settings() -> dict[tuple[str, str], BodyLimit]:
    """Return the larger limits, with what the environment says of code."""
    num_bytes = integer_setting("PACELINE_MAX_CONTEXT_MIB", MAX_CONTEXT_BYTES // _MIB) * _MIB
    route = ("PUT", "/contexts/{digest}")
    return LARGE_BODIES | {route: LARGE_BODIES[route]._replace(num_bytes=num_bytes)}


class BodyTooLargeError(HTTPException):
    """Raised where a body is read that is larger than its route takes."""

    def __init__(self, limit: BodyLimit) -> None:
        super().__init__(413, _detail(limit))
        self.code = limit.code


class BodyLimits:
    """ASGI middleware: answers 413 to a body that is too large, of which no more is kept.

    It stands behind the `Guard`, which says who asks.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._large = [
            (method, _route_pattern_of_limit(prefix + path), limit)
            for (method, path), limit in _limits_of_settings().items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a body that raises at the limit, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(scope)
        is_stranger = scope["paceline.identity"] is None
        connection = scope["paceline.connection"] if is_stranger else None
        body = _LimitedBody(limit, receive, send, connection)
        if _declared_bytes(scope) > limit.num_bytes:
            body.is_refused = True
            await problem(413, limit.code, _detail(limit))(scope, receive, body.send)
        else:
            await self._app(scope, body.receive, body.send)

    def _limit_of(self, scope: Scope) -> BodyLimit:
        if scope["paceline.identity"] is None:
            return BodyLimit(_MAX_STRANGER_BYTES)
        for method, pattern, limit in self._large:
            if method == scope["method"] and pattern.fullmatch(scope["path"]):
                return limit
        return BodyLimit(_MAX_BYTES)


class _LimitedBody:
    """One request's body, and its answer; `stranger` is the connection of a stranger."""

    def __init__(
        self, limit: BodyLimit, receive: Receive, send: Send, stranger: Connection | None
    ) -> None:
        self._stranger = stranger
        self._limit = limit
        self._left = limit.num_bytes
        self._receive = receive
        self._send = send
        self.is_refused = False

    async def receive(self) -> Message:
        """Return the next piece.

        Raises:
            BodyTooLargeError: There is more than the limit.
        """
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.is_refused = True
            raise BodyTooLargeError(self._limit)
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the answer; after a refusal the body's rest is dropped before its end.

        A client that sends all before it reads would otherwise find the connection broken.
        """
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not self.is_refused or not is_end:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        is_read = False
        with suppress(asyncio.TimeoutError):
            is_read = await asyncio.wait_for(self._drop_rest(), _LINGER_S)
        await self._send({"type": "http.response.body"})
        if not is_read and self._stranger is not None:
            # Nothing more is read of who sends without an end.
            self._stranger.transport.close()

    async def _drop_rest(self) -> bool:
        """Read what is left; False if a stranger sends too much of it."""
        num_left = _LINGER_BYTES
        while (message := await self._receive()).get("more_body", False):
            num_left -= len(message.get("body", b""))
            if num_left < 0 and self._stranger is not None:
                return False
        return True


def _detail(limit: BodyLimit) -> str:
    return f"The body must have at most {limit.num_bytes} bytes on this route, but has more."


def _declared_bytes(scope: Scope) -> int:
    """Return the body's length as its headers tell it; 0 if it comes in chunks."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def _route_pattern_of_limit(path: str) -> re.Pattern[str]:
    """Return what the paths of a route match."""
    return re.compile(re.sub(r"{\w+}", "[^/]+", path))
