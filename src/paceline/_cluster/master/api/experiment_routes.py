"""Experiments: read, create, act, change, copy, delete."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import sqlalchemy as sa
from fastapi import Path, Query, Response
from pydantic_core import to_json

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.config_rules import fill_new_config
from paceline._cluster.master.experiments.deletions import loss_of
from paceline._cluster.master.experiments.experiment_edits import (
    edit_experiment,
    set_archived,
    version_of_notes,
)
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.master import Master
from paceline._cluster.master.searches.search_limits import end_reason, used_limits
from paceline._cluster.master.searches.stored_searches import (
    MAX_RUNG_ENTRIES,
    ShownEntry,
    count_proposals,
    thinned,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of, experiment_view
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.list_pages import Order
from paceline._cluster.master.store.reach import creating_in, current_project, current_reach
from paceline._cluster.messages import search_and_metric_models
from paceline._cluster.messages.experiment_models import (
    Checkpoint,
    ContinueExperiment,
    ContinueTrial,
    CreateExperiment,
    EditExperiment,
    Experiment,
    ForkExperiment,
    Loss,
    Page,
    SearchLimit,
)
from paceline._cluster.messages.states import ErrorKind
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._validate_config import validate_config
from paceline.search._preview_and_simulation import preview

experiment_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

ExperimentId = Annotated[int, Path(ge=1, le=2**62)]
Action = Literal["pause", "activate", "cancel", "kill", "archive", "unarchive"]


@experiment_router.post("/experiments", status_code=201)
async def create_experiment(
    request: CreateExperiment, master: models.MasterOf, key: models.RequestKey
) -> Experiment:
    """Create an experiment; its context must have been uploaded before."""
    config = await asyncio.to_thread(_filled_config, master, request)
    digest, source = code_of(master, request)

    def job(transaction: Transaction) -> int:
        with creating_in(project_id_of(master, request.project)):
            return master.commands.create(
                transaction,
                config,
                submitted_config=request.submitted_config,
                context_digest=digest,
                activate=request.activate,
                source=source,
            )

    experiment_id = await models.write_once(master, key, job)
    return await asyncio.to_thread(_read, master, experiment_id)


def _filled_config(master: Master, request: CreateExperiment) -> ExperimentConfig:
    with (
        creating_in(project_id_of(master, request.project)),
        master.database.read(everything=True) as connection,
    ):
        project, template = current_project(), request.template
        return validate_config(fill_new_config(connection, project, request.config, template))


@experiment_router.get("/experiments/{experiment_id}")
def read_experiment(experiment_id: ExperimentId, records: models.RecordsOf) -> Experiment:
    """Read an experiment."""
    return _read(records, experiment_id)


@experiment_router.post("/experiments/{experiment_id}/continue")
async def continue_experiment(
    experiment_id: ExperimentId,
    request: ContinueExperiment,
    master: models.MasterOf,
    key: models.RequestKey,
) -> Experiment:
    """Reopen an ended experiment."""

    def job(transaction: Transaction) -> int:
        master.commands.continue_experiment(
            transaction, experiment_id, request.config, request.limits
        )
        return experiment_id

    await models.write_once(master, key, job)
    return await asyncio.to_thread(_read, master, experiment_id)


@experiment_router.post("/experiments/{experiment_id}/{action}")
async def act_on_experiment(
    experiment_id: ExperimentId, action: Action, master: models.MasterOf
) -> Experiment:
    """Pause, activate, cancel, kill, archive or unarchive an experiment."""
    job = action_of(master, action)
    await models.write_rows(master, lambda transaction: job(transaction, experiment_id))
    return await asyncio.to_thread(_read, master, experiment_id)


@experiment_router.get("/experiments/{experiment_id}/checkpoints")
def list_checkpoints(
    experiment_id: ExperimentId,
    records: models.RecordsOf,
    limit: models.Limit = 100,
    cursor: models.Cursor = None,
    sort_by: Annotated[Literal["steps", "metric"], Query()] = "steps",
) -> Page[Checkpoint]:
    """List an experiment's checkpoints, the latest or the best first."""
    checkpoints = tables.checkpoints.c
    with records.database.read() as connection:
        searcher = config_of(models.experiment_row(connection, experiment_id)).searcher
        keys: tuple[Any, ...] = (
            checkpoints.steps_completed, checkpoints.created_at, checkpoints.uuid,
        )  # fmt: skip
        is_descending = True
        if sort_by == "metric":
            keys = (checkpoints.metric, *keys)
            is_descending = not searcher.smaller_is_better
        query = sa.select(tables.checkpoints).where(checkpoints.experiment_id == experiment_id)
        return models.checkpoint_page(
            connection,
            query,
            Order(keys, is_descending, True),
            f"checkpoints by {sort_by}",
            cursor,
            limit,
        )


