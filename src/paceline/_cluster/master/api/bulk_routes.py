"""Deletion of experiments, and actions on many of them, with previews by query."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import Query

from paceline._cluster.master.api.experiment_routes import ExperimentId, action_of, project_id_of
from paceline._cluster.master.api.list_routes import (
    FiltersOf,
    experiments_of,
    told_as_api_errors,
)
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import ApiError, MasterOf, write_rows
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.bulk_preview import (
    BulkArguments,
    changed_labels,
    preview_action,
    preview_checkpoints,
)
from paceline._cluster.master.experiments.deletions import Leftovers, delete_experiment
from paceline._cluster.master.experiments.experiment_edits import edit_experiment
from paceline._cluster.master.experiments.state_decisions import (
    NotFoundError,
    RefusedError,
    TransitionError,
)
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import in_own_thread
from paceline._cluster.master.master import Master
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.experiment_list import matching_ids
from paceline._cluster.master.store.query_language import matching_trials_of
from paceline._cluster.master.store.reach import NotAllowedError, check_object, note_object
from paceline._cluster.messages.experiment_models import (
    BulkAction,
    BulkPreview,
    BulkResult,
    BulkWord,
    CheckpointPreview,
    Deletion,
    check_bulk_arguments,
)
from paceline.config._fields_and_problems import ConfigError

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
