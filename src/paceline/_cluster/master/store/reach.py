"""Rights of the sender of a request, and connections that show and change only what they allow.

The guard sets the reach of each request. A read of the database then sees the rows of the sender's
projects only: views of the connection take the place of the tables. A write job that touches a row
of another project is refused by triggers of the writer's connection. Threads of the master itself
have no reach, and see all.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.exc import StatementError

DEFAULT_PROJECT = 1
"""Id of the project `Default`."""
FIRST_USER = "admin"
"""Name of the first administrator, as whom the home's token acts."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Projects that a user sees, changes and administers; None stands for all of them.

    Attributes:
        user: The user.
        project: The project of what the user creates without naming one; None if there is none.
    """

    user: str
    sees: frozenset[int] | None = None
    changes: frozenset[int] | None = None
    administers: frozenset[int] | None = None
    project: int | None = DEFAULT_PROJECT


class NotAllowedError(RuntimeError):
    """Raised when a request would change a row that its sender may not change.

    Attributes:
        is_hidden: Whether the sender may not even see the row.
    """

    def __init__(self, what: str, *, is_hidden: bool) -> None:
        self.is_hidden = is_hidden
        role = f"The user must have the role 'editor' in the project of {what}."
        hint = (
            "Hint: an administrator of the project gives it: `paceline user role NAME editor"
            " --project PROJECT`."
        )
        super().__init__(f"There is no {what}." if is_hidden else f"{role} {hint}")


REACH: ContextVar[Reach | None] = ContextVar("reach", default=None)
"""The reach of the request at work."""
_objects: ContextVar[list[str] | None] = ContextVar("objects", default=None)


@contextmanager
def acting(reach: Reach | None, objects: list[str] | None = None) -> Iterator[None]:
    """Give the code inside a reach, and a list that takes the objects which it changes."""
    tokens = REACH.set(reach), _objects.set(objects)
    try:
        yield
    finally:
        REACH.reset(tokens[0])
        _objects.reset(tokens[1])


@contextmanager
def creating_in(project: int | None) -> Iterator[None]:
    """Have the code inside create in a project that its sender named, if it did."""
    reach = REACH.get()
    if project is None:
        yield
        return
    with acting(replace(reach or Reach(FIRST_USER), project=project), _objects.get()):
        yield


@contextmanager
def copying_from(project: int) -> Iterator[None]:
    """Have the code inside create where an experiment is, if the sender may change it there.

    Its code and config are of that project, and so are the policies that they must meet.
    """
    reach = REACH.get()
    may_change = reach is None or reach.changes is None or project in reach.changes
    with creating_in(project if may_change else None):
        yield


def current_reach() -> Reach | None:
    """Return the reach of the request at work; None for the master's own threads."""
    return REACH.get()


def note_object(name: str) -> None:
    """Name an object that the request changes, for the audit log."""
    objects = _objects.get()
    if objects is not None:
        objects.append(name)


def current_user() -> str:
    """Return the user for whom the code works."""
    reach = REACH.get()
    return FIRST_USER if reach is None else reach.user


def current_project() -> int:
    """Return the project of what the code creates.

    Raises:
        NotAllowedError: The user may create nothing.
    """
    reach = REACH.get()
    if reach is None:
        return DEFAULT_PROJECT
    if reach.project is None:
        raise NotAllowedError("what it creates, but is editor of none", is_hidden=False)
    return reach.project


def is_restricted(connection: sa.Connection) -> bool:
    """Return whether a connection shows the rows of some projects only."""
    return connection.info.get(_SHOWN) is not None


_SHOWN = "paceline.projects"
_PROJECT_OF = "(SELECT project_id FROM main.experiments WHERE id = {})"
_PROJECT_OF_TRIAL = _PROJECT_OF.format("(SELECT experiment_id FROM main.trials WHERE id = {})")
_OF_EXPERIMENTS = (
    *("trials", "attempts", "checkpoints", "metric_names", "run_files", "media", "events"),
    *("search_inputs", "search_snapshots", "search_views"),
)
# The experiment 0 stands for all of them.
_VIEWS = {
    "projects": "id IN {0}",
    "experiments": "project_id IN {0}",
    **{name: f"{_PROJECT_OF.format(f'{name}.experiment_id')} IN {{0}}" for name in _OF_EXPERIMENTS},
    "counts": f"{_PROJECT_OF.format('counts.experiment_id')} IN {{0}}",
    "series": f"{_PROJECT_OF_TRIAL.format('series.trial_id')} IN {{0}}",
    "documents": f"coalesce({_PROJECT_OF.format('documents.experiment_id')}, project_id) IN {{0}}",
    "members": "project_id IN {0}",
    "usage": "project_id IN {0}",
    "quotas": "project_id IN {0}",
    "slot_use": "project_id IN {0}",
}
# Written by requests of users; the rest follows from them, or is the master's own.
_GUARDED = {
    "experiments": "{0}.project_id",
    **{
        name: _PROJECT_OF.format("{0}.experiment_id")
        for name in ("trials", "attempts", "checkpoints", "run_files", "media", "search_inputs")
    },
    "series": _PROJECT_OF_TRIAL.format("{0}.trial_id"),
    "documents": f"coalesce({_PROJECT_OF.format('{0}.experiment_id')}, {{0}}.project_id)",
}
_HIDDEN, _FIXED = "reach: hidden", "reach: fixed"


