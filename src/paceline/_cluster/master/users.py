"""Users, their roles in projects, and the log of what they changed."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.oidc_provider import OidcError, OidcPerson, OidcSettings
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.quotas import DELETED_PROJECT, group_owner
from paceline._cluster.master.store.reach import DEFAULT_PROJECT, FIRST_USER, Reach
from paceline._cluster.master.store.row_ids_and_counts import insert_document, keep_ids, new_id
from paceline._cluster.messages.master_models import AuditEntry, Member, Project, Role, User

DEFAULT_NAME = "Default"
ANYBODY = "*"
"""Subject of a user that awaits the first person of its name."""

_users, _projects, _members = user_tables.users, user_tables.projects, user_tables.members


class Users:
    """Users, projects and roles, in memory as each request needs them; thread-safe.

    Args:
        database: The master's database.
        on_access_lost: Called after tokens were revoked in the database.
    """

    def __init__(self, database: Database, on_access_lost: Callable[[], None]) -> None:
        self._database = database
        self._on_access_lost = on_access_lost
        self._load()
        has_admin = any(one.is_admin and one.is_active for one in self._known.values())
        if not has_admin or DEFAULT_PROJECT not in self._names:
            database.write(self._settle).result()

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one active user."""
        return len(self._reaches) > 1

    def reach(self, name: str) -> Reach | None:
        """Return the reach of a user; None for an unknown or removed one."""
        return self._reaches.get(name)

    def is_admin(self, name: str) -> bool:
        """Return whether a user is an administrator."""
        reach = self._reaches.get(name)
        return reach is not None and reach.sees is None

    def all(self) -> list[User]:
        """Return all users by name, those that were removed included."""
        return [_view(one) for _, one in sorted(self._known.items())]

    def projects(self, reach: Reach | None) -> list[Project]:
        """Return the projects within a reach, the oldest first."""
        return [
            Project(id=number, name=name, role=self._role(reach, number))
            for number, name in sorted(self._names.items())
            if reach is None or reach.sees is None or number in reach.sees
        ]

    def members(self, project: str) -> list[Member]:
        """Return the members of a project by name.

        Raises:
            NotFoundError: There is no such project.
        """
        number = self.project_id(project)
        return [
            Member(user=user, role=roles[number])
            for user, roles in sorted(self._roles.items())
            if number in roles
        ]

    def project_id(self, name: str) -> int:
        """Return the id of a project.

        Raises:
            NotFoundError: There is no such project.
        """
        for number, known in self._names.items():
            if known == name:
                return number
        raise NotFoundError(f"There is no project {name!r}.")

    def add(
        self,
        name: str,
        *,
        role: Role | None,
        is_admin: bool,
        is_service: bool,
        is_awaited: bool = False,
    ) -> "Future[User]":
        """Add a user with a role in the project `Default`; one that was removed comes back.

        If `is_awaited`, the first person of the name who signs in by OIDC becomes this user, unless
        it was linked before. The future raises `RefusedError` if the name is another user's.
        """

        def job(transaction: Transaction) -> User:
            connection = transaction.connection
            query = sa.select(_users).where(sa.func.lower(_users.c.name) == name.lower())
            known = connection.execute(query).first()
            if known is not None and (known.is_active or known.name != name):
                raise RefusedError(
                    "name_taken",
                    f"`name` must differ from those of other users in more than case, but {name!r}"
                    f" is like {known.name!r}. Hint: choose another name.",
                )
            values: dict[str, Any] = {
                "is_admin": is_admin, "is_active": True, "is_service": is_service
            }  # fmt: skip
            if is_awaited and (known is None or known.oidc_subject is None):
                values["oidc_subject"] = ANYBODY
            if known is None:
                _insert_user(connection, name, values)
            else:
                connection.execute(sa.update(_users).where(_users.c.name == name).values(**values))
            if role is not None and not is_admin:
                _set_role(connection, DEFAULT_PROJECT, name, role)
            self._finish(transaction)
            return _view(connection.execute(sa.select(_users).where(_users.c.name == name)).one())

        return self._database.write(job)

    def remove(self, name: str) -> "Future[None]":
        """Remove a user for good; tokens, roles and reservations end, and experiments stay.

        The future raises `RefusedError` for the last administrator.
        """

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            _find_active(connection, name)
            self._keep_an_admin(connection, name)
            now, tokens = time.time(), user_tables.tokens
            change = {"is_active": False, "is_admin": False, "password_hash": "", "changed_at": now}
            change["member_of"] = None
            connection.execute(sa.update(_users).where(_users.c.name == name).values(**change))
            for table in (_members, user_tables.sign_ins, user_tables.reservations):
                connection.execute(sa.delete(table).where(table.c.user == name))
            is_valid = (tokens.c.user == name) & tokens.c.revoked_at.is_(None)
            connection.execute(sa.update(tokens).where(is_valid).values(revoked_at=now))
            _end_empty_groups(connection)
            transaction.after_commit(self._on_access_lost)
            self._finish(transaction)

        return self._database.write(job)

    def set_admin(self, name: str, *, is_admin: bool) -> "Future[None]":
        """Make a user an administrator, or take that right.

        The future raises `RefusedError` for the last administrator.
        """

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            _find_active(connection, name)
            if not is_admin:
                self._keep_an_admin(connection, name)
            change = sa.update(_users).where(_users.c.name == name)
            connection.execute(change.values(is_admin=is_admin))
            self._finish(transaction)

        return self._database.write(job)

    def link(self, name: str, issuer: str, subject: str) -> "Future[None]":
        """Link a user to a person at a provider, by the provider's id of the person.

        As `ANYBODY`, the first person of the name who signs in is meant; "" ends the link. Sign-ins
        of the user end. The future raises `RefusedError` if the person is another user.
        """

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            _find_active(connection, name)
            known = None if subject in ("", ANYBODY) else _find_linked(connection, issuer, subject)
            if known is not None and known.name != name:
                raise RefusedError(
                    "subject_taken",
                    f"A person at the provider must be one user, but {subject!r} is the user"
                    f" {known.name!r}. Hint: `paceline user link {known.name} none` ends that.",
                )
            _set_link(connection, name, issuer, subject or None)
            signed_in = user_tables.sign_ins.c.user == name
            connection.execute(sa.delete(user_tables.sign_ins).where(signed_in))
            self._finish(transaction)

        return self._database.write(job)

    def admit(self, person: OidcPerson, settings: OidcSettings) -> "Future[tuple[str, list[str]]]":
        """Find the user of a person who signed in; return the name, and what was changed.

        Group and right of an administrator follow the provider, where the settings say so. The
        future raises `OidcError` for whoever may not sign in, and `NotFoundError` if the project
        for new users is not there.
        """

        def job(transaction: Transaction) -> tuple[str, list[str]]:
            connection, changed = transaction.connection, list[str]()
            known = _find_linked(connection, person.issuer, person.subject)
            if known is None:
                known = self._link_by_name(connection, person, settings, changed)
            if not known.is_active:
                raise OidcError("oidc_removed", f"The user {known.name!r} was removed here.")
            here, name = _users.c.name == known.name, str(known.name)
            if person.group is not None and (known.member_of or "") != person.group:
                change = sa.update(_users).where(here).values(member_of=person.group or None)
                connection.execute(change)
                _end_empty_groups(connection)
                changed.append(f"group of user {name}")
            if person.is_admin is not None and bool(known.is_admin) != person.is_admin:
                # The last one stays: somebody must be able to mend the settings.
                with suppress(RefusedError):
                    if not person.is_admin:
                        self._keep_an_admin(connection, name)
                    change = sa.update(_users).where(here).values(is_admin=person.is_admin)
                    connection.execute(change)
                    changed.append(f"rights of user {name}")
            if changed:
                self._finish(transaction)
            return name, changed

        return self._database.write(job)

    def _link_by_name(
        self,
        connection: sa.Connection,
        person: OidcPerson,
        settings: OidcSettings,
        changed: list[str],
    ) -> sa.Row[Any]:
        """Find or create the user of a person who signs in for the first time."""
        name = person.name
        query = sa.select(_users).where(sa.func.lower(_users.c.name) == name.lower())
        known = connection.execute(query).first() if person.problem is None else None
        if known is not None and known.oidc_subject == ANYBODY:
            name = known.name
        elif known is not None:
            # Whoever has the name at the provider today is perhaps not who has it here.
            raise OidcError(
                "oidc_name_taken",
                f"The user {known.name!r} is not linked to this person at the provider. Hint: an"
                f" administrator who knows that they are one links them: `paceline user link"
                f" {known.name} {person.subject}`.",
            )
        elif not settings.create or person.problem is not None:
            added = "NAME" if person.problem else name
            raise OidcError(
                "oidc_unknown",
                f"There is no user for this person ({person.problem or repr(name)}). Hint: an"
                f" administrator adds one (`paceline user add {added}`) and links it (`paceline"
                f" user link {added} {person.subject}`).",
            )
        else:
            changed.append(f"new user {name}")
            _insert_user(connection, name, {})
            if settings.role is not None:
                project = self.project_id(settings.project)
                _set_role(connection, project, name, settings.role)
        changed.append(f"link of user {name}")
        _set_link(connection, name, person.issuer, person.subject)
        return connection.execute(sa.select(_users).where(_users.c.name == name)).one()

    def set_group(self, name: str, group: str | None) -> "Future[None]":
        """Put a user into a group, or into none; a group ends with its last member."""

        def job(transaction: Transaction) -> None:
            connection = transaction.connection
            _find_active(connection, name)
            change = sa.update(_users).where(_users.c.name == name).values(member_of=group)
            connection.execute(change)
            _end_empty_groups(connection)
            self._finish(transaction)

        return self._database.write(job)

    def group_of(self, name: str) -> str | None:
        """Return the group of a user, if any."""
        known = self._known.get(name)
        return None if known is None else known.member_of

    def has_group(self, group: str) -> bool:
        """Return whether a group has a member."""
        return any(one.member_of == group for one in self._known.values())

    def create_project(self, name: str) -> "Future[Project]":
        """Create a project without members.

        The future raises `RefusedError` if the name is taken.
        """

        def job(transaction: Transaction) -> Project:
            connection = transaction.connection
            query = sa.select(_projects.c.name).where(
                sa.func.lower(_projects.c.name) == name.lower()
            )
            if (known := connection.scalar(query)) is not None:
                raise RefusedError(
                    "name_taken",
                    f"`name` must differ from those of other projects in more than case, but"
                    f" {name!r} is like {known!r}.",
                )
            number = new_id(connection, _projects)
            row = {"id": number, "name": name, "created_at": time.time()}
            connection.execute(sa.insert(_projects).values(**row))
            self._finish(transaction)
            return Project(id=number, name=name, role=Role.ADMIN)

        return self._database.write(job)

    def delete_project(self, name: str) -> "Future[None]":
        """Delete a project in which nothing is left but roles, a quota, templates and policies.

        The future raises `RefusedError` if there is more, or if it is the project `Default`.
        """

        def job(transaction: Transaction) -> None:
            connection, number = transaction.connection, self.project_id(name)
            documents = tables.documents
            if left := _left_in_project(connection, number, name):
                raise RefusedError(
                    "project_in_use", f"A project to be deleted must be empty, but {name!r} {left}"
                )
            keep_ids(connection, _projects)
            for table in (_members, user_tables.quotas):
                connection.execute(sa.delete(table).where(table.c.project_id == number))
            of_rules = (documents.c.project_id == number, documents.c.kind.in_(_RULES))
            connection.execute(sa.delete(documents).where(*of_rules))
            connection.execute(sa.delete(_projects).where(_projects.c.id == number))
            # What was used there is still told by its name.
            insert_document(
                connection, DELETED_PROJECT, "", str(number), {"name": name}, project_id=number
            )
            self._finish(transaction)

        return self._database.write(job)

    def set_role(self, project: str, user: str, role: Role | None) -> "Future[None]":
        """Give a user, or a group as `@NAME`, a role in a project, or none."""
        number = self.project_id(project)

        def job(transaction: Transaction) -> None:
            _find_active(transaction.connection, user)
            _set_role(transaction.connection, number, user, role)
            self._finish(transaction)

        return self._database.write(job)

    def _role(self, reach: Reach | None, project: int) -> Role:
        if reach is None or reach.administers is None or project in reach.administers:
            return Role.ADMIN
        return Role.EDITOR if project in (reach.changes or ()) else Role.VIEWER

    def _keep_an_admin(self, connection: sa.Connection, name: str) -> None:
        others = sa.select(sa.func.count()).where(
            _users.c.is_admin, _users.c.is_active, _users.c.name != name
        )
        if not connection.scalar(others):
            raise RefusedError(
                "last_admin",
                f"A master must have an administrator, but {name!r} is the last one. Hint:"
                " `paceline user role NAME --admin` makes another user one.",
            )

    def _settle(self, transaction: Transaction) -> None:
        """Make the first administrator and the first project, if they are missing."""
        connection, now = transaction.connection, time.time()
        values = {"is_admin": True, "is_active": True}
        if connection.scalar(sa.select(_users.c.name).where(_users.c.name == FIRST_USER)) is None:
            _insert_user(connection, FIRST_USER, values)
        elif not any(one.is_admin and one.is_active for one in self._known.values()):
            change = sa.update(_users).where(_users.c.name == FIRST_USER)
            connection.execute(change.values(**values))
        if DEFAULT_PROJECT not in self._names:
            row = {"id": DEFAULT_PROJECT, "name": DEFAULT_NAME, "created_at": now}
            connection.execute(sa.insert(_projects).values(**row))
        self._finish(transaction)

    def _finish(self, transaction: Transaction) -> None:
        # A power cut must not give rights back.
        transaction.force()
        transaction.after_commit(self._load)

    def _load(self) -> None:
        with self._database.read(everything=True) as connection:
            self._known: dict[str, sa.Row[Any]] = {
                row.name: row for row in connection.execute(sa.select(_users))
            }
            self._names: dict[int, str] = {
                row.id: row.name for row in connection.execute(sa.select(_projects))
            }
            roles: dict[str, dict[int, Role]] = {}
            for row in connection.execute(sa.select(_members)):
                roles.setdefault(row.user, {})[row.project_id] = Role(row.role)
        self._roles = roles
        self._reaches = {
            name: _reach_of(name, None if one.is_admin else _roles_of(one, roles))
            for name, one in self._known.items()
            if one.is_active
        }


