"""Projects and their members, and the templates and policies for configs in them."""

import asyncio
import json
from typing import Annotated, Literal

import sqlalchemy as sa
from fastapi import Path, Query

from paceline._cluster.master.api.access_guard import AccessIdentity, IdentityOf
from paceline._cluster.master.api.experiment_routes import project_id_of
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.config_rules import ALL_PROJECTS, KINDS
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import current_user, note_object
from paceline._cluster.master.store.row_ids_and_counts import insert_document
from paceline._cluster.messages.master_models import (
    ConfigRule,
    Member,
    NewProject,
    NewRole,
    Project,
    SetConfigRule,
)
from paceline.config._config_rules import check_policy, check_template

project_router = ApiRouter(tags=["users"], route_class=ReadingRoute)


@project_router.get("/projects")
async def list_projects(master: MasterOf, identity: IdentityOf) -> list[Project]:
    """List the projects that the sender sees, with the sender's role."""
    assert identity is not None
    return master.users.projects(identity.reach)


@project_router.post("/projects", status_code=201)
async def create_project(request: NewProject, master: MasterOf) -> Project:
    """Create a project without members; administrators see it."""
    note_object(f"project {request.name}")
    return await asyncio.wrap_future(master.users.create_project(request.name))


ProjectName = Annotated[str, Path(min_length=1, max_length=64)]
MemberName = Annotated[str, Path(pattern="^@?[A-Za-z0-9_.-]{1,64}$")]


@project_router.get("/projects/{project}/members")
async def list_members(project: ProjectName, master: MasterOf) -> list[Member]:
    """List the members of a project by name; administrators of the master are none."""
    return master.users.members(project)


@project_router.put("/projects/{project}/members/{name}", status_code=204)
async def set_role(
    project: ProjectName, name: MemberName, request: NewRole, master: MasterOf, identity: IdentityOf
) -> None:
    """Give a user, or a group as `@NAME`, a role in a project; for the project's administrators."""
    _check_administers(identity, project, master.users.project_id(project))
    await asyncio.wrap_future(master.users.set_role(project, name, request.role))
    master.events.notify()


@project_router.delete("/projects/{project}", status_code=204)
async def delete_project(project: ProjectName, master: MasterOf) -> None:
    """Delete a project without experiments and models; its roles, quota and rules go with it."""
    await asyncio.wrap_future(master.users.delete_project(project))
    master.events.notify()


def _check_administers(identity: AccessIdentity | None, project: str, number: int) -> None:
    """Refuse who is no administrator of a project; that of all projects is the master's."""
    assert identity is not None
    administers = None if identity.reach is None else identity.reach.administers
    if administers is not None and number not in administers:
        raise ApiError(
            403,
            "role_too_low",
            f"The user must have the role 'admin' in the project {project!r} to choose its members,"
            f" templates and policies, but {identity.owner!r} has not.",
        )


_MOST_RULES = 100
_MOST_BYTES = 64 * 1024
_documents = tables.documents
Kind = Literal["template", "policy"]
RuleName = Annotated[str, Path(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
OfProject = Annotated[
    str | None, Query(max_length=64, description="Of this project; by default of all projects.")
]


@project_router.get("/config-rules")
def list_config_rules(
    master: MasterOf,
    identity: IdentityOf,
    project: Annotated[
        str | None,
        Query(
            max_length=64, description="Tell what applies in this one; by default, the sender's."
        ),
    ] = None,
) -> list[ConfigRule]:
    """List the templates and policies of all projects and of those that the sender sees."""
    assert identity is not None
    seen = {one.id: one.name for one in master.users.projects(identity.reach)}
    chosen = project_id_of(master, project)
    if chosen is None and identity.reach is not None:
        chosen = identity.reach.project
    columns = _documents.c
    query = sa.select(_documents).where(columns.kind.in_(KINDS))
    with master.database.read(everything=True) as connection:
        rows = connection.execute(query.order_by(columns.project_id, columns.kind, columns.name))
        return [
            ConfigRule(
                kind=row.kind,
                name=row.name,
                project=seen.get(row.project_id),
                content=row.content["rule"],
                revision=row.content["revision"],
                changed_by=row.content["user"],
                changed_at=row.changed_at,
                applies=row.project_id in (ALL_PROJECTS, chosen),
            )
            for row in rows
            if row.project_id == ALL_PROJECTS or row.project_id in seen
        ]


@project_router.put("/config-rules/{kind}/{name}", status_code=204)
async def set_config_rule(
    kind: Kind,
    name: RuleName,
    request: SetConfigRule,
    master: MasterOf,
    identity: IdentityOf,
    project: OfProject = None,
) -> None:
    """Set a template or policy, unless it was changed since `revision`."""
    if len(json.dumps(request.content)) > _MOST_BYTES:
        message = f"A {kind} must have at most {_MOST_BYTES} bytes as JSON."
        raise ApiError(413, "rule_too_large", message)
    await asyncio.to_thread(check_template if kind == "template" else check_policy, request.content)

    def job(transaction: Transaction) -> None:
        number = _project_number(master, identity, project)
        _take_rule(transaction, kind, name, number, request.revision)
        parents = sa.select(_documents.c.name).where(
            _documents.c.kind == kind, _documents.c.parent == str(number)
        )
        if len(transaction.connection.execute(parents).all()) >= _MOST_RULES:
            raise ApiError(
                409,
                "too_many_rules",
                f"There must be at most {_MOST_RULES} of a kind in a project.",
            )
        content = {
            "rule": request.content, "revision": request.revision + 1, "user": current_user(),
        }  # fmt: skip
        insert_document(transaction.connection, kind, str(number), name, content, project_id=number)

    await write_rows(master, job)


@project_router.delete("/config-rules/{kind}/{name}", status_code=204)
async def delete_config_rule(
    kind: Kind,
    name: RuleName,
    revision: Annotated[int, Query(ge=1, le=2**31 - 1)],
    master: MasterOf,
    identity: IdentityOf,
    project: OfProject = None,
) -> None:
    """Delete a template or policy, unless it was changed since `revision`."""

    def job(transaction: Transaction) -> None:
        number = _project_number(master, identity, project)
        _take_rule(transaction, kind, name, number, revision)

    await write_rows(master, job)


def _project_number(master: Master, identity: AccessIdentity | None, project: str | None) -> int:
    """Return the project of rules to be changed, seen and administered by the sender."""
    number = project_id_of(master, project)
    if number is None:
        _check_administers(identity, "(all)", ALL_PROJECTS)
        return ALL_PROJECTS
    _check_administers(identity, project or "", number)
    return number


def _take_rule(transaction: Transaction, kind: Kind, name: str, number: int, revision: int) -> None:
    """Delete a rule, or refuse if it has another revision."""
    columns = _documents.c
    place = (columns.kind == kind, columns.parent == str(number), columns.name == name)
    content = transaction.connection.scalar(sa.select(columns.content).where(*place))
    found = 0 if content is None else content["revision"]
    if not found and revision:
        raise NotFoundError(f"There is no {kind} {name!r} there.")
    if found != revision:
        raise ApiError(
            409,
            "rule_changed",
            f"The change of the {kind} {name!r} must begin from its newest revision, {found}, but"
            f" got {revision}: someone may have changed it. Hint: `paceline {kind} list` shows it.",
        )
    note_object(f"{kind} {name}")
    transaction.connection.execute(sa.delete(_documents).where(*place))