def show_only(connection: sa.Connection, reach: Reach) -> None:
    """Let a fresh pooled connection show the rows of a reach's projects only."""
    assert reach.sees is not None
    pooled = connection.connection
    if pooled.info.get(_SHOWN) == reach.sees:
        return
    driver: Any = pooled.dbapi_connection
    pooled.info[_SHOWN] = frozenset()
    for name, condition in _VIEWS.items():
        driver.execute(f"DROP VIEW IF EXISTS temp.{name}")
        where = condition.format(_listed(reach.sees))
        driver.execute(f"CREATE TEMP VIEW {name} AS SELECT * FROM main.{name} WHERE {where}")  # noqa: S608
    pooled.info[_SHOWN] = reach.sees


@contextmanager
def changing_only(connection: sa.Connection, reach: Reach | None) -> Iterator[None]:
    """Refuse changes of rows beyond a reach, made with the writer's connection inside.

    Raises:
        NotAllowedError: A row of a project that the reach does not change was touched.
    """
    if reach is None or reach.changes is None:
        yield
        return
    changes, sees = _listed(reach.changes), _listed(reach.sees or ())
    names = []
    for table, project in _GUARDED.items():
        for event, rows in (("INSERT", ["NEW"]), ("UPDATE", ["OLD", "NEW"]), ("DELETE", ["OLD"])):
            name = f"reach_{event}_{table}"
            found = [project.format(row) for row in rows]
            wrong = " OR ".join(f"{one} NOT IN {changes}" for one in found)
            hidden = " OR ".join(f"{one} NOT IN {sees}" for one in found)
            connection.exec_driver_sql(
                f"CREATE TEMP TRIGGER {name} BEFORE {event} ON main.{table} WHEN {wrong}"
                f" BEGIN SELECT CASE WHEN {hidden} THEN RAISE(ABORT, '{_HIDDEN}')"
                f" ELSE RAISE(ABORT, '{_FIXED}') END; END"
            )
            names.append(name)
    try:
        yield
    except StatementError as error:
        if isinstance(error.orig, NotAllowedError):
            raise error.orig from None  # by the default of a column
        text = str(error.orig)
        if text not in (_HIDDEN, _FIXED):
            raise
        what = "such object" if text == _HIDDEN else "the object"
        raise NotAllowedError(what, is_hidden=text == _HIDDEN) from None
    # A failed job takes its savepoint back, and the triggers with it.
    for name in names:
        connection.exec_driver_sql(f"DROP TRIGGER temp.{name}")


def check_object(connection: sa.Connection, kind: str, key: Any, *, changes: bool = False) -> None:
    """Check that the sender sees, or may change, an object that a body names, if it does.

    Raises:
        NotAllowedError: The sender does not, or may not.
    """
    reach = current_reach()
    if reach is None or reach.sees is None or key is None:
        return
    project = project_of(connection, kind, key)
    if project is None:
        return
    what = f"{KINDS[kind]} {key}"
    if project not in reach.sees:
        raise NotAllowedError(what, is_hidden=True)
    if changes and project not in (reach.changes or ()):
        raise NotAllowedError(f"the {what}", is_hidden=False)


def sees_document(connection: sa.Connection, experiment_id: int | None, project: int) -> bool:
    """Return whether the sender sees a document of a tracker's client."""
    reach = current_reach()
    if reach is None or reach.sees is None:
        return True
    query = "SELECT project_id FROM experiments WHERE id = ?"
    found = connection.exec_driver_sql(query, (experiment_id,)).scalar()
    return (project if found is None else found) in reach.sees


_OBJECTS = {
    "experiment_id": "SELECT project_id FROM experiments WHERE id = ?",
    "trial_id": "SELECT e.project_id FROM trials t JOIN experiments e ON e.id = t.experiment_id"
    " WHERE t.id = ?",
    "uuid": "SELECT e.project_id FROM checkpoints c JOIN experiments e ON e.id = c.experiment_id"
    " WHERE c.uuid = ?",
    "run_id": "SELECT project_id FROM experiments WHERE external_id = ?",
    "project": "SELECT id FROM projects WHERE name = ?",
}


_NUMBER = TypeAdapter(int)
KINDS = {
    "experiment_id": "experiment", "trial_id": "trial", "uuid": "checkpoint", "run_id": "run",
    "project": "project",
}  # fmt: skip
"""Words for the objects that paths name."""


def named_object(parameters: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return kind and id of the object with a project that a path names, None if it names none."""
    for kind in _OBJECTS:
        if kind in parameters:
            return kind, parameters[kind]
    return None


def project_of(connection: sa.Connection, kind: str, key: Any) -> int | None:
    """Return the project of an object; None if there is no such object.

    Ids are read as routes read them: `1_0` in a path is the experiment 10.
    """
    try:
        if kind in ("experiment_id", "trial_id"):
            key = _NUMBER.validate_python(key)
        found = connection.exec_driver_sql(_OBJECTS[kind], (key,)).scalar()
    except (OverflowError, ValidationError, sqlite3.Error):
        return None
    return None if found is None else int(found)


def _listed(projects: Iterable[int]) -> str:
    return f"({', '.join(map(str, sorted(projects)))})"
