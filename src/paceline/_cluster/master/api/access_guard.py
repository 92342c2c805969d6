"""Access control: every route requires a scope unless listed as public."""

import asyncio
import json
import re
import secrets
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline._base.process_and_network import LOOPBACK_HOSTS
from paceline._cluster.master.api.request_limits import MAX_HEADER_BYTES, Connection
from paceline._cluster.master.api.requests_and_answers import ApiError, problem
from paceline._cluster.master.api.route_scopes import (
    PREFIX,
    ROUTES,
    SIGNED_PATH,
    TRACKER_PATHS,
    RouteScope,
    Scopes,
)
from paceline._cluster.master.authentication import SignIns, Throttle
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.reach import (
    FIRST_USER,
    KINDS,
    Reach,
    acting,
    named_object,
    project_of,
)

_MLFLOW_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    409: "INVALID_PARAMETER_VALUE",
    413: "RESOURCE_LIMIT_EXCEEDED",
    422: "INVALID_PARAMETER_VALUE",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


def sending_tracker_names(send: Send) -> Send:
    """Return a `send` function that adds these names to a problem, which comes in one piece."""
    start: Message | None = None

    async def wrapped(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if headers.get(b"content-type", b"").startswith(b"application/problem+json"):
                start = message
                return
        elif start is not None:
            body = _with_names(message.get("body", b""))
            headers = dict(start["headers"]) | {b"content-length": str(len(body)).encode()}
            await send({**start, "headers": [*headers.items()]})
            start, message = None, {**message, "body": body}
        await send(message)

    return wrapped


def _with_names(body: bytes) -> bytes:
    found = json.loads(body)
    code, text = found["code"], found["detail"]
    # MLflow's own codes are in capitals.
    code = code if code.isupper() else _MLFLOW_CODES.get(found["status"], "INTERNAL_ERROR")
    names = {"error_code": code, "message": text, "errors": [{"message": text}]}
    return json.dumps(found | names).encode()


PUBLIC_PATHS = frozenset(PREFIX + route.partition(" ")[2] for route in ROUTES[RouteScope.PUBLIC])
# Prometheus asks here unless configured otherwise.
_USUAL_METRICS_PATH = "/metrics"
_MAX_WRONG_TOKENS = 300
_MAX_HEADERS = 100
_LONGEST_ACTION = 500
_HOST = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class AccessIdentity:
    """Sender of a request.

    Attributes:
        user: The name of the user, or of the token.
        secret: The secret of a browser's cookie, None for whoever sends a token.
        scope: The sender's rights.
        attempt_id: The attempt whose token it is, if it is one's.
        token_id: The id of a program's token, if it is one.
        expires_at: When that token expires, in seconds since the epoch; None for never.
        reach: What the user may see and change, for whom it acts; None for the master's own
            senders: attempts, runners, and signed URLs.
    """

    user: str
    secret: str | None
    scope: RouteScope = RouteScope.ADMIN
    attempt_id: int | None = None
    token_id: int | None = None
    expires_at: float | None = None
    reach: Reach | None = None

    @property
    def owner(self) -> str:
        """The user for whom the request acts."""
        return FIRST_USER if self.reach is None else self.reach.user


def admission_check(master: Master, identity: AccessIdentity) -> Callable[[], bool]:
    """Return a function telling whether a sender's token or sign-in still opens as much.

    For answers without an end; it may read the database.
    """
    token_id, secret, reach = identity.token_id, identity.secret, identity.reach
    home_token = master.home_token

    def is_admitted() -> bool:
        if token_id is None and secret is None:
            return master.home_token == home_token
        if reach is not None and master.users.reach(reach.user) != reach:
            return False
        if secret is not None:
            return master.sign_ins.user_of(secret) is not None
        assert token_id is not None
        return (token := master.tokens.get(token_id)) is not None and token.is_usable

    return is_admitted


async def _identity(request: Request) -> AccessIdentity | None:
    found: AccessIdentity | None = request.scope["paceline.identity"]
    return found


IdentityOf = Annotated[AccessIdentity | None, Depends(_identity)]


def check_tracker_rights(
    identity: AccessIdentity | None, *, writes: bool = False, lists: bool = False
) -> None:
    """Refuse a call of a tracker's client that the scope of its token does not allow.

    Raises:
        ApiError: It does not.
    """
    scope = RouteScope.READ if identity is None else identity.scope
    if writes and scope is RouteScope.READ:
        needed, what = "submit", "write"
    elif lists and scope is RouteScope.REPORT:
        needed, what = "read", "list runs or to read artifacts"
    else:
        return
    user = "" if identity is None else identity.user
    raise ApiError(
        403,
        "scope_too_low",
        f"The token must have the scope {needed!r} to {what}, but {user!r} has {scope.value!r}."
        " Hint: `paceline token create NAME --scope submit` makes one for both.",
    )


async def _connection(request: Request) -> Connection:
    found: Connection = request.scope["paceline.connection"]
    return found


ConnectionOf = Annotated[Connection, Depends(_connection)]


def cookies_of(request: Request) -> bytes:
    """Return the header of a request's cookies, for `find_cookie`."""
    found: bytes = request.scope["paceline.cookies"]
    return found


def find_cookie(header: bytes, wanted: bytes) -> str | None:
    """Return the value of a cookie of ours; others may hold anything, and are not looked into."""
    found = None
    for part in header.split(b";"):
        name, _, value = part.partition(b"=")
        if name.strip() == wanted:
            found = value.strip().decode("latin-1")
    return found


def cookie_name(master: Master) -> str:
    """Return the name of the sign-in cookie: browsers share cookies between a host's ports."""
    return f"paceline_{master.home.cluster_id[:8]}"


class Guard:
    """ASGI middleware: checks Host and Origin, then the bearer token or the sign-in cookie.

    Requests for the web UI are handed to `web`, all others to `app`. Host and Origin are checked
    because a browser sends requests of any page to loopback; such a page can neither choose the
    Host header nor hide its Origin. Pages of another port may send the cookie with a GET, so
    the origin that the browser reports is checked as well.
    """

    def __init__(self, app: ASGIApp, master: Master, web: ASGIApp) -> None:
        self._app = app
        self._web = web
        self._identify = _Identification(master)
        self._scopes = Scopes()
        self._wrong_tokens = Throttle(_MAX_WRONG_TOKENS)
        self._opens = master.signed_urls.opens
        self._is_open = master.is_open
        self._has_tls = master.certificate is not None
        self._far_origin = None if master.oidc is None else master.oidc.settings.origin_of_url()
        self._database = master.database
        self._audit = master.audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the API or the web UI, or refuse the request here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == _USUAL_METRICS_PATH:
            scope["path"] = PREFIX + _USUAL_METRICS_PATH
        if scope["path"].startswith(TRACKER_PATHS):
            send = sending_tracker_names(send)
        headers = dict(scope["headers"])
        refusal = _refuse_size(scope["headers"]) or _refuse_two_lengths(headers)
        # FastAPI reads all cookies of a request with the standard library's parser, which needs
        # quadratic time for some.
        scope["paceline.cookies"] = headers.get(b"cookie", b"")
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"cookie"]
        # No page of another site gets past the certificate, whatever it calls this host.
        is_open = self._is_open and (self._has_tls or _has_token(headers))
        refusal = refusal or _refuse_origin(
            headers, scope["scheme"], is_open=is_open, far_origin=self._far_origin
        )
        if refusal is None and not _is_api(scope["path"]):
            await self._web(scope, receive, send)
            return
        if refusal is None:
            refusal = await self._refuse_sender(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered within the reach of its sender, and note what changes."""
        identity: AccessIdentity | None = scope["paceline.identity"]
        reach = None if identity is None else identity.reach
        if identity is None or not scope["paceline.access"].is_audited:
            with acting(reach):
                await self._app(scope, receive, send)
            return
        objects: list[str] = []
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with acting(reach, objects):
                await self._app(scope, receive, noting)
        finally:
            token = identity.user if identity.secret is None else None
            action = f"{scope['method']} {scope['path'].removeprefix(PREFIX)[:_LONGEST_ACTION]}"
            self._audit.add(identity.owner, token, action, objects, status)

    async def _refuse_sender(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        if scope["path"].startswith(SIGNED_PATH):
            found = self._of_signed_url(scope)
        else:
            found = await self._identify(headers)
        identity = found if isinstance(found, AccessIdentity) else None
        scope["paceline.identity"] = identity
        access = self._scopes.access(scope["method"], scope["path"])
        scope["paceline.access"] = access
        is_admitted = identity is not None and scope["paceline.connection"].admit()
        if access.scope is RouteScope.PUBLIC:
            return None
        if identity is None:
            return found if isinstance(found, Response) else self._refuse_stranger(scope, headers)
        if not is_admitted:
            return _no_place_for_request()
        if not access.admits(identity.scope, identity.attempt_id):
            return _forbidden(identity, access.scope)
        reach, named = identity.reach, named_object(access.parameters)
        if reach is None or reach.sees is None or named is None:
            return None
        project = await asyncio.to_thread(self._project_of, *named)
        return _refuse_role(reach, project, *named, is_reading=access.is_reading)

    def _project_of(self, kind: str, key: str) -> int | None:
        with self._database.read(everything=True) as connection:
            return project_of(connection, kind, key)

    def _of_signed_url(self, scope: Scope) -> AccessIdentity | Response | None:
        """Return who may do what a signed URL says, and nothing else."""
        is_right = self._opens(scope["method"], scope["path"], scope["query_string"])
        return AccessIdentity("signed URL", None, RouteScope.TRACKER) if is_right else None

    def _refuse_stranger(self, scope: Scope, headers: dict[bytes, bytes]) -> Response:
        if scope["path"].startswith(SIGNED_PATH):
            return _wrong_signature()
        if b"authorization" not in headers:
            return _unauthorized()
        # A right token is looked at before, so this keeps nobody out who has one.
        address = (scope["client"] or ("",))[0]
        if not self._wrong_tokens.allows(address):
            return problem(
                429,
                "too_many_attempts",
                f"At most {self._wrong_tokens.max_failures} wrong tokens are taken in"
                f" {self._wrong_tokens.window_s:.0f} s. Hint: wait a minute.",
            )
        self._wrong_tokens.fail(address)
        return _unknown_token() if _has_token(headers) else _unauthorized()


class _Identification:
    """Identification of a request's sender; a `Response` refuses an invalid known token."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._sign_ins: SignIns = master.sign_ins
        self._cookie_name = cookie_name(master).encode()

    async def __call__(self, headers: dict[bytes, bytes]) -> AccessIdentity | Response | None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            return await self._of_token(token.strip())
        if scheme.lower() == b"basic":
            # Clients of W&B send `api:KEY`, those of MLflow a user with the token as password.
            with suppress(ValueError):
                return await self._of_token(b64decode(token, validate=True).partition(b":")[2])
            return None
        secret = find_cookie(headers.get(b"cookie", b""), self._cookie_name)
        if secret is None or headers.get(b"sec-fetch-site", b"none") not in (
            b"none",
            b"same-origin",
        ):
            return None
        user = await asyncio.to_thread(self._sign_ins.user_of, secret)
        reach = None if user is None else self._master.users.reach(user)
        if user is None or reach is None:
            return None
        return AccessIdentity(user, secret, _scope_within(reach, RouteScope.ADMIN), reach=reach)

    async def _of_token(self, sent: bytes) -> AccessIdentity | Response | None:
        if secrets.compare_digest(sent, self._master.home_token):
            return AccessIdentity(FIRST_USER, None, reach=Reach(FIRST_USER))
        text = sent.decode("latin-1")
        token = self._master.tokens.find(text)
        if token is not None:
            if token.is_revoked:
                return problem(401, "token_revoked", f"The token {token.name!r} was revoked.")
            if token.is_expired:
                return problem(401, "token_expired", f"The token {token.name!r} has expired.")
            scope, reach = RouteScope(token.scope.value), self._master.users.reach(token.user)
            if scope is RouteScope.RUNNER:
                # The cluster's: trials run on whoever leaves.
                reach = None
            elif reach is None:
                text = f"The user {token.user!r} of the token {token.name!r} was removed."
                return problem(401, "token_revoked", text)
            else:
                scope = _scope_within(reach, scope)
            return AccessIdentity(
                token.name, None, scope, token_id=token.id, expires_at=token.expires_at,
                reach=reach,
            )  # fmt: skip
        return await self._of_attempt(text)

    async def _of_attempt(self, text: str) -> AccessIdentity | Response | None:
        attempts = self._master.attempt_tokens
        attempt_id = attempts.attempt_of(text)
        if attempt_id is None:
            return None
        if not attempts.is_known_to_run(attempt_id) and not await asyncio.to_thread(
            attempts.is_usable, attempt_id
        ):
            return problem(401, "token_expired", f"Attempt {attempt_id} is over.")
        return AccessIdentity(f"attempt {attempt_id}", None, RouteScope.ATTEMPT, attempt_id)


def _has_token(headers: dict[bytes, bytes]) -> bool:
    """Return whether a request carries a token.

    Browsers never add one by themselves: no answer asks them for a user and a password.
    """
    return headers.get(b"authorization", b"").lower().startswith((b"bearer ", b"basic "))


def _refuse_size(headers: list[tuple[bytes, bytes]]) -> Response | None:
    """Refuse headers too expensive to read; see also `MAX_HEADER_BYTES`."""
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) <= _MAX_HEADERS and num_bytes <= MAX_HEADER_BYTES:
        return None
    return problem(
        431,
        "headers_too_large",
        f"A request must have at most {_MAX_HEADERS} headers with {MAX_HEADER_BYTES} bytes, but"
        f" has {len(headers)} with {num_bytes} bytes. Hint: a browser sends the cookies of all"
        " programs on this machine; delete those of others.",
    )