@experiment_router.get(
    "/experiments/{experiment_id}/search", response_model=search_and_metric_models.SearchView
)
def read_search(
    experiment_id: ExperimentId,
    master: models.MasterOf,
    limit: Annotated[
        int, Query(ge=1, le=MAX_RUNG_ENTRIES, description="At most so many trials of each rung.")
    ] = MAX_RUNG_ENTRIES,
) -> Response:
    """Read the rungs of a halving search, and the Pareto front of one of several objectives."""
    sampler, trials = None, tables.trials.c
    with master.database.read() as connection:
        searcher = config_of(models.experiment_row(connection, experiment_id)).searcher
        if searcher.is_asking:
            counts = count_proposals(connection, experiment_id)
            names = ("name", "num_proposed", "num_fallbacks", "last_fault")
            sampler = dict(zip(names, (searcher.sampler_spec().shown, *counts), strict=True))
        is_memory = trials.error_kind == ErrorKind.MEMORY.value
        of_search = sa.select(sa.func.count()).where(
            trials.experiment_id == experiment_id, is_memory
        )
        num_out_of_memory = connection.scalar(of_search)
    brackets = master.search_views.read(experiment_id)
    several: dict[str, Any] = {}
    if searcher.objectives:
        front = master.search_views.front(experiment_id)
        shown_front = [
            {"trial_id": trial_id, "values": searcher.signed(losses)}
            for trial_id, losses in front[:limit]
        ]
        found = sa.select(trials.id, trials.hparams).where(
            trials.id.in_([one["trial_id"] for one in shown_front])
        )
        with master.database.read() as connection:
            hparams = {row.id: row.hparams for row in connection.execute(found)}
        several = {
            "objectives": [one.model_dump() for one in searcher.objectives],
            # A trial that was just deleted is in no front.
            "front": [
                {**one, "hparams": hparams[one["trial_id"]]}
                for one in shown_front
                if one["trial_id"] in hparams
            ],
            "num_in_front": len(front),
        }

    def encode() -> bytes:
        # Dictionaries instead of models: thousands of models would take longer than all the rest.
        shown = [
            [
                {
                    "length": rung.length,
                    "entries": list(map(_rung_entry, thinned(rung.entries, limit))),
                    "num_by_decision": rung.num_by_decision,
                }
                for rung in bracket
            ]
            for bracket in brackets
        ]
        told = {"sampler": sampler, "num_out_of_memory": num_out_of_memory, **several}
        return to_json({"brackets": shown, **told}, inf_nan_mode="null")

    key = ("search", limit, brackets, sampler, num_out_of_memory, several)
    body = master.encodings.encoded(key, encode)
    return Response(body, media_type="application/json")


def _rung_entry(entry: ShownEntry) -> dict[str, Any]:
    found = msgspec.structs.asdict(entry)
    if entry.arrival is not None:
        found["arrival"] = msgspec.structs.asdict(entry.arrival)
    return found


@experiment_router.post("/preview-search")
def preview_search(
    request: search_and_metric_models.PreviewSearch,
) -> search_and_metric_models.SearchPreview:
    """Return the trials planned by a search, without creating anything."""
    config = validate_config(request.config)
    found = preview(config.search_config(), config.hyperparameters)
    return search_and_metric_models.SearchPreview(
        searcher=config.searcher.name,
        unit=config.searcher.length_unit,
        rows=[
            search_and_metric_models.PreviewRow(num_trials=row.trials, length=row.units)
            for row in found.rows
        ],
    )


