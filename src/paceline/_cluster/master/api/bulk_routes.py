"""Deletion of experiments, and actions on many of them, with previews by query: bytes, refusals."""

import asyncio
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, NamedTuple

import sqlalchemy as sa
from fastapi import Query

from paceline._cluster.master.api.experiment_routes import ExperimentId, action_of, project_id_of
from paceline._cluster.master.api.list_routes import FiltersOf, experiments_of, told_as_api_errors
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.checkpoints import registered_checkpoints
from paceline._cluster.master.experiments.deletions import (
    Leftovers,
    checkpoint_users,
    delete_experiment,
    obstacle_to_deletion,
)
from paceline._cluster.master.experiments.experiment_edits import edit_experiment
from paceline._cluster.master.experiments.state_decisions import (
    NotFoundError,
    RefusedError,
    TransitionError,
)
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import in_own_thread
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import PROJECT_NAME
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.experiment_list import matching_ids
from paceline._cluster.master.store.query_language import matching_trials_of
from paceline._cluster.master.store.reach import (
    NotAllowedError,
    check_object,
    current_reach,
    note_object,
)
from paceline._cluster.master.store.row_ids_and_counts import experiment_counts, file_bytes
from paceline._cluster.messages.experiment_models import (
    BulkAction,
    BulkPreview,
    BulkRefusal,
    BulkResult,
    BulkWord,
    CheckpointPreview,
    Deletion,
    check_bulk_arguments,
)
from paceline._cluster.messages.states import (
    LIVE_ATTEMPTS,
    LIVE_TRIALS,
    CheckpointState,
    ExperimentState,
)
from paceline.config._fields_and_problems import ConfigError

_NAMED, _SHOWN = 50, 10
_UNCHANGED = ""
_STATE_ACTIONS = ("pause", "activate", "cancel", "kill")


class BulkArguments(NamedTuple):
    """Arguments of an action: the project of `move` by its id, the labels of `label`."""

    to: int | None = None
    add_labels: tuple[str, ...] = ()
    remove_labels: tuple[str, ...] = ()


def changed_labels(before: Iterable[str], arguments: BulkArguments) -> list[str]:
    """Return the labels after an action: kept labels in their order, then the new labels."""
    kept = [one for one in before if one not in arguments.remove_labels]
    return list(dict.fromkeys([*kept, *arguments.add_labels]))


def preview_action(
    connection: sa.Connection, ids: sa.Select[Any], action: BulkWord, arguments: BulkArguments
) -> BulkPreview:
    """Return the preview of an action on the experiments of a query for ids."""
    experiments = tables.experiments.c
    query: sa.Select[Any] = (
        sa.select(
            *(experiments[name] for name in ("id", "name", "state", "is_archived", "project_id")),
            *(experiments[name] for name in ("external_id", "external_path")),
            sa.type_coerce(experiments.labels, sa.Text).label("labels"),
            PROJECT_NAME.label("project"),
        )
        .where(experiments.id.in_(ids.correlate(None)))
        .order_by(experiments.id.desc())
    )
    rows = connection.execute(query).all()
    judge = _judge_of(connection, action, arguments)
    changed: list[sa.Row[Any]] = []
    refused: dict[str, list[int]] = {}
    num_unchanged = 0
    for row in rows:
        found = _missing_role(row) or judge(row)
        if found is None:
            changed.append(row)
        elif found == _UNCHANGED:
            num_unchanged += 1
        else:
            refused.setdefault(found, []).append(row.id)
    counts = experiment_counts(connection, [row.id for row in changed]).values()
    return BulkPreview(
        num_matching=len(rows),
        experiment_ids=[row.id for row in changed],
        names=[row.name for row in changed[:_NAMED]],
        num_trials=sum(one.num_trials for one in counts),
        num_checkpoints=sum(one.num_checkpoints for one in counts),
        checkpoint_bytes=sum(one.checkpoint_bytes for one in counts),
        num_unchanged=num_unchanged,
        refused=_told_refusals(refused),
        file_bytes=file_bytes(connection, [row.id for row in changed]),
    )


