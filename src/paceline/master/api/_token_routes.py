"""Routes of tokens: make, list and revoke them."""

import asyncio
from typing import Annotated

from fastapi import Path

from paceline.master.api._access_guard import AccessIdentity, IdentityOf
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf
from paceline.master.auth import StoredToken, TokenNameTakenError
from paceline.messages import tokens

router = ApiRouter(tags=["tokens"], route_class=ReadingRoute)

TokenId = Annotated[int, Path(ge=1, le=2**62)]


@router.get("/tokens")
async def list_tokens(master: MasterOf) -> list[tokens.Token]:
    """List the tokens, the newest first; the home's own and those of attempts are not among them.

    A token that was revoked or has expired is listed for 90 days.
    """
    return [tokens.Token.model_validate(_fields(token)) for token in master.tokens.list()]


@router.post("/tokens", status_code=201)
async def create_token(
    request: tokens.NewToken, master: MasterOf, identity: IdentityOf
) -> tokens.CreatedToken:
    """Make a token and return its secret, once; needs a token itself."""
    require_token(identity)
    made = master.tokens.create(
        request.name, request.scope, request.expires_in_s, node=request.node, pool=request.pool
    )
    try:
        token, secret = await asyncio.wrap_future(made)
    except TokenNameTakenError as error:
        raise ApiError(409, "name_taken", str(error)) from error
    return tokens.CreatedToken.model_validate(_fields(token) | {"secret": secret})


@router.delete("/tokens/{token_id}", status_code=204)
async def revoke_token(token_id: TokenId, master: MasterOf) -> None:
    """Revoke a token for good; a second time changes nothing."""
    if not await asyncio.wrap_future(master.tokens.revoke(token_id)):
        raise ApiError(404, "not_found", f"There is no token {token_id}.")


@router.put("/home-token")
async def renew_home_token(master: MasterOf, identity: IdentityOf) -> tokens.HomeToken:
    """Put another token in place of the home's; needs a token itself."""
    require_token(identity)
    return tokens.HomeToken(secret=await asyncio.to_thread(master.renew_home_token))


def require_token(identity: AccessIdentity | None) -> None:
    """Refuse a browser: whoever gets hold of its sign-in must not keep access by it.

    Raises:
        ApiError: The request came with a cookie.
    """
    assert identity is not None
    if identity.secret is not None:
        raise ApiError(
            403,
            "token_needed",
            "Passwords and tokens are set with a token only, not from a browser. Hint: `paceline"
            " user set-password`, `paceline token create`.",
        )


def _fields(token: StoredToken) -> dict[str, object]:
    return {name: getattr(token, name) for name in tokens.Token.model_fields}