_RANKS = (Role.VIEWER, Role.EDITOR, Role.ADMIN)


def _roles_of(user: sa.Row[Any], roles: dict[str, dict[int, Role]]) -> dict[int, Role]:
    """Return the roles of a user by project: the user's own or that of the group, if higher."""
    found = dict(roles.get(user.name, {}))
    for project, role in roles.get(group_owner(user.member_of or ""), {}).items():
        found[project] = max(role, found.get(project, role), key=_RANKS.index)
    return found


def _end_empty_groups(connection: sa.Connection) -> None:
    """Delete the roles and quotas of groups without members."""
    groups = connection.execute(sa.select(_users.c.member_of).distinct()).scalars()
    kept = [group_owner(name) for name in groups if name]
    for table in (_members, user_tables.quotas):
        is_group = table.c.user.startswith(group_owner(""))
        connection.execute(sa.delete(table).where(is_group, table.c.user.not_in(kept)))


def _reach_of(name: str, roles: dict[int, Role] | None) -> Reach:
    """Return the reach of a user by the roles in projects; None for an administrator."""
    if roles is None:
        return Reach(name)
    changes = frozenset(one for one, role in roles.items() if role is not Role.VIEWER)
    return Reach(
        name,
        sees=frozenset(roles),
        changes=changes,
        administers=frozenset(one for one, role in roles.items() if role is Role.ADMIN),
        project=min(changes, default=None),
    )


