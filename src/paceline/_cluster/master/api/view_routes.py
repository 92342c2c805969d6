"""Saved views of comparisons: all users see them, their owners change them."""

import time
from typing import Annotated, Any

from fastapi import Path, Query
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import current_reach, current_user
from paceline._cluster.messages.master_models import EditView, NewView, View

view_router = ApiRouter(tags=["views"])

_MOST_VIEWS = 1000
_views = tables.views

ViewId = Annotated[int, Path(ge=1, le=2**62)]
Version = Annotated[
    int, Query(ge=1, le=2**62, description="The version that the change began from.")
]


@view_router.get("/views")
def list_views(master: MasterOf) -> list[View]:
    """List the saved views by name."""
    with master.database.read() as connection:
        rows = connection.execute(select(_views).order_by(_views.c.name, _views.c.id)).all()
    return [_view_of(row) for row in rows]


@view_router.post("/views", status_code=201)
async def create_view(request: NewView, master: MasterOf) -> View:
    """Save a view under a new name."""

    def job(transaction: Transaction) -> View:
        connection = transaction.connection
        number = connection.scalar(select(func.count(_views.c.id)))
        if number is not None and number >= _MOST_VIEWS:
            raise ApiError(
                409,
                "too_many_views",
                f"There must be at most {_MOST_VIEWS} views. Hint: delete some first.",
            )
        return _store(connection, None, request, version=1)

    return await write_rows(master, job)


@view_router.put("/views/{view_id}")
async def replace_view(view_id: ViewId, request: EditView, master: MasterOf) -> View:
    """Replace a view's name, search and default, unless it was changed since `version`."""

    def job(transaction: Transaction) -> View:
        _check_version(transaction.connection, view_id, request.version)
        return _store(transaction.connection, view_id, request, version=request.version + 1)

    return await write_rows(master, job)


@view_router.delete("/views/{view_id}", status_code=204)
async def delete_view(view_id: ViewId, version: Version, master: MasterOf) -> None:
    """Delete a view, unless it was changed since `version`."""

    def job(transaction: Transaction) -> None:
        _check_version(transaction.connection, view_id, version)
        transaction.connection.execute(delete(_views).where(_views.c.id == view_id))

    await write_rows(master, job)


def _check_version(connection: Connection, view_id: int, version: int) -> None:
    found = connection.execute(select(_views).where(_views.c.id == view_id)).first()
    if found is None:
        raise ApiError(
            404, "not_found", f"There is no view {view_id}: someone may have deleted it."
        )
    reach = current_reach()
    if reach is not None and reach.changes is not None and found.owner != reach.user:
        raise ApiError(
            403,
            "not_owner",
            f"A view is changed by its owner, {found.owner}, or by an administrator. Hint: save"
            " yours under another name.",
        )
    if found.version != version:
        raise ApiError(
            409,
            "view_changed",
            f"The change of view {found.name!r} must begin from its newest version,"
            f" {found.version}, but got {version}. Hint: load it again, replace it with that"
            " version, or save yours under another name.",
        )


def _store(connection: Connection, view_id: int | None, request: NewView, version: int) -> View:
    columns = _views.c
    taken = connection.scalar(select(columns.id).where(columns.name == request.name))
    if taken not in (None, view_id):
        raise ApiError(
            409,
            "name_taken",
            f"The name of a view must be new, but {request.name!r} is there. Hint: choose another"
            " name, or replace that view.",
        )
    if request.is_default:
        connection.execute(
            update(_views)
            .where(
                columns.is_default, columns.id != (view_id or 0), columns.owner == current_user()
            )
            .values(is_default=False, version=columns.version + 1)
        )
    values = {**request.model_dump(exclude={"version"}), "version": version}
    values["changed_at"] = time.time()
    statement: Any = insert(_views)
    if view_id is None:
        values["owner"] = current_user()
    else:
        statement = update(_views).where(columns.id == view_id)
    return _view_of(connection.execute(statement.values(values).returning(*columns)).one())


def _view_of(row: Row[Any]) -> View:
    view = View.model_validate(row, from_attributes=True)
    # Each user has a default view of their own.
    is_default = view.is_default and row.owner == current_user()
    return view.model_copy(update={"is_default": is_default})