def preview_checkpoints(
    connection: sa.Connection, trial_ids: sa.Select[Any], *, keep_best: int, keep_latest: int
) -> CheckpointPreview:
    """Return the preview of a deletion of the checkpoints of some trials.

    Args:
        connection: The database.
        trial_ids: The query.
        keep_best: So many of each trial stay, by their metric,
        keep_latest: and so many with the most batches.
    """
    columns, experiments, trials = tables.checkpoints.c, tables.experiments.c, tables.trials.c
    query: sa.Select[Any] = (
        sa.select(
            *(columns[name] for name in ("uuid", "trial_id", "experiment_id", "size", "metric")),
            columns.steps_completed,
            trials.state,
            experiments.project_id,
            experiments.external_id,
            experiments.config["searcher"]["smaller_is_better"].as_boolean().label("is_least_best"),
            PROJECT_NAME.label("project"),
        )
        .join(tables.trials, trials.id == columns.trial_id)
        .join(tables.experiments, experiments.id == columns.experiment_id)
        .where(columns.trial_id.in_(trial_ids.correlate(None)))
        .where(columns.state != CheckpointState.DELETED.value)
        .order_by(columns.created_at.desc(), columns.uuid)
    )
    rows = connection.execute(query).all()
    kept = _kept_checkpoints(rows, keep_best, keep_latest)
    used, registered = _checkpoints_in_use(connection), registered_checkpoints(connection)
    found: list[sa.Row[Any]] = []
    refused: dict[str, list[int]] = {}
    for row in rows:
        reason = _missing_role(row)
        if row.external_id is not None:
            reason = reason or "its run has no master"
        elif row.state in LIVE_TRIALS:
            reason = reason or "its trial has not ended"
        elif row.uuid in used:
            reason = reason or "a trial starts from it"
        elif row.uuid in registered:
            reason = reason or "a registered model has it"
        if reason is not None:
            refused.setdefault(reason, []).append(row.experiment_id)
        elif row.uuid not in kept:
            found.append(row)
    num_refused = sum(map(len, refused.values()))
    return CheckpointPreview(
        num_matching=len(rows),
        uuids=[row.uuid for row in found],
        num_bytes=sum(row.size for row in found),
        num_trials=len({row.trial_id for row in found}),
        num_kept=len(rows) - len(found) - num_refused,
        refused=_told_refusals(refused),
    )


def _kept_checkpoints(rows: Iterable[sa.Row[Any]], keep_best: int, keep_latest: int) -> set[str]:
    by_trial: dict[int, list[sa.Row[Any]]] = {}
    for row in rows:
        by_trial.setdefault(row.trial_id, []).append(row)
    kept: set[str] = set()
    for own in by_trial.values():
        latest = sorted(own, key=lambda row: -row.steps_completed)
        measured = [row for row in latest if row.metric is not None]
        measured.sort(key=lambda row: row.metric if row.is_least_best else -row.metric)
        kept.update(row.uuid for row in (*latest[:keep_latest], *measured[:keep_best]))
    return kept


def _checkpoints_in_use(connection: sa.Connection) -> set[str]:
    trials, attempts = tables.trials.c, tables.attempts.c
    sources = sa.select(trials.source_checkpoint).where(trials.state.in_(LIVE_TRIALS))
    resumed = sa.select(attempts.resumed_from).where(attempts.state.in_(LIVE_ATTEMPTS))
    return {uuid for (uuid,) in connection.execute(sources.union(resumed)) if uuid is not None}


def _told_refusals(refused: dict[str, list[int]]) -> list[BulkRefusal]:
    return [
        BulkRefusal(
            reason=reason, number=len(ids), experiment_ids=list(dict.fromkeys(ids))[:_SHOWN]
        )
        for reason, ids in refused.items()
    ]


def _missing_role(row: sa.Row[Any]) -> str | None:
    reach = current_reach()
    if reach is None or reach.changes is None or row.project_id in reach.changes:
        return None
    return f"the role `editor` in the project {row.project} is needed"


def _judge_of(
    connection: sa.Connection, action: BulkWord, arguments: BulkArguments
) -> Callable[[sa.Row[Any]], str | None]:
    """Return a function for the reason why an experiment stays, None if the action changes it."""
    if action == "delete":
        users = checkpoint_users(connection)
        return lambda row: _told_obstacle(row, users)
    if action == "move":
        reach = current_reach()
        is_open = reach is None or reach.changes is None or arguments.to in reach.changes
        closed = None if is_open else "the role `editor` in the project to move to is needed"
        return lambda row: _UNCHANGED if row.project_id == arguments.to else closed
    if action == "label":
        return lambda row: _judge_labels(json.loads(row.labels), arguments)
    if action in _STATE_ACTIONS:
        return lambda row: _judge_state(row, action)
    return lambda row: _judge_archive(row, wanted=action == "archive")


def _told_obstacle(row: sa.Row[Any], users: dict[int, str]) -> str | None:
    if obstacle_to_deletion(row, users) is None:
        return None
    if not ExperimentState(row.state).is_terminal:
        return "it must have ended"
    if row.id in users:
        if not users[row.id].startswith("trial"):
            return "a registered model has one of its checkpoints"
        return "a trial of another experiment starts from one of its checkpoints"
    return "the directory of its run is not the master's to delete"


def _judge_labels(before: list[str], arguments: BulkArguments) -> str | None:
    return _UNCHANGED if changed_labels(before, arguments) == before else None


def _judge_archive(row: sa.Row[Any], *, wanted: bool) -> str | None:
    if row.is_archived == wanted:
        return _UNCHANGED
    return "it must have ended" if not ExperimentState(row.state).is_terminal else None