def _refuse_two_lengths(headers: dict[bytes, bytes]) -> Response | None:
    """Refuse ambiguous lengths: a proxy may count the requests differently than this server."""
    if not {b"content-length", b"transfer-encoding"} <= headers.keys():
        return None
    refusal = problem(
        400,
        "ambiguous_length",
        "A request must have a `Content-Length` or a `Transfer-Encoding`, but has both.",
    )
    # Connection closed after the refusal: its remaining bytes must not be read as a request.
    refusal.headers["connection"] = "close"
    return refusal


def _refuse_origin(
    headers: dict[bytes, bytes],
    scheme: str,
    *,
    is_open: bool = False,
    far_origin: str | None = None,
) -> Response | None:
    """Refuse requests of pages of others; `far_origin` is the master's behind a reverse proxy."""
    host = headers.get(b"host", b"").decode("latin-1")
    is_far = far_origin is not None and host.lower() == urlsplit(far_origin).netloc
    if not is_open and not is_far and _name_of(host) not in LOOPBACK_HOSTS:
        return problem(
            403,
            "wrong_host",
            f"The Host header must be loopback, not {host!r}. Hint: without a certificate"
            " (`paceline up --tls-cert`), browsers reach a master on its own machine or by an SSH"
            " tunnel only.",
        )
    known = (f"{scheme}://{host}", far_origin)
    if b"origin" in headers and headers[b"origin"].decode("latin-1") not in known:
        return problem(403, "wrong_origin", "Requests of other origins are refused.")
    return None


