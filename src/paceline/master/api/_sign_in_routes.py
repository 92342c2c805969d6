"""Routes of signing in and out."""

import asyncio
from typing import Annotated

from fastapi import Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from paceline.master._master import Master
from paceline.master.api._access_guard import ConnectionOf, IdentityOf, cookie_name
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.api._token_routes import require_token
from paceline.master.auth import ADMIN, SIGN_IN_S, TooManyAttemptsError
from paceline.messages.sign_ins import Login, NewPassword, Session, SignInLink

router = ApiRouter(tags=["sign-in"], route_class=ReadingRoute)

_SIGN_IN_PATH = "/api/v1/sign-in"
UserName = Annotated[str, Path(pattern="^[A-Za-z0-9_.-]{1,64}$")]


@router.get("/session")
def read_session(master: MasterOf, identity: IdentityOf) -> Session:
    """Tell who is signed in, and whether a password could sign in; needs no sign-in."""
    return Session(
        user=None if identity is None else identity.user,
        has_password=master.passwords.are_set(),
        scope=None if identity is None else identity.scope.value,
    )


@router.post("/login")
def log_in(
    request: Login, response: Response, master: MasterOf, connection: ConnectionOf
) -> Session:
    """Sign a browser in by a password that `paceline user set-password` gave."""
    try:
        is_known = master.passwords.check(request.user, request.password, connection.sender)
    except TooManyAttemptsError as error:
        raise ApiError(429, "too_many_attempts", str(error)) from error
    if not is_known:
        raise ApiError(
            401,
            "wrong_password",
            "User and password must fit, but do not. Hint: `paceline user set-password` sets one;"
            " `paceline login` prints a link that signs in without.",
        )
    _set_cookie(response, master, request.user)
    return Session(user=request.user, has_password=True, scope="admin")


@router.get("/sign-in", status_code=303, response_class=RedirectResponse)
def follow_sign_in_link(
    request: Request,
    master: MasterOf,
    token: Annotated[str, Query(max_length=200)],
) -> Response:
    """Sign a browser in by a link, and lead it to the web UI; each link works once."""
    if master.links.redeem(token):
        reply = RedirectResponse("/", 303)
        _set_cookie(reply, master, ADMIN)
        return reply
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/sign-in?problem=link", 303)
    raise ApiError(
        401,
        "link_used",
        "The link must be new, but was used or is too old. Hint: `paceline login` prints another.",
    )


@router.post("/sign-in-links", status_code=201)
def create_sign_in_link(request: Request, master: MasterOf) -> SignInLink:
    """Make a link that signs a browser in, once."""
    token, expires_at = master.links.make()
    url = f"{request.url.scheme}://{request.headers['host']}{_SIGN_IN_PATH}?token={token}"
    return SignInLink(url=url, expires_at=expires_at)


@router.post("/logout", status_code=204)
def log_out(response: Response, master: MasterOf, identity: IdentityOf) -> None:
    """End the sign-in of the browser that asks."""
    assert identity is not None
    if identity.secret is not None:
        master.sign_ins.close(identity.secret)
        response.delete_cookie(cookie_name(master), httponly=True, samesite="strict")


@router.put("/users/{name}/password", status_code=204)
async def set_password(
    name: UserName, request: NewPassword, master: MasterOf, identity: IdentityOf
) -> None:
    """Give a user a password and end the user's sign-ins; needs a token."""
    require_token(identity)
    if name != ADMIN:
        raise ApiError(
            404,
            "not_found",
            f"The user must be {ADMIN!r}, the only one, but got {name!r}. Hint: `paceline token"
            " create NAME --scope read` makes a token for another person or program.",
        )
    changed = await asyncio.to_thread(master.passwords.set, name, request.password)
    await asyncio.wrap_future(changed)


def _set_cookie(response: Response, master: Master, user: str) -> None:
    response.set_cookie(
        cookie_name(master),
        master.sign_ins.open(user),
        max_age=SIGN_IN_S,
        httponly=True,
        samesite="strict",
        secure=master.certificate is not None,
    )