def action_of(master: Master, action: Action) -> Callable[[Transaction, int], None]:
    """Return the function to execute an action."""
    commands = master.commands
    jobs: dict[Action, Callable[[Transaction, int], None]] = {
        "pause": commands.pause,
        "activate": commands.activate,
        "cancel": commands.cancel,
        "kill": commands.kill,
        "archive": partial(set_archived, is_archived=True),
        "unarchive": partial(set_archived, is_archived=False),
    }
    return jobs[action]


def code_of(
    master: Master, request: CreateExperiment | ForkExperiment | ContinueTrial
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the digest and the source of the code that a request names.

    Raises:
        ApiError: It was not uploaded before.
    """
    digest, source = request.context_digest, request.source
    if digest is not None:
        is_digest = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
        if not is_digest or not (master.home.contexts_path / f"{digest}.tar.gz").is_file():
            raise models.ApiError(
                409, "no_context", f"The context {digest!r} must be uploaded before."
            )
    return digest, None if source is None else source.model_dump(exclude_none=True)


def _read(records: models.StoredRecords, experiment_id: int) -> Experiment:
    with records.database.read() as connection:
        row = models.experiment_row(connection, experiment_id)
        view = experiment_view(connection, row)
        limits = used_limits(connection, row)
    told = {
        "notes": row.notes,
        "notes_version": version_of_notes(row.notes),
        "limits": [SearchLimit(**limit) for limit in limits],
        "end_reason": end_reason(row, limits),
    }
    return view.model_copy(update=told)


experiment_edit_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)


def project_id_of(master: Master, name: str | None) -> int | None:
    """Return the id of a project that a body names, None if it names none."""
    if name is None:
        return None
    reach, project = current_reach(), master.users.project_id(name)
    if reach is not None and reach.sees is not None and project not in reach.sees:
        raise NotFoundError(f"There is no project {name!r}.")
    return project


@experiment_edit_router.patch("/experiments/{experiment_id}")
async def change_experiment(
    experiment_id: ExperimentId, request: EditExperiment, master: models.MasterOf
) -> Experiment:
    """Change an experiment's texts, project, when it gets slots, or the limits of its search."""
    fields = request.model_dump(exclude={"project"})
    project_id = project_id_of(master, request.project)
    await models.write_rows(
        master,
        lambda transaction: edit_experiment(
            transaction, master.changes, experiment_id, project_id=project_id, **fields
        ),
    )
    return await asyncio.to_thread(read_experiment, experiment_id, master)


@experiment_edit_router.post("/experiments/{experiment_id}/fork", status_code=201)
async def fork_experiment(
    experiment_id: ExperimentId,
    request: ForkExperiment,
    master: models.MasterOf,
    key: models.RequestKey,
) -> Experiment:
    """Create an experiment from another: its code, unless other is named, and changed config."""
    digest, source = code_of(master, request)
    forked = await models.write_once(
        master,
        key,
        lambda transaction: master.commands.fork(
            transaction,
            experiment_id,
            request.config,
            replaces_config=request.replaces_config,
            submitted_config=request.submitted_config,
            activate=request.activate,
            context_digest=digest,
            source=source,
        ),
    )
    return await asyncio.to_thread(read_experiment, forked, master)


@experiment_edit_router.get("/experiments/{experiment_id}/loss")
def read_loss(experiment_id: ExperimentId, master: models.MasterOf) -> Loss:
    """Return the consequences of deleting an experiment, and any obstacle to deletion."""
    with master.database.read() as connection:
        loss = loss_of(connection, experiment_id)
    return Loss(
        num_trials=loss.num_trials,
        num_checkpoints=loss.num_checkpoints,
        checkpoint_bytes=loss.checkpoint_bytes,
        num_metric_points=loss.num_metric_points,
        obstacle=loss.obstacle,
    )
