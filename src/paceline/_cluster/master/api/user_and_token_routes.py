"""Sign-in, tokens, users with their roles and quotas, and the log of what they changed."""

import asyncio
import time
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import Header, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.access_guard import (
    AccessIdentity,
    ConnectionOf,
    IdentityOf,
    cookie_name,
)
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.request_limits import Connection
from paceline._cluster.master.api.route_scopes import ApiRouter, RouteScope
from paceline._cluster.master.authentication import (
    SIGN_IN_S,
    StoredToken,
    TokenNameTakenError,
    TooManyAttemptsError,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import user_tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.quotas import group_owner, list_quotas, month_of, read_usage
from paceline._cluster.master.store.reach import FIRST_USER, current_reach, note_object
from paceline._cluster.messages.master_models import (
    AuditEntry,
    CreatedToken,
    HomeToken,
    Login,
    LoginForToken,
    NewPassword,
    NewReservation,
    NewToken,
    NewUser,
    Quota,
    Reservation,
    Session,
    SetQuota,
    SignInLink,
    Token,
    TokenScope,
    Usage,
    UsageKey,
    User,
    UserChange,
)
from paceline._cluster.messages.runner_messages import LOCAL_NAME, NAME_PATTERN

token_router = ApiRouter(tags=["tokens"], route_class=ReadingRoute)

TokenId = Annotated[int, Path(ge=1, le=2**62)]


@token_router.get("/tokens")
async def list_tokens(master: models.MasterOf, identity: IdentityOf) -> list[Token]:
    """List the tokens, the newest first; without the home's own and those of attempts.

    A token that was revoked or has expired is listed for 90 days. Administrators see all, others
    their own.
    """
    assert identity is not None
    return [
        Token.model_validate(_fields(token))
        for token in master.tokens.list()
        if _is_for(identity, token.user)
    ]


def _is_for(identity: AccessIdentity, user: str) -> bool:
    """Return whether a sender may give access in the name of a user, and take it."""
    return identity.scope is RouteScope.ADMIN or identity.owner == user


def check_own(identity: AccessIdentity | None, user: str) -> None:
    """Check that a request about a user's access comes from the user or an administrator.

    Raises:
        ApiError: It does not.
    """
    assert identity is not None
    if not _is_for(identity, user):
        raise models.ApiError(
            403,
            "not_yours",
            f"Only {user!r} and administrators may do that, but {identity.owner!r} is neither.",
        )


@token_router.post("/tokens", status_code=201)
async def create_token(
    request: NewToken, master: models.MasterOf, identity: IdentityOf
) -> CreatedToken:
    """Make a token and return its secret, once; needs a token itself."""
    require_token(identity)
    assert identity is not None
    user = request.user or identity.owner
    check_own(identity, user)
    if request.scope is TokenScope.RUNNER:
        # Runners are the cluster's, and stay when a user is removed, unless they are a user's own.
        check_own(identity, FIRST_USER)
        user = request.user or FIRST_USER
    is_clusters = request.scope is TokenScope.RUNNER and user == FIRST_USER
    if not is_clusters and master.users.reach(user) is None:
        raise models.ApiError(404, "not_found", f"There is no user {user!r}.")
    return await make_token(master, request, user)


async def make_token(master: Master, request: NewToken, user: str) -> CreatedToken:
    """Make a token that acts as a user."""
    note_object(f"token {request.name} of user {user}")
    made = master.tokens.create(
        request.name, request.scope, request.expires_in_s, node=request.node, pool=request.pool,
        user=user,
    )  # fmt: skip
    try:
        token, secret = await asyncio.wrap_future(made)
    except TokenNameTakenError as error:
        raise models.ApiError(409, "name_taken", str(error)) from error
    return CreatedToken.model_validate(_fields(token) | {"secret": secret})


@token_router.delete("/tokens/{token_id}", status_code=204)
async def revoke_token(token_id: TokenId, master: models.MasterOf, identity: IdentityOf) -> None:
    """Revoke a token for good; a second time changes nothing."""
    assert identity is not None
    known = master.tokens.get(token_id)
    if known is not None and not _is_for(identity, known.user):
        raise models.ApiError(404, "not_found", f"There is no token {token_id}.")
    if not await asyncio.wrap_future(master.tokens.revoke(token_id)):
        raise models.ApiError(404, "not_found", f"There is no token {token_id}.")
    master.events.notify()


@token_router.put("/home-token")
async def renew_home_token(master: models.MasterOf, identity: IdentityOf) -> HomeToken:
    """Put another token in place of the home's; needs a token itself."""
    require_token(identity)
    secret = await asyncio.to_thread(master.renew_home_token)
    master.events.notify()
    return HomeToken(secret=secret)


def require_token(identity: AccessIdentity | None) -> None:
    """Refuse browser sign-ins: a stolen sign-in must not be turned into lasting access.

    Raises:
        ApiError: The request came with a cookie.
    """
    assert identity is not None
    if identity.secret is not None:
        raise models.ApiError(
            403,
            "token_needed",
            "Passwords and tokens are set with a token only, not from a browser. Hint: `paceline"
            " user set-password`, `paceline token create`.",
        )


def _fields(token: StoredToken) -> dict[str, object]:
    return {name: getattr(token, name) for name in Token.model_fields}


sign_in_router = ApiRouter(tags=["sign-in"], route_class=ReadingRoute)

_SIGN_IN_PATH = "/api/v1/sign-in"
UserName = Annotated[str, Path(pattern="^[A-Za-z0-9_.-]{1,64}$")]


@sign_in_router.get("/session")
def read_session(master: models.MasterOf, identity: IdentityOf) -> Session:
    """Return who is signed in, and whether a password could sign in; needs no sign-in."""
    return Session(
        user=None if identity is None else identity.user,
        owner=None if identity is None else identity.owner,
        has_password=master.passwords.are_set(),
        scope=None if identity is None else identity.scope.value,
        is_shared=master.users.is_shared,
        oidc=None if master.oidc is None else master.oidc.settings.name,
    )


@sign_in_router.post("/login")
def log_in(
    request: Login,
    response: Response,
    master: models.MasterOf,
    connection: ConnectionOf,
    origin: Annotated[str, Header(include_in_schema=False)] = "",
) -> Session:
    """Sign a browser in with a password set by `paceline user set-password`."""
    _check_password(request, master, connection)
    set_session_cookie(response, master, request.user, is_secure=origin.startswith("https:"))
    is_admin = master.users.is_admin(request.user)
    return Session(
        user=request.user,
        owner=request.user,
        has_password=True,
        scope="admin" if is_admin else "user",
        is_shared=master.users.is_shared,
    )


@sign_in_router.post("/login-token", status_code=201)
async def log_in_for_token(
    request: LoginForToken, master: models.MasterOf, connection: ConnectionOf
) -> CreatedToken:
    """Make a token for all that a user may do, with the user's password."""
    await asyncio.to_thread(_check_password, request, master, connection)
    fields = {"name": request.name, "scope": TokenScope.ADMIN, "expires_in_s": request.expires_in_s}
    return await make_token(master, NewToken.model_validate(fields), request.user)


def _check_password(request: Login, master: Master, connection: Connection) -> None:
    try:
        is_known = master.passwords.check(request.user, request.password, connection.sender)
    except TooManyAttemptsError as error:
        raise models.ApiError(429, "too_many_attempts", str(error)) from error
    if not is_known or master.users.reach(request.user) is None:
        raise models.ApiError(
            401,
            "wrong_password",
            "User and password must fit, but do not. Hint: `paceline user set-password` sets one;"
            " `paceline login` prints a link that signs in without.",
        )


@sign_in_router.get("/sign-in", status_code=303, response_class=RedirectResponse)
def follow_sign_in_link(
    request: Request,
    master: models.MasterOf,
    token: Annotated[str, Query(max_length=200)],
) -> Response:
    """Sign a browser in by a link and redirect to the web UI; each link works once."""
    user = master.links.redeem(token)
    if user is not None and master.users.reach(user) is not None:
        reply = RedirectResponse("/", 303)
        set_session_cookie(reply, master, user)
        return reply
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/sign-in?problem=link", 303)
    raise models.ApiError(
        401,
        "link_used",
        "The link must be new, but was used or is too old. Hint: `paceline login` prints another.",
    )


@sign_in_router.post("/sign-in-links", status_code=201)
def create_sign_in_link(
    request: Request,
    master: models.MasterOf,
    identity: IdentityOf,
    user: Annotated[str | None, Query(max_length=64, description="By default the sender.")] = None,
) -> SignInLink:
    """Create a single-use link to sign a browser in as a user."""
    assert identity is not None
    user = user or identity.owner
    check_own(identity, user)
    if master.users.reach(user) is None:
        raise NotFoundError(f"There is no user {user!r}.")
    note_object(f"link for user {user}")
    token, expires_at = master.links.make(user)
    url = f"{request.url.scheme}://{request.headers['host']}{_SIGN_IN_PATH}?token={token}"
    return SignInLink(url=url, expires_at=expires_at)


@sign_in_router.post("/logout", status_code=204)
def log_out(response: Response, master: models.MasterOf, identity: IdentityOf) -> None:
    """End the sign-in of the requesting browser."""
    assert identity is not None
    if identity.secret is not None:
        master.sign_ins.close(identity.secret)
        master.events.notify()
        response.delete_cookie(cookie_name(master), httponly=True, samesite="strict")


@sign_in_router.put("/users/{name}/password", status_code=204)
async def set_password(
    name: UserName, request: NewPassword, master: models.MasterOf, identity: IdentityOf
) -> None:
    """Give a user a password and end the user's sign-ins; needs a token."""
    require_token(identity)
    check_own(identity, name)
    if master.users.reach(name) is None:
        raise NotFoundError(
            f"There is no user {name!r}. Hint: `paceline user add {name}` adds one."
        )
    master.links.forget(name)
    changed = await asyncio.to_thread(master.passwords.set, name, request.password)
    await asyncio.wrap_future(changed)
    master.events.notify()


def set_session_cookie(
    response: Response,
    master: Master,
    user: str,
    *,
    is_secure: bool = False,
    length_s: float = SIGN_IN_S,
) -> None:
    """Sign a browser in; `is_secure` if it came by TLS to a proxy in front of the master."""
    response.set_cookie(
        cookie_name(master),
        master.sign_ins.open(user, length_s),
        max_age=int(length_s),
        httponly=True,
        samesite="strict",
        secure=is_secure or master.certificate is not None,
    )


user_router = ApiRouter(tags=["users"], route_class=ReadingRoute)


@user_router.get("/users")
async def list_users(master: models.MasterOf) -> list[User]:
    """List the users by name, with those that were removed."""
    return master.users.all()


@user_router.post("/users", status_code=201)
async def add_user(request: NewUser, master: models.MasterOf) -> User:
    """Add a user, without a password; one that was removed before comes back."""
    note_object(f"user {request.name}")
    return await asyncio.wrap_future(
        master.users.add(
            request.name,
            role=request.role,
            is_admin=request.is_admin,
            is_service=request.is_service,
            is_awaited=master.oidc is not None and not (request.is_service or request.is_admin),
        )
    )


@user_router.patch("/users/{name}", status_code=204)
async def change_user(name: UserName, request: UserChange, master: models.MasterOf) -> None:
    """Make a user an administrator or take that right; choose the group, and the link for OIDC."""
    if request.is_admin is not None:
        await asyncio.wrap_future(master.users.set_admin(name, is_admin=request.is_admin))
    if request.group is not None:
        await asyncio.wrap_future(master.users.set_group(name, request.group or None))
        master.changes.wakeups.wake()
    if request.oidc_subject is not None:
        if request.oidc_subject and master.oidc is None:
            raise models.ApiError(
                409, "no_oidc", "The master must have a provider of OpenID Connect, but has none."
                " Hint: docs/lab.md explains `oidc.yaml`.",
            )  # fmt: skip
        issuer = "" if master.oidc is None else master.oidc.settings.issuer
        await asyncio.wrap_future(master.users.link(name, issuer, request.oidc_subject))
    master.events.notify()


@user_router.delete("/users/{name}", status_code=204)
async def remove_user(name: UserName, master: models.MasterOf) -> None:
    """Remove a user: tokens and sign-ins end, experiments and their trials stay."""
    await asyncio.wrap_future(master.users.remove(name))
    master.links.forget(name)
    master.events.notify()


Month = Annotated[str | None, Query(pattern=r"^20\d\d-(0[1-9]|1[0-2])$", description="In UTC.")]


@user_router.get("/usage")
def list_usage(
    master: models.MasterOf,
    since: Month = None,
    until: Month = None,
    by: Annotated[list[UsageKey] | None, Query(max_length=len(UsageKey))] = None,
) -> list[Usage]:
    """List the slot hours that trials used, most first; of this month by default.

    Without `by` there is a row for each month, user, project and pool. Of the projects that the
    sender sees.
    """
    this_month = month_of(time.time())
    with master.database.read() as connection:
        return read_usage(
            connection, since or until or this_month, until or this_month, by or list(UsageKey)
        )


@user_router.get("/audit")
def list_audit(
    master: models.MasterOf,
    limit: models.Limit = 100,
    before: Annotated[int | None, Query(ge=1, le=2**62, description="Only older ones.")] = None,
    user: Annotated[str | None, Query(max_length=64)] = None,
) -> list[AuditEntry]:
    """List who changed what, the newest first."""
    return master.audit.read(user=user, before=before, limit=limit)


quota_router = ApiRouter(tags=["users"], route_class=ReadingRoute)

Kind = Literal["user", "group", "project"]
Name = Annotated[str, Path(min_length=1, max_length=64)]
NodeName = Annotated[str, Path(pattern=NAME_PATTERN)]
Revision = Annotated[
    int, Query(ge=1, le=2**31 - 1, description="The revision that the change began from.")
]
_quotas, _reservations = user_tables.quotas, user_tables.reservations


@quota_router.get("/quotas")
def show_quotas(master: models.MasterOf) -> list[Quota]:
    """List quotas and what counts against them: the sender's own, and those of seen projects."""
    reach = current_reach()
    now = time.time()
    with master.database.read(everything=True) as connection:
        found = list_quotas(connection, master.reconciler.cluster(connection, now).holding, now)
    if reach is None or reach.sees is None:
        return found
    seen = {one.name for one in master.users.projects(reach)}
    group = master.users.group_of(reach.user)
    return [
        one
        for one in found
        if one.user == reach.user or one.project in seen or (group and one.group == group)
    ]


@quota_router.put("/quotas/{kind}/{name}", status_code=204)
async def set_quota(kind: Kind, name: Name, wanted: SetQuota, master: models.MasterOf) -> None:
    """Set share and limits of a user, group or project, unless changed since `revision`."""

    def job(transaction: Transaction) -> None:
        key = _key(master, kind, name, must_be_known=True)
        _take_quota(transaction, master, kind, name, key, wanted.revision)
        values = wanted.model_dump() | {"revision": wanted.revision + 1}
        transaction.connection.execute(sa.insert(_quotas).values(**key, **values))

    await models.write_rows(master, job)


@quota_router.delete("/quotas/{kind}/{name}", status_code=204)
async def delete_quota(kind: Kind, name: Name, revision: Revision, master: models.MasterOf) -> None:
    """Delete share and limits, unless they were changed since `revision`."""

    def job(transaction: Transaction) -> None:
        key = _key(master, kind, name)
        _take_quota(transaction, master, kind, name, key, revision)

    await models.write_rows(master, job)


def _key(
    master: Master, kind: Kind, name: str, *, must_be_known: bool = False
) -> dict[str, str | int]:
    """Return the key of a quota; one of a removed user stays, as do the user's trials."""
    if kind == "project":
        return {"user": "", "project_id": master.users.project_id(name)}
    if kind == "group":
        if must_be_known and not master.users.has_group(name):
            hint = "`paceline user group USER NAME` makes one."
            raise NotFoundError(f"There is no group {name!r}. Hint: {hint}")
        return {"user": group_owner(name), "project_id": 0}
    if must_be_known and all(one.name != name for one in master.users.all()):
        raise NotFoundError(f"There is no user {name!r}.")
    return {"user": name, "project_id": 0}


def _take_quota(
    transaction: Transaction, master: Master, kind: Kind, name: str, key: Any, revision: int
) -> None:
    """Delete a quota, or refuse if it has another revision."""
    place = [_quotas.c[column] == value for column, value in key.items()]
    query = sa.select(_quotas.c.revision).where(*place)
    found = transaction.connection.scalar(query) or 0
    if not found and revision:
        raise NotFoundError(f"There is no quota of the {kind} {name!r}.")
    if found != revision:
        raise models.ApiError(
            409,
            "quota_changed",
            f"The change of the quota of the {kind} {name!r} must begin from its newest revision,"
            f" {found}, but got {revision}: someone may have changed it. Hint: `paceline quota"
            " list` shows it.",
        )
    note_object(f"quota of {kind} {name}")
    transaction.connection.execute(sa.delete(_quotas).where(*place))
    transaction.after_commit(master.changes.wakeups.wake)


@quota_router.post("/nodes/{name}/reservations", status_code=201)
async def reserve_node(
    name: NodeName, wanted: NewReservation, master: models.MasterOf
) -> Reservation:
    """Reserve a node for the trials of a user."""
    if not wanted.begins_at < wanted.ends_at or wanted.ends_at <= time.time():
        raise models.ApiError(
            422, "invalid_request",
            "A reservation must end after it begins, and after now, but got"
            f" {models.utc_text(wanted.begins_at)} to {models.utc_text(wanted.ends_at)}.",
        )  # fmt: skip
    known = [LOCAL_NAME, *(node.name for node in master.nodes.all())]
    if name not in known:
        raise NotFoundError(f"There is no node {name!r}. The nodes are: {', '.join(known)}.")
    if master.users.reach(wanted.user) is None:
        raise NotFoundError(f"There is no user {wanted.user!r}.")

    def job(transaction: Transaction) -> Reservation:
        columns = _reservations.c
        statement = sa.insert(_reservations).values(node=name, **wanted.model_dump())
        row = transaction.connection.execute(statement.returning(*columns)).one()
        note_object(f"reservation {row.id}")
        transaction.after_commit(master.changes.wakeups.wake)
        return Reservation.model_validate(row, from_attributes=True)

    return await models.write_rows(master, job)


@quota_router.delete("/nodes/{name}/reservations/{reservation_id}", status_code=204)
async def end_reservation(
    name: NodeName, reservation_id: Annotated[int, Path(ge=1, le=2**62)], master: models.MasterOf
) -> None:
    """End a reservation of a node, also before it began."""

    def job(transaction: Transaction) -> None:
        columns = _reservations.c
        place = (columns.id == reservation_id, columns.node == name)
        if not transaction.connection.execute(sa.delete(_reservations).where(*place)).rowcount:
            raise NotFoundError(f"There is no reservation {reservation_id} of the node {name!r}.")
        note_object(f"reservation {reservation_id}")
        transaction.after_commit(master.changes.wakeups.wake)

    await models.write_rows(master, job)
