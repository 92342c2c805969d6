"""Sign-in by OpenID Connect, of browsers and, by a code that people copy, of the command line."""

import asyncio
import hashlib
import hmac
import logging
import re
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

from fastapi import Query, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

from paceline._cluster.master.api.access_guard import cookie_name, cookies_of, find_cookie
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf
from paceline._cluster.master.api.route_scopes import PREFIX, ApiRouter
from paceline._cluster.master.api.user_and_token_routes import make_token, set_session_cookie
from paceline._cluster.master.api.web_ui_files import has_web_ui
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.oidc_provider import FLOW_S, Flow, OidcError, OidcPerson, OidcProvider
from paceline._cluster.messages.master_models import CreatedToken, NewToken, OidcCode, TokenScope

logger = logging.getLogger(__name__)

oidc_router = ApiRouter(tags=["sign-in"])

_FOLDER = f"{PREFIX}/oidc"
_CALLBACK = f"{_FOLDER}/callback"
# Sign-ins of a browser that have begun; headers with more cookies would be too large one day.
_MAX_BEGUN = 8
# What browsers read as another host (`//`, `/\`), or leave out (tabs and ends of lines), is none.
_OWN_PATH = re.compile(r"/(?!/)[!-\[\]-~]{0,1999}")
# Not a name of a user: the audit log has refused sign-ins below it.
_NOBODY = "(sign-in)"


def _provider_of(master: Master) -> OidcProvider:
    if master.oidc is None:
        raise ApiError(
            404,
            "no_oidc",
            "The master must have a provider of OpenID Connect, but has none. Hint: docs/lab.md"
            " explains `oidc.yaml`.",
        )
    return master.oidc


def _flow_cookie(master: Master, state: str) -> str:
    """Return a cookie's name: each tab has its own, so that none ends the sign-in of another."""
    digest = hashlib.sha256(state.encode("utf-8", "replace")).hexdigest()
    return f"{cookie_name(master)}_oidc_{digest[:12]}"


def _cookie_options(base: str) -> dict[str, Any]:
    """Return options of the cookies of a sign-in, which only its routes get."""
    path = f"{urlsplit(base).path}{_FOLDER}"
    # The provider sends the browser back: a strict cookie would not come along.
    return {"path": path, "httponly": True, "samesite": "lax", "secure": base.startswith("https:")}


@oidc_router.get("/oidc/sign-in", status_code=303, response_class=RedirectResponse)
async def begin_oidc_sign_in(
    request: Request,
    master: MasterOf,
    next_path: Annotated[
        str, Query(alias="next", max_length=2000, description="A path of the web UI.")
    ] = "/",
    challenge: Annotated[
        str | None,
        Query(pattern="^[A-Za-z0-9_-]{43}$", description="SHA-256 for a code in place of a cookie"),
    ] = None,
) -> Response:
    """Redirect a browser to the provider; with `challenge`, it is shown a code for a token."""
    provider = _provider_of(master)
    own = f"{request.url.scheme}://{request.headers['host']}"
    base = (provider.settings.url or own).rstrip("/")
    path = next_path if _OWN_PATH.fullmatch(next_path) else "/"
    try:
        url, flow, sealed = await provider.begin(f"{base}{_CALLBACK}", path, challenge)
    except OidcError as error:
        return _refusal(request, error, base, path)
    reply, options = RedirectResponse(url, 303), _cookie_options(base)
    begun = re.findall(rf"{cookie_name(master)}_oidc_\w+".encode(), cookies_of(request))
    for name in begun if len(begun) >= _MAX_BEGUN else ():
        reply.delete_cookie(name.decode(), **options)
    reply.set_cookie(_flow_cookie(master, flow.state), sealed, max_age=int(FLOW_S), **options)
    return reply