def _judge_state(row: sa.Row[Any], action: BulkWord) -> str | None:
    state = ExperimentState(row.state)
    if row.external_id is not None:
        is_over = state.is_terminal and action != "activate"
        return _UNCHANGED if is_over else "it runs without this master"
    is_ending = state.is_terminal or state.is_stopping
    if action == "kill":
        harsher = (ExperimentState.STOPPING_KILLED, ExperimentState.STOPPING_ERROR)
        return _UNCHANGED if state.is_terminal or state in harsher else None
    if action == "activate":
        if is_ending:
            return "it has ended, or is about to"
        return _UNCHANGED if state is ExperimentState.ACTIVE else None
    if is_ending or (action == "pause" and state is ExperimentState.PAUSED):
        return _UNCHANGED
    return None


bulk_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_MOST_LABELS = 100
Labels = Annotated[list[str] | None, Query(max_length=_MOST_LABELS)]
KeptNumber = Annotated[int, Query(ge=0, le=10_000, description="Of each trial, so many stay.")]


@bulk_router.delete("/experiments/{experiment_id}")
async def remove_experiment(experiment_id: ExperimentId, master: MasterOf) -> Deletion:
    """Delete an ended experiment with its trials, metrics, logs and checkpoints."""
    return Deletion(left_behind=await _delete_experiment(master, experiment_id))


@bulk_router.get("/bulk-preview")
def preview_bulk_action(
    action: BulkWord,
    filters: FiltersOf,
    master: MasterOf,
    to: Annotated[str | None, Query(max_length=64, description="The project of `move`.")] = None,
    add_label: Labels = None,
    remove_label: Labels = None,
) -> BulkPreview:
    """Preview an action on all experiments of the list with the same filters."""
    added, removed = add_label or [], remove_label or []
    try:
        check_bulk_arguments(action, to, added, removed)
    except ValueError as error:
        raise ApiError(422, "invalid_request", str(error)) from error
    arguments = _arguments(master, to, added, removed)
    with master.database.read() as connection:
        with told_as_api_errors():
            ids = matching_ids(experiments_of(connection, filters))
        return preview_action(connection, ids, action, arguments)


@bulk_router.get("/checkpoint-preview")
def preview_checkpoint_deletion(
    query: Annotated[str, Query(min_length=1, description="Of trials, as `GET /trials` has it.")],
    master: MasterOf,
    keep_best: KeptNumber = 0,
    keep_latest: KeptNumber = 0,
) -> CheckpointPreview:
    """Preview a deletion of the checkpoints of a query's trials, with the bytes to be freed."""
    with master.database.read() as connection:
        with told_as_api_errors():
            trial_ids = matching_trials_of(connection, query)
        return preview_checkpoints(
            connection, trial_ids, keep_best=keep_best, keep_latest=keep_latest
        )


@bulk_router.post("/bulk-actions")
async def act_on_experiments(request: BulkAction, master: MasterOf) -> list[BulkResult]:
    """Apply an action to several experiments; failures do not stop the remaining ones."""
    arguments = _arguments(master, request.to, request.add_labels, request.remove_labels)
    results = []
    for experiment_id in dict.fromkeys(request.experiment_ids):
        error = None
        note_object(f"experiment {experiment_id}")
        try:
            left = await _act_on_experiment(master, request.action, experiment_id, arguments)
            if left:
                error = f"Some files could not be deleted: {', '.join(left)}."
        except (
            *(NotAllowedError, NotFoundError, RefusedError, TransitionError, ConfigError),
        ) as refusal:
            error = str(refusal)
        results.append(BulkResult(experiment_id=experiment_id, error=error))
    return results


def _arguments(
    master: Master, to: str | None, add_labels: list[str], remove_labels: list[str]
) -> BulkArguments:
    added = (one for one in add_labels if one.strip())
    return BulkArguments(project_id_of(master, to), tuple(added), tuple(remove_labels))


async def _act_on_experiment(
    master: Master, action: BulkWord, experiment_id: int, arguments: BulkArguments
) -> list[str]:
    if action == "delete":
        return await _delete_experiment(master, experiment_id)

    def job(transaction: Transaction) -> None:
        check_object(transaction.connection, "experiment_id", experiment_id, changes=True)
        edit = partial(edit_experiment, transaction, master.changes, experiment_id)
        if action == "move":
            edit(project_id=arguments.to)
        elif action == "label":
            row = StateChanges.experiment(transaction.connection, experiment_id)
            labels = changed_labels(row.labels, arguments)
            if len(labels) > _MOST_LABELS:
                raise RefusedError(
                    "too_many_labels",
                    f"Experiment {experiment_id} must have at most {_MOST_LABELS} labels, but would"
                    f" have {len(labels)}.",
                )
            edit(labels=labels)
        else:
            action_of(master, action)(transaction, experiment_id)

    await write_rows(master, job)
    return []


async def _delete_experiment(master: Master, experiment_id: int) -> list[str]:
    def job(transaction: Transaction) -> Leftovers:
        check_object(transaction.connection, "experiment_id", experiment_id, changes=True)
        return delete_experiment(transaction, master.changes, experiment_id)

    leftovers = await write_rows(master, job)
    # Thread of its own, not from the small pool of request threads: a storage may hang.
    return await asyncio.wrap_future(in_own_thread(partial(master.file_removal.remove, leftovers)))