def _view(row: sa.Row[Any]) -> User:
    return User(
        name=row.name,
        is_admin=row.is_admin,
        is_active=row.is_active,
        is_service=row.is_service,
        has_password=bool(row.password_hash),
        group=row.member_of,
        oidc=row.oidc_subject and ("awaited" if row.oidc_subject == ANYBODY else "linked"),
    )


def _insert_user(connection: sa.Connection, name: str, values: dict[str, Any]) -> None:
    row = {"name": name, "password_hash": "", "changed_at": time.time()}
    connection.execute(sa.insert(_users).values(**row, **values))


def _find_linked(connection: sa.Connection, issuer: str, subject: str) -> sa.Row[Any] | None:
    """Find the user of a person at a provider, also one that was removed."""
    place = (_users.c.oidc_issuer == issuer, _users.c.oidc_subject == subject)
    return connection.execute(sa.select(_users).where(*place)).first()


def _set_link(connection: sa.Connection, name: str, issuer: str, subject: str | None) -> None:
    values = {"oidc_issuer": subject and issuer, "oidc_subject": subject}
    connection.execute(sa.update(_users).where(_users.c.name == name).values(**values))


_RULES = ("template", "policy")
# Files of deleted experiments that are still to be removed.
_DELETION = "deletion"


def _left_in_project(connection: sa.Connection, number: int, name: str) -> str:
    """Return what keeps a project from being deleted; empty for nothing."""
    if number == DEFAULT_PROJECT:
        return "is the one for what names no project."
    experiments, documents = tables.experiments.c, tables.documents.c
    of_project = sa.select(sa.func.count()).where(experiments.project_id == number)
    if num_experiments := connection.scalar(of_project):
        told = f"{num_experiments} experiment{'s' * (num_experiments != 1)}"
        return (
            f"has {told}. Hint: `paceline e move --query 'project ="
            f' "{name}"\' --to OTHER` moves them, with those that run.'
        )
    others = sa.select(sa.func.count()).where(
        documents.project_id == number,
        documents.experiment_id.is_(None),
        documents.kind.not_in([*_RULES, _DELETION]),
    )
    if connection.scalar(others):
        return "has models, or projects of W&B or MLflow. Hint: delete these first."
    for pool, open_to in connection.execute(sa.select(tables.pools.c.name, tables.pools.c.open_to)):
        if f"project:{name}" in (open_to or ()):
            return f"has the pool {pool!r} open to it. Hint: `paceline pool set` closes that."
    return ""


