"""Routes of quotas of users and projects, and of reservations of nodes."""

import time
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from sqlalchemy import delete, insert, select

from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import (
    ApiError,
    MasterOf,
    utc_text,
    write_rows,
)
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.quotas import group_owner, list_quotas
from paceline._cluster.master.store.reach import current_reach, note_object
from paceline._cluster.messages.master_models import NewReservation, Quota, Reservation, SetQuota
from paceline._cluster.messages.runner_messages import LOCAL_NAME, NAME_PATTERN

quota_router = ApiRouter(tags=["users"], route_class=ReadingRoute)

Kind = Literal["user", "group", "project"]
Name = Annotated[str, Path(min_length=1, max_length=64)]
NodeName = Annotated[str, Path(pattern=NAME_PATTERN)]
Revision = Annotated[
    int, Query(ge=1, le=2**31 - 1, description="The revision that the change began from.")
]
_quotas, _reservations = tables.quotas, tables.reservations


@quota_router.get("/quotas")
def show_quotas(master: MasterOf) -> list[Quota]:
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
async def set_quota(kind: Kind, name: Name, wanted: SetQuota, master: MasterOf) -> None:
    """Set share and limits of a user, group or project, unless changed since `revision`."""

    def job(transaction: Transaction) -> None:
        key = _key(master, kind, name, must_be_known=True)
        _take_quota(transaction, master, kind, name, key, wanted.revision)
        values = wanted.model_dump() | {"revision": wanted.revision + 1}
        transaction.connection.execute(insert(_quotas).values(**key, **values))

    await write_rows(master, job)


@quota_router.delete("/quotas/{kind}/{name}", status_code=204)
async def delete_quota(kind: Kind, name: Name, revision: Revision, master: MasterOf) -> None:
    """Delete share and limits, unless they were changed since `revision`."""

    def job(transaction: Transaction) -> None:
        key = _key(master, kind, name)
        _take_quota(transaction, master, kind, name, key, revision)

    await write_rows(master, job)


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
    query = select(_quotas.c.revision).where(*place)
    found = transaction.connection.scalar(query) or 0
    if not found and revision:
        raise NotFoundError(f"There is no quota of the {kind} {name!r}.")
    if found != revision:
        raise ApiError(
            409,
            "quota_changed",
            f"The change of the quota of the {kind} {name!r} must begin from its newest revision,"
            f" {found}, but got {revision}: someone may have changed it. Hint: `paceline quota"
            " list` shows it.",
        )
    note_object(f"quota of {kind} {name}")
    transaction.connection.execute(delete(_quotas).where(*place))
    transaction.after_commit(master.changes.wakeups.wake)


@quota_router.post("/nodes/{name}/reservations", status_code=201)
async def reserve_node(name: NodeName, wanted: NewReservation, master: MasterOf) -> Reservation:
    """Reserve a node for the trials of a user."""
    if not wanted.begins_at < wanted.ends_at or wanted.ends_at <= time.time():
        raise ApiError(
            422, "invalid_request",
            "A reservation must end after it begins, and after now, but got"
            f" {utc_text(wanted.begins_at)} to {utc_text(wanted.ends_at)}.",
        )  # fmt: skip
    known = [LOCAL_NAME, *(node.name for node in master.nodes.all())]
    if name not in known:
        raise NotFoundError(f"There is no node {name!r}. The nodes are: {', '.join(known)}.")
    if master.users.reach(wanted.user) is None:
        raise NotFoundError(f"There is no user {wanted.user!r}.")

    def job(transaction: Transaction) -> Reservation:
        columns = _reservations.c
        statement = insert(_reservations).values(node=name, **wanted.model_dump())
        row = transaction.connection.execute(statement.returning(*columns)).one()
        note_object(f"reservation {row.id}")
        transaction.after_commit(master.changes.wakeups.wake)
        return Reservation.model_validate(row, from_attributes=True)

    return await write_rows(master, job)


@quota_router.delete("/nodes/{name}/reservations/{reservation_id}", status_code=204)
async def end_reservation(
    name: NodeName, reservation_id: Annotated[int, Path(ge=1, le=2**62)], master: MasterOf
) -> None:
    """End a reservation of a node, also before it began."""

    def job(transaction: Transaction) -> None:
        columns = _reservations.c
        place = (columns.id == reservation_id, columns.node == name)
        if not transaction.connection.execute(delete(_reservations).where(*place)).rowcount:
            raise NotFoundError(f"There is no reservation {reservation_id} of the node {name!r}.")
        note_object(f"reservation {reservation_id}")
        transaction.after_commit(master.changes.wakeups.wake)

    await write_rows(master, job)