def _unauthorized() -> Response:
    return problem(
        401,
        "unauthorized",
        "A request must come from a browser that is signed in, or carry the token:"
        " `Authorization: Bearer ...`. Hint: `paceline login` prints a link that signs a browser"
        " in; the token lies in the file `token` of the master's home.",
    )


def _wrong_signature() -> Response:
    return problem(
        403,
        "wrong_signature",
        "The URL of a file must be one that the master handed out less than 6 hours ago, for the"
        " same method. Hint: ask for a new URL.",
    )


def _unknown_token() -> Response:
    return problem(
        401,
        "unauthorized",
        "The token of a request must be known to the master, but the one that was sent is not."
        " Hint: is `PACELINE_TOKEN` that of another master? The token of a master's home is in the"
        " file `token` there.",
    )


def _scope_within(reach: Reach, scope: RouteScope) -> RouteScope:
    """Return the scope in which a user can act: only administrators have that of the same name."""
    is_too_wide = scope is RouteScope.ADMIN and reach.sees is not None
    return RouteScope.USER if is_too_wide else scope


def _refuse_role(
    reach: Reach, project: int | None, kind: str, key: str, *, is_reading: bool
) -> Response | None:
    """Refuse a request about an object that its sender does not see, or may not change."""
    if project is None:
        return None  # the route says that there is none
    what = f"{KINDS[kind]} {key!r:.200}"
    if project not in (reach.sees or ()):
        return problem(404, "not_found", f"There is no {what}.")
    if is_reading or project in (reach.changes or ()):
        return None
    return problem(
        403,
        "role_too_low",
        f"The user must have the role 'editor' in the project of the {what}, but {reach.user!r} has"
        " 'viewer'. Hint: an administrator of the project gives it: `paceline user role"
        f" {reach.user} editor --project NAME`.",
    )


