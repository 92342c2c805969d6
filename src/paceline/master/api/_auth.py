"""Access control: every route needs the token or a sign-in unless it is listed as public.

What does not lie below `/api` is the web UI's: its files are no secret, and no route lies there.
"""

import asyncio
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Annotated

from fastapi import Depends, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.master._master import Master
from paceline.master.api._problems import problem
from paceline.master.auth import ADMIN

PUBLIC_PATHS = frozenset({"/api/v1/health", "/api/v1/login", "/api/v1/session", "/api/v1/sign-in"})
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True)
class Identity:
    """Sender of a request; `secret` is the one of the cookie, None for whoever has the token."""

    user: str
    secret: str | None


async def _identity(request: Request) -> Identity | None:
    found: Identity | None = request.scope["paceline.identity"]
    return found


IdentityOf = Annotated[Identity | None, Depends(_identity)]


def cookie_name(master: Master) -> str:
    """Return the name of the sign-in cookie: browsers share cookies between a host's ports."""
    return f"paceline_{master.home.cluster_id[:8]}"


class Guard:
    """ASGI middleware: checks Host and Origin, then the bearer token or the sign-in cookie.

    Requests for the web UI are handed to `web`, all others to `app`. Host and Origin are checked
    because a browser sends requests of any page to loopback; such a page can neither choose the
    Host header nor hide its Origin. Pages of another port may send the cookie with what a GET
    shows or downloads, so what the browser says of their origin is checked as well.
    """

    def __init__(self, app: ASGIApp, master: Master, web: ASGIApp) -> None:
        self._app = app
        self._web = web
        self._token = master.home.token.encode()
        self._sign_ins = master.sign_ins
        self._cookie_name = cookie_name(master)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = _refuse_origin(headers)
        if refusal is None and not _is_api(scope["path"]):
            await self._web(scope, receive, send)
            return
        if refusal is None:
            identity = scope["paceline.identity"] = await self._identify(headers)
            is_admitted = identity is not None and scope["paceline.connection"].admit()
            if scope["path"] not in PUBLIC_PATHS and not is_admitted:
                refusal = _unauthorized() if identity is None else _no_place()
        await (refusal or self._app)(scope, receive, send)

    async def _identify(self, headers: dict[bytes, bytes]) -> Identity | None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and secrets.compare_digest(token.strip(), self._token):
            return Identity(ADMIN, None)
        secret = self._cookie(headers)
        if secret is None or headers.get(b"sec-fetch-site", b"none") not in (
            b"none",
            b"same-origin",
        ):
            return None
        user = await asyncio.to_thread(self._sign_ins.user_of, secret)
        return None if user is None else Identity(user, secret)

    def _cookie(self, headers: dict[bytes, bytes]) -> str | None:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return None
        found = cookies.get(self._cookie_name)
        return None if found is None else found.value


def _refuse_origin(headers: dict[bytes, bytes]) -> Response | None:
    host = headers.get(b"host", b"").decode("latin-1")
    if _name_of(host) not in _LOOPBACK_NAMES:
        return problem(403, "wrong_host", f"The Host header must be loopback, not {host!r}.")
    if b"origin" in headers and headers[b"origin"].decode("latin-1") != f"http://{host}":
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


def _no_place() -> Response:
    return problem(
        503,
        "too_many_connections",
        "The master must have a connection left, but all are in use. Hint: close pages of the web"
        " UI, or raise the limit of open files (`ulimit -n`) before `paceline up`.",
    )


def _is_api(path: str) -> bool:
    return path.lstrip("/").partition("/")[0].lower() == "api"


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