@oidc_router.get("/oidc/callback", status_code=303, response_class=RedirectResponse)
async def finish_oidc_sign_in(
    request: Request,
    master: MasterOf,
    state: Annotated[str, Query(max_length=200)] = "",
    code: Annotated[str | None, Query(max_length=4096)] = None,
    error: Annotated[str | None, Query(max_length=200)] = None,
    iss: Annotated[str | None, Query(max_length=2000)] = None,
) -> Response:
    """Take the provider's answer, and sign in the browser that began; then show the web UI."""
    provider = _provider_of(master)
    name = _flow_cookie(master, state)
    sealed = find_cookie(cookies_of(request), name.encode())
    base, wanted = (provider.settings.url or "").rstrip("/"), "/"
    person: OidcPerson | None = None
    try:
        flow = provider.take_flow(state, sealed or "")
        base, wanted = flow.redirect_uri.removesuffix(_CALLBACK), flow.next
        person = await provider.finish(flow, {"code": code, "error": error, "iss": iss})
        user = await _admit(master, provider, person)
    except OidcError as refusal:
        if person is not None:
            objects = [f"user {person.name[:64]}", f"subject {person.subject}"]
            master.audit.add(_NOBODY, None, f"refused: {refusal.code}", objects, refusal.status)
        logger.warning("A sign-in by OpenID Connect was refused: %s", refusal)
        reply = _refusal(request, refusal, base, wanted)
    else:
        reply = await asyncio.to_thread(_welcome, master, provider, user, flow, base)
    reply.delete_cookie(name, **_cookie_options(base))
    return reply


async def _admit(master: Master, provider: OidcProvider, person: OidcPerson) -> str:
    try:
        user, changed = await asyncio.wrap_future(master.users.admit(person, provider.settings))
    except NotFoundError as error:
        raise OidcError("oidc_unknown", f"No user can be added: {error}") from error
    if changed:
        master.audit.add(user, None, "sign-in by OpenID Connect", changed, 200)
        master.changes.wakeups.wake()
        master.events.notify()
    return user


def _welcome(master: Master, provider: OidcProvider, user: str, flow: Flow, base: str) -> Response:
    if flow.challenge is None:
        reply = RedirectResponse(f"{base}{flow.next}", 303)
        set_session_cookie(
            reply, master, user, is_secure=base.startswith("https:"),
            length_s=provider.settings.session_hours * 3600.0,
        )  # fmt: skip
        return reply
    code, _ = provider.codes.make(f"{flow.challenge} {user}")
    if has_web_ui():
        return RedirectResponse(f"{base}/sign-in?code={code}", 303)
    return PlainTextResponse(f"The code for `paceline login`, for five minutes:\n\n{code}\n")


@oidc_router.post("/oidc/token", status_code=201)
async def redeem_oidc_code(request: OidcCode, master: MasterOf) -> CreatedToken:
    """Make a token for all that a user may do, by a code that a browser was shown."""
    from authlib.oauth2.rfc7636 import create_s256_code_challenge

    provider = _provider_of(master)
    challenge, _, user = (provider.codes.redeem(request.code) or "").partition(" ")
    found = create_s256_code_challenge(request.verifier)
    if not hmac.compare_digest(found.encode(), challenge.encode()):
        user = ""
    if master.users.reach(user) is None:
        raise ApiError(
            401,
            "code_used",
            "The code must be new, and for the link that `paceline login` printed, but is not."
            " Hint: run `paceline login --oidc` again.",
        )
    fields = {"name": request.name, "scope": TokenScope.ADMIN, "expires_in_s": request.expires_in_s}
    return await make_token(master, NewToken.model_validate(fields), user)


def _refusal(request: Request, error: OidcError, base: str, wanted: str) -> Response:
    """Return an answer to a refused sign-in; a page gets no text from an address."""
    if "text/html" in request.headers.get("accept", ""):
        query = urlencode({"problem": error.code} | ({} if wanted == "/" else {"next": wanted}))
        return RedirectResponse(f"{base}/sign-in?{query}", 303)
    raise ApiError(error.status, error.code, str(error))