# What `paceline token create --scope` makes for a route whose scope is none of a token.
_TOKENS = {RouteScope.USER: "admin", RouteScope.ATTEMPT: "admin", RouteScope.TRACKER: "read"}


def _forbidden(identity: AccessIdentity, wanted: RouteScope) -> Response:
    # No token makes an administrator of somebody who is none.
    is_none = identity.reach is not None and identity.reach.sees is not None
    is_person = identity.attempt_id is None and identity.scope is not RouteScope.RUNNER
    if wanted in (RouteScope.ADMIN, RouteScope.ATTEMPT) and is_none and is_person:
        return problem(
            403,
            "scope_too_low",
            f"The user must be an administrator of the master for that, but {identity.owner!r} is"
            f" not. Hint: one can ask for it, or make you one: `paceline user role {identity.owner}"
            " --admin`.",
        )
    scope = _TOKENS.get(wanted, wanted.value)
    return problem(
        403,
        "scope_too_low",
        f"The token must have the scope {scope!r} for that, but {identity.user!r} has"
        f" {identity.scope.value!r}. Hint: `paceline token create NAME --scope {scope}` makes one"
        " that has it."
        if identity.attempt_id is None
        else f"The token of attempt {identity.attempt_id} opens the routes of this attempt only.",
    )


def _no_place_for_request() -> Response:
    return problem(
        503,
        "too_many_connections",
        "The master must have a connection left, but all are in use. Hint: close pages of the web"
        " UI, or raise the limit of open files (`ulimit -n`) before `paceline up`.",
    )


def _is_api(path: str) -> bool:
    is_own = path.lstrip("/").partition("/")[0].lower() == "api"
    return is_own or path.startswith(TRACKER_PATHS)


def _name_of(host: str) -> str | None:
    """Return the name or address in a Host header, None for malformed headers."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).lower()
