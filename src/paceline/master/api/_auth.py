"""Who may ask: every route needs the token unless it is listed as public.

What does not lie below `/api` is the web UI's: its files are no secret, and no route lies there.
"""

import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.master.api._problems import problem

PUBLIC_PATHS = frozenset({"/api/v1/health"})
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Guard:
    """ASGI middleware: checks Host and Origin, then the bearer token.

    Requests for the web UI are handed to `web`, all others to `app`.

    Host and Origin are checked because a browser sends requests of any page to loopback; such a
    page can neither choose the Host header nor hide its Origin.
    """

    def __init__(self, app: ASGIApp, token: str, web: ASGIApp) -> None:
        self._app = app
        self._web = web
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = None
        host = headers.get(b"host", b"").decode("latin-1")
        if _name_of(host) not in _LOOPBACK_NAMES:
            refusal = problem(403, "wrong_host", f"The Host header must be loopback, not {host!r}.")
        elif b"origin" in headers and headers[b"origin"].decode("latin-1") != f"http://{host}":
            refusal = problem(403, "wrong_origin", "Requests of other origins are refused.")
        elif not _is_api(scope["path"]):
            await self._web(scope, receive, send)
            return
        elif scope["path"] not in PUBLIC_PATHS and not self._is_known(headers):
            refusal = problem(
                401,
                "unauthorized",
                "A request must carry the token: `Authorization: Bearer ...`. Hint: it lies in"
                " the file `token` of the master's home.",
            )
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(token.strip(), self._token)


def _is_api(path: str) -> bool:
    return path.lstrip("/").partition("/")[0].lower() == "api"


def _name_of(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