def _find_active(connection: sa.Connection, name: str) -> None:
    is_group = name.startswith(group_owner(""))
    place = (_users.c.member_of == name[1:]) if is_group else (_users.c.name == name)
    if connection.scalar(sa.select(_users.c.name).where(place, _users.c.is_active)) is None:
        hint = " Hint: `paceline user group USER NAME` makes one." if is_group else ""
        raise NotFoundError(f"There is no {'group' if is_group else 'user'} {name!r}.{hint}")


def _set_role(connection: sa.Connection, project: int, user: str, role: Role | None) -> None:
    place = (_members.c.project_id == project, _members.c.user == user)
    connection.execute(sa.delete(_members).where(*place))
    if role is not None:
        row = {"project_id": project, "user": user, "role": role.value}
        connection.execute(sa.insert(_members).values(**row))


class AuditLog:
    """Log of what users changed; rows are only added."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self, user: str, token: str | None, action: str, objects: list[str], status: int
    ) -> None:
        """Add an entry; returns before it is stored."""
        row = {
            "time": time.time(), "user": user, "token": token, "action": action,
            "objects": objects, "status": status,
        }  # fmt: skip
        statement = sa.insert(user_tables.audit).values(**row)
        self._database.write(lambda transaction: transaction.connection.execute(statement))

    def read(self, *, user: str | None, before: int | None, limit: int) -> list[AuditEntry]:
        """Return entries, the newest first; of one user, and older than an id, if given."""
        audit = user_tables.audit
        query = sa.select(audit).order_by(audit.c.id.desc()).limit(limit)
        if user is not None:
            query = query.where(audit.c.user == user)
        if before is not None:
            query = query.where(audit.c.id < before)
        with self._database.read() as connection:
            return [AuditEntry(**row._mapping) for row in connection.execute(query)]
