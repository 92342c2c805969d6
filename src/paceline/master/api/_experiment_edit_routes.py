"""Routes that change, copy and delete experiments."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Literal

from paceline.config import ConfigError
from paceline.master._master import Master
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._experiment_routes import Action, ExperimentId, action_of, read_experiment
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import MasterOf, RequestKey, write_once, write_rows
from paceline.master.experiments import (
    CheckpointPlace,
    Leftovers,
    NotFoundError,
    RefusedError,
    TransitionError,
    delete_experiment,
    delete_files,
    edit_experiment,
    in_own_thread,
    loss_of,
)
from paceline.messages.experiments import (
    BulkAction,
    BulkResult,
    Deletion,
    EditExperiment,
    Experiment,
    ForkExperiment,
    Loss,
)
from paceline.runner import AttemptDirectory

router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)


@router.patch("/experiments/{experiment_id}")
async def change_experiment(
    experiment_id: ExperimentId, request: EditExperiment, master: MasterOf
) -> Experiment:
    """Change an experiment's name, description, labels or notes."""
    await write_rows(
        master,
        lambda transaction: edit_experiment(transaction, experiment_id, **request.model_dump()),
    )
    return await asyncio.to_thread(read_experiment, experiment_id, master)


@router.post("/experiments/{experiment_id}/fork", status_code=201)
async def fork_experiment(
    experiment_id: ExperimentId, request: ForkExperiment, master: MasterOf, key: RequestKey
) -> Experiment:
    """Create an experiment with the code and the changed configuration of another one."""
    forked = await write_once(
        master,
        key,
        lambda transaction: master.commands.fork(
            transaction,
            experiment_id,
            request.config,
            replaces_config=request.replaces_config,
            submitted_config=request.submitted_config,
            activate=request.activate,
        ),
    )
    return await asyncio.to_thread(read_experiment, forked, master)


@router.get("/experiments/{experiment_id}/loss")
def read_loss(experiment_id: ExperimentId, master: MasterOf) -> Loss:
    """Tell what deleting an experiment would take away, and whether it may be deleted."""
    with master.database.read() as connection:
        loss = loss_of(connection, experiment_id)
    return Loss(
        num_trials=loss.num_trials,
        num_checkpoints=loss.num_checkpoints,
        checkpoint_bytes=loss.checkpoint_bytes,
        num_metric_points=loss.num_metric_points,
        obstacle=loss.obstacle,
    )


@router.delete("/experiments/{experiment_id}")
async def remove_experiment(experiment_id: ExperimentId, master: MasterOf) -> Deletion:
    """Delete an ended experiment with its trials, metrics, logs and checkpoints."""
    return Deletion(left_behind=await _delete_experiment(master, experiment_id))


@router.post("/bulk-actions")
async def act_on_experiments(request: BulkAction, master: MasterOf) -> list[BulkResult]:
    """Carry one action out on several experiments; one that fails does not hold up the others."""
    results = []
    for experiment_id in dict.fromkeys(request.experiment_ids):
        error = None
        try:
            left = await _act_on_experiment(master, request.action, experiment_id)
            if left:
                error = f"Some files could not be deleted: {', '.join(left)}."
        except (NotFoundError, RefusedError, TransitionError, ConfigError) as refusal:
            error = str(refusal)
        results.append(BulkResult(experiment_id=experiment_id, error=error))
    return results


async def _act_on_experiment(
    master: Master, action: Action | Literal["delete"], experiment_id: int
) -> list[str]:
    if action == "delete":
        return await _delete_experiment(master, experiment_id)
    job = action_of(master, action)
    await write_rows(master, lambda transaction: job(transaction, experiment_id))
    return []


async def _delete_experiment(master: Master, experiment_id: int) -> list[str]:
    leftovers = await write_rows(
        master,
        lambda transaction: delete_experiment(transaction, master.changes, experiment_id),
    )
    # Not one of the few threads that answer other requests: a storage may hang.
    return await asyncio.wrap_future(
        in_own_thread(partial(_remove_leftovers, master, experiment_id, leftovers))
    )


def _delete_files(master: Master, place: CheckpointPlace, uuid: str) -> bool:
    try:
        return delete_files(master.changes.storage_calls, place, uuid)
    except RefusedError:
        return False


def _remove_leftovers(master: Master, experiment_id: int, leftovers: Leftovers) -> list[str]:
    """Remove files whose rows are gone, and return what could not be removed."""
    left = [
        f"{place.storage}/{uuid}"
        for uuid, place in leftovers.checkpoints.items()
        if not _delete_files(master, place, uuid)
    ]
    attempts = master.home.attempts_path
    removals: list[Callable[[], None]] = [
        partial(master.secrets.forget, experiment_id),
        *(partial(master.logs.delete, trial_id) for trial_id in leftovers.trial_ids),
        *(AttemptDirectory(attempts / str(number)).remove_kept for number in leftovers.attempt_ids),
    ]
    for remove in removals:
        try:
            remove()
        except OSError as error:
            left.append(str(error))
    return left
