"""Connections: deadlines for requests, and limits to keep strangers from using up all places."""

import asyncio
import logging
import re
import resource
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline._base.process_and_network import integer_setting
from paceline._cluster.master.api.requests_and_answers import problem, with_security_headers
from paceline._cluster.master.api.route_scopes import PREFIX
from paceline._cluster.master.authentication import sender_at
from paceline._cluster.master.measurements import Measurements
from paceline._cluster.master.store.run_files import MAX_FILE_BYTES
from paceline._cluster.messages.runner_messages import MAX_PIECE_BYTES, MAX_STREAM_BYTES

logger = logging.getLogger(__name__)

_WANTED_FILES = 16_384
_MAX_STRANGERS = 128
_MAX_DROPPED = 1024
# Limit of a request line with all headers: the bytes are buffered until complete.
MAX_HEADER_BYTES = 64 * 1024
# Requests that came before the answer to the first of them.
_MAX_PIPELINED = 16
_SHARED = ("127.0.0.1", "::1")
# Connections that wait to be accepted: more come at once than are accepted in a turn of the loop.
QUEUE_LENGTH = 1024


# Files opened by the master itself at most: database, readers, logs, contexts, runners.
_OWN_FILES = 48
_FEWEST_FILES = 8


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on the number and duration of connections.

    A connection is a stranger's until a request on it carries the token or a sign-in. Strangers
    have a limit of their own, so that all of them together keep out no known sender. A
    deadline holds for the whole request or answer: sending a byte now and then moves none.

    `stranger_idle_s` and `known_idle_s` are the seconds for a request to be there with all of its
    headers, from the connection's start or from the answer before. `stranger_request_s` is for the
    rest of a stranger's request and its answer; there is none for others, as uploads and streams
    may take long.

    A stranger's connection that makes room for another one is no longer read, and is closed
    `dropped_s` seconds later: a sender that replaces each closed connection at once would keep the
    process busy. At most `num_dropped` connections wait in this way.

    `num_per_address` holds for the strangers of each address but loopback, which all users of
    the machine share. Known connections are not counted: a node with many attempts has many.
    """

    num_strangers: int
    num_known: int
    num_accepts_per_turn: int
    num_dropped: int = 0
    num_per_address: int = 64
    stranger_idle_s: float = 10.0
    stranger_request_s: float = 30.0
    known_idle_s: float = 75.0
    dropped_s: float = 5.0

    @classmethod
    def for_files(cls, num_files: int) -> "ConnectionLimits":
        """Return limits reserving a third of the process's files for the rest of the master.

        If files are few, the rest of the master comes first.
        """
        num_files = max(_FEWEST_FILES, min(num_files, (num_files - _OWN_FILES) * 3 // 2))
        num_strangers, num_known = min(num_files // 8, _MAX_STRANGERS), num_files * 3 // 8
        return cls(
            num_strangers=num_strangers,
            num_known=num_known,
            num_dropped=min(max(0, num_files * 2 // 3 - num_strangers - num_known), _MAX_DROPPED),
            # A request that came with its connection is read two turns after it was accepted. By
            # then no flood of others must have taken all the places.
            num_accepts_per_turn=max(1, num_strangers // 8),
            num_per_address=integer_setting("PACELINE_MAX_CONNECTIONS_PER_ADDRESS", 64),
        )


def raise_file_limit() -> None:
    """Raise this process's limit of open files to a few thousand, if permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def process_limits() -> ConnectionLimits:
    """Return limits fitting the number of files this process may open."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = num_files == resource.RLIM_INFINITY
    return ConnectionLimits.for_files(_WANTED_FILES if is_unlimited else num_files)


class Connections:
    """All connections of a server, known and stranger; picks the connections to drop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        # The longest in its state comes first.
        self._waiting_strangers: dict[Connection, None] = {}
        self._busy_strangers: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}
        self._dropped: dict[Connection, None] = {}
        self._num_of_address: Counter[str] = Counter()

    def enter(self, connection: "Connection") -> None:
        """Take a new connection in; another stranger's goes if there are too many."""
        self.move(connection)
        address = connection.address
        if self._num_of_address[address] > self.limits.num_per_address and address not in _SHARED:
            self._drop_stranger(self.limits.num_per_address, address)
        if len(self._waiting_strangers) + len(self._busy_strangers) > self.limits.num_strangers:
            self._drop_stranger(self.limits.num_strangers)

    def move(self, connection: "Connection") -> None:
        """Update the lists after a change of a connection's state."""
        self.leave(connection)
        if connection.is_known:
            self._known[connection] = None
            return
        places = self._busy_strangers if connection.is_busy else self._waiting_strangers
        places[connection] = None
        self._num_of_address[connection.address] += 1

    def numbers(self) -> dict[str, int]:
        """Return how many connections there are by kind."""
        num_strangers = len(self._waiting_strangers) + len(self._busy_strangers)
        return {"known": len(self._known), "strangers": num_strangers}

    def has_room_for_known(self, address: str) -> bool:
        """Return whether an address may add a known connection; drops an idle connection if full.

        An address other than loopback has half of the places, so that the code of one trial, which
        has a token, cannot keep all others out.
        """
        most = self.limits.num_known
        found = list(self._known)
        if address not in _SHARED and len(found) >= most // 2:
            of_address = [one for one in found if one.address == address]
            if len(of_address) >= most // 2:
                found, most = of_address, most // 2
        if len(found) < most:
            return True
        idle = next((one for one in found if not one.is_busy), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def leave(self, connection: "Connection") -> None:
        """Remove a connection from the lists, except from the dropped connections."""
        self._known.pop(connection, None)
        for places in (self._waiting_strangers, self._busy_strangers):
            if connection in places:
                del places[connection]
                self._num_of_address[connection.address] -= 1
                if self._num_of_address[connection.address] == 0:
                    del self._num_of_address[connection.address]

    def lose(self, connection: "Connection") -> None:
        """Remove an ended connection from all lists."""
        self.leave(connection)
        self._dropped.pop(connection, None)

    def _drop_stranger(self, limit: int, address: str | None = None) -> None:
        """Drop the oldest stranger without a request, or with a never-ending request.

        Each kind keeps half of the places, so that neither gets all of them.
        """
        places = (self._waiting_strangers, self._busy_strangers)
        waiting, busy = (
            [one for one in place if address in (None, one.address)] for place in places
        )
        self._drop((waiting if len(waiting) > limit // 2 else busy)[0])

    def _drop(self, connection: "Connection") -> None:
        self.leave(connection)
        if connection.is_known or not self.limits.num_dropped:
            connection.transport.abort()
            return
        self._dropped[connection] = None
        connection.drop()
        if len(self._dropped) > self.limits.num_dropped:
            oldest = next(iter(self._dropped))
            del self._dropped[oldest]
            oldest.transport.abort()


class Connection(HttpToolsProtocol):
    """HTTP connection with deadlines; found in scopes as `paceline.connection`."""

    def __init__(self, config: "ConnectionConfig", **options: Any) -> None:
        super().__init__(config, **options)
        self._connections = config.connections
        self._limits = config.connections.limits
        self._deadline: asyncio.TimerHandle | None = None
        self.is_known = False
        self.is_busy = False
        self.is_dropped = False
        self._num_incomplete = 0
        self._answer = self.app
        self.app = self._answer_in_time

    def admit(self) -> bool:
        """Lift the deadline, as the request is of somebody known; False if there are too many."""
        if not self.is_known:
            self.is_known = self._connections.has_room_for_known(self.address)
            self._change(is_busy=True)
        return self.is_known

    def drop(self) -> None:
        """Read nothing more, and close the connection in a while."""
        self.is_dropped = True
        if not self.transport.is_closing():
            self.transport.pause_reading()
        self._close_after(None)
        self._deadline = self.loop.call_later(self._limits.dropped_s, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._connections.enter(self)
        self._close_after(self._limits.stranger_idle_s)

    @property
    def address(self) -> str:
        """The address of the other end."""
        return self.client[0] if self.client else ""

    @property
    def sender(self) -> str:
        """Who is at the other end, see `sender_at`."""
        return sender_at(self.client, self.server)

    def data_received(self, data: bytes) -> None:
        """Refuse an incomplete head beyond the limit, as the parser keeps the whole head."""
        self._num_incomplete += len(data)
        super().data_received(data)
        if self._num_incomplete > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of a request must have an end.")

    def on_headers_complete(self) -> None:
        """Begin with a request, unless a proxy may read another one in it.

        Raises:
            ValueError: It may, or too many requests wait for their answers.
        """
        self._num_incomplete = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        has_host = len(hosts) == 1 or (not hosts and self.parser.get_http_version() == "1.0")
        is_clear = has_host and encodings in ([], [b"chunked"]) and self.url.startswith(b"/")
        # A head that comes in one piece is never an incomplete one.
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES or not is_clear or len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("the request is too long, has two meanings, or waits behind many")
        super().on_headers_complete()
        # Fields behind the body are not those of the request, which the parser would add to.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._num_incomplete = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with 400 and the headers of every answer, unless amid another one."""
        if self.cycle is None or self.cycle.response_complete:
            headers = with_security_headers(
                [
                    (b"content-type", b"text/plain; charset=utf-8"),
                    (b"content-length", str(len(msg)).encode()),
                    (b"connection", b"close"),
                ]
            )
            lines = [STATUS_LINE[400], *(b"%s: %s\r\n" % pair for pair in headers), b"\r\n"]
            self.transport.write(b"".join([*lines, msg.encode()]))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        super()._unsupported_upgrade_warning()
        # The parser has lost what came with the request.
        self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connections.lose(self)
        self._close_after(None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request; the rest of this request's body is dropped."""
        self._change(is_busy=False)
        super().on_response_complete()

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._change(is_busy=True)
        scope["paceline.connection"] = self
        await self._answer(scope, receive, send)

    def _change(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy
        if self.transport.is_closing() or self.is_dropped:
            return
        self._connections.move(self)
        limits = self._limits
        if self.is_known:
            self._close_after(None if is_busy else limits.known_idle_s)
        else:
            self._close_after(limits.stranger_request_s if is_busy else limits.stranger_idle_s)

    def _close_after(self, delay_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if delay_s is not None:
            self._deadline = self.loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        # A request that is there already is answered, even if nobody has begun to.
        is_there = self.cycle is not None and not self.cycle.response_complete
        if self.is_busy or not is_there:
            self.transport.abort()


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration with these connections."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(
            app,
            # Fixed loop and protocol, not whatever is installed: the deadlines rely on both.
            http=Connection,
            loop="asyncio",
            ws="none",
            # A header must not choose the address by which a sender is told from others.
            proxy_headers=False,
            backlog=limits.num_accepts_per_turn,
            # Connections have a deadline of their own.
            timeout_keep_alive=int(limits.known_idle_s) + 1,
            **options,
        )
        self.connections = Connections(limits)


_MIB = 1024 * 1024
MAX_CONTEXT_BYTES = 95 * _MIB
_MAX_CONFIG_BYTES = 8 * _MIB
# A runner sends a thousand records of each rank at once, and halves a refused batch.
_MAX_RECORDS_BYTES = 256 * _MIB
# The list of a checkpoint's files, twice.
_MAX_MANIFEST_BYTES = 64 * _MIB
_MAX_BYTES = 1 * _MIB
# Body limit without token and sign-in: enough for a name and a password.
_MAX_STRANGER_BYTES = 16 * 1024
# How long the rest of a body that is too large is read, and dropped; of a stranger's, how much.
_LINGER_S = 10.0
_LINGER_BYTES = 80 * _MIB


class BodyLimit(NamedTuple):
    """Largest body of a route in bytes, and the error code for larger bodies."""

    num_bytes: int
    code: str = "body_too_large"


LARGE_BODIES = {
    ("PUT", "/contexts/{digest}"): BodyLimit(MAX_CONTEXT_BYTES, "context_too_large"),
    ("POST", "/attempts/{attempt_id}/records"): BodyLimit(_MAX_RECORDS_BYTES),
    ("POST", "/attempts/{attempt_id}/logs"): BodyLimit(_MAX_RECORDS_BYTES),
    ("POST", "/attempts/{attempt_id}/checkpoints/{uuid}"): BodyLimit(_MAX_MANIFEST_BYTES),
    ("POST", "/attempts/{attempt_id}/checkpoints/{uuid}/shards"): BodyLimit(_MAX_MANIFEST_BYTES),
    ("PUT", "/attempts/{attempt_id}/checkpoints/{uuid}/pieces"): BodyLimit(MAX_PIECE_BYTES),
    ("PUT", "/attempts/{attempt_id}/streams/{stream}"): BodyLimit(MAX_STREAM_BYTES),
    ("PUT", "/experiments/{experiment_id}/streams/{stream}"): BodyLimit(MAX_STREAM_BYTES),
    ("PUT", "/attempts/{attempt_id}/files/{path:path}"): BodyLimit(MAX_FILE_BYTES),
    ("PUT", "/runs/{run_id}/files/{path:path}"): BodyLimit(MAX_FILE_BYTES),
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

# Of clients of W&B and MLflow: their paths are whole.
TRACKER_BODIES: dict[tuple[str, str], BodyLimit] = {
    ("PUT", "/api/2.0/mlflow-artifacts/artifacts/{path:path}"): BodyLimit(64 * 1024 * _MIB),
    ("POST", "/graphql"): BodyLimit(64 * _MIB),
    ("POST", "/files/{entity}/{project}/{run}/file_stream"): BodyLimit(64 * _MIB),
    ("PUT", "/wandb-files/{trial_id}/{path:path}"): BodyLimit(64 * 1024 * _MIB),
}


def _setting_limits() -> dict[tuple[str, str], BodyLimit]:
    """Return the larger limits, with the environment's limit for code."""
    num_bytes = integer_setting("PACELINE_MAX_CONTEXT_MIB", MAX_CONTEXT_BYTES // _MIB) * _MIB
    route = ("PUT", "/contexts/{digest}")
    return LARGE_BODIES | {route: LARGE_BODIES[route]._replace(num_bytes=num_bytes)}


class BodyTooLargeError(HTTPException):
    """Raised when a body exceeds its route's limit during reading."""

    def __init__(self, limit: BodyLimit) -> None:
        super().__init__(413, _detail(limit))
        self.code = limit.code


class BodyLimits:
    """ASGI middleware answering 413 to oversized bodies without buffering their rest.

    It stands behind the `Guard`, which says who asks.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._large = [
            (method, _limit_route_pattern(prefix + path), limit)
            for (method, path), limit in _setting_limits().items()
        ] + [
            (method, _limit_route_pattern(path), limit)
            for (method, path), limit in TRACKER_BODIES.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a size-limited body, or refuse the request here."""
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
    """Body of a request, and its answer; `stranger` is the connection of an unknown sender."""

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

        A client that sends its whole request before it reads would otherwise see a broken
        connection.
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
        """Read and drop the rest of the body; return False if a stranger sends too much."""
        num_left = _LINGER_BYTES
        while (message := await self._receive()).get("more_body", False):
            num_left -= len(message.get("body", b""))
            if num_left < 0 and self._stranger is not None:
                return False
        return True


def _detail(limit: BodyLimit) -> str:
    return f"The body must have at most {limit.num_bytes} bytes on this route, but has more."


def _declared_bytes(scope: Scope) -> int:
    """Return the body's length from its headers; 0 for a chunked body."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def _limit_route_pattern(path: str) -> re.Pattern[str]:
    """Return a pattern matching the paths of a route."""
    return re.compile(re.sub(r"{\w+}", "[^/]+", re.sub(r"{\w+:path}", ".+", path)))


# Long-polling routes: slow by design, as they answer on an event or after a timeout.
_WAITING_ROUTES = frozenset(
    {
        f"{PREFIX}/events",
        f"{PREFIX}/attempts/{{attempt_id}}/control",
        f"{PREFIX}/nodes/{{node_id}}/poll",
        f"{PREFIX}/experiments/{{experiment_id}}/asks",
        f"{PREFIX}/experiments/{{experiment_id}}/link",
        f"{PREFIX}/experiments/{{experiment_id}}/streams/{{stream}}",
        f"{PREFIX}/attempts/{{attempt_id}}/streams",
        f"{PREFIX}/attempts/{{attempt_id}}/streams/{{stream}}",
    }
)
_UNMATCHED = "other"


class RequestCounting:
    """ASGI middleware: measures each request of the API until its answer begins.

    It stands before all others, so that their refusals are counted as well.
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
                self._count_request(scope, message["status"], time.monotonic() - began)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if not is_noted:
                # The client went away, or the answer failed before it began.
                self._count_request(scope, 499, time.monotonic() - began)

    def _count_request(self, scope: Scope, status: int, seconds: float) -> None:
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
