"""Routes of experiments."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query, Response
from pydantic_core import to_json
from sqlalchemy import select

from paceline.config import validate_config
from paceline.master._master import Master
from paceline.master._stored_records import StoredRecords
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._problem_answers import ApiError
from paceline.master.api._reading_route import ReadingRoute
from paceline.master.api._row_helpers import (
    Cursor,
    Limit,
    MasterOf,
    RecordsOf,
    RequestKey,
    checkpoint_page,
    experiment_row,
    write_once,
    write_rows,
)
from paceline.master.experiments import MAX_RUNG_ENTRIES, set_archived, thinned
from paceline.master.store import (
    Order,
    Transaction,
    config_of,
    experiment_view,
    tables,
)
from paceline.messages import searches
from paceline.messages.base import Page
from paceline.messages.checkpoints import Checkpoint
from paceline.messages.experiments import ContinueExperiment, CreateExperiment, Experiment
from paceline.search import preview

router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

ExperimentId = Annotated[int, Path(ge=1, le=2**62)]
Action = Literal["pause", "activate", "cancel", "kill", "archive", "unarchive"]


@router.post("/experiments", status_code=201)
async def create_experiment(
    request: CreateExperiment, master: MasterOf, key: RequestKey
) -> Experiment:
    """Create an experiment; its context must have been uploaded before."""
    config = await asyncio.to_thread(validate_config, request.config)
    digest = request.context_digest
    if digest is not None and not context_path_exists(master, digest):
        raise ApiError(409, "no_context", f"The context {digest!r} must be uploaded before.")
    experiment_id = await write_once(
        master,
        key,
        lambda transaction: master.commands.create(
            transaction,
            config,
            submitted_config=request.submitted_config,
            context_digest=digest,
            activate=request.activate,
            source=None if request.source is None else request.source.model_dump(exclude_none=True),
        ),
    )
    return await asyncio.to_thread(_read, master, experiment_id)


@router.get("/experiments/{experiment_id}")
def read_experiment(experiment_id: ExperimentId, records: RecordsOf) -> Experiment:
    """Read one experiment."""
    return _read(records, experiment_id)


@router.post("/experiments/{experiment_id}/continue")
async def continue_experiment(
    experiment_id: ExperimentId, request: ContinueExperiment, master: MasterOf, key: RequestKey
) -> Experiment:
    """Reopen an ended experiment."""

    def job(transaction: Transaction) -> int:
        master.commands.continue_experiment(transaction, experiment_id, request.config)
        return experiment_id

    await write_once(master, key, job)
    return await asyncio.to_thread(_read, master, experiment_id)


@router.post("/experiments/{experiment_id}/{action}")
async def act_on_experiment(
    experiment_id: ExperimentId, action: Action, master: MasterOf
) -> Experiment:
    """Pause, activate, cancel, kill, archive or unarchive an experiment."""
    job = action_of(master, action)
    await write_rows(master, lambda transaction: job(transaction, experiment_id))
    return await asyncio.to_thread(_read, master, experiment_id)


@router.get("/experiments/{experiment_id}/checkpoints")
def list_checkpoints(
    experiment_id: ExperimentId,
    records: RecordsOf,
    limit: Limit = 100,
    cursor: Cursor = None,
    sort_by: Annotated[Literal["steps", "metric"], Query()] = "steps",
) -> Page[Checkpoint]:
    """List an experiment's checkpoints, the latest or the best first."""
    checkpoints = tables.checkpoints.c
    with records.database.read() as connection:
        searcher = config_of(experiment_row(connection, experiment_id)).searcher
        keys: tuple[Any, ...] = (
            checkpoints.steps_completed, checkpoints.created_at, checkpoints.uuid,
        )  # fmt: skip
        is_descending = True
        if sort_by == "metric":
            keys = (checkpoints.metric, *keys)
            is_descending = not searcher.smaller_is_better
        query = select(tables.checkpoints).where(checkpoints.experiment_id == experiment_id)
        return checkpoint_page(
            connection,
            query,
            Order(keys, is_descending, True),
            f"checkpoints by {sort_by}",
            cursor,
            limit,
        )


@router.get("/experiments/{experiment_id}/search", response_model=searches.SearchView)
def read_search(
    experiment_id: ExperimentId,
    master: MasterOf,
    limit: Annotated[
        int, Query(ge=1, le=MAX_RUNG_ENTRIES, description="At most so many trials of each rung.")
    ] = MAX_RUNG_ENTRIES,
) -> Response:
    """Read the rungs of a halving search: who was stopped where."""
    with master.database.read() as connection:
        experiment_row(connection, experiment_id)
    brackets = master.search_views.read(experiment_id)

    def encode() -> bytes:
        # As dictionaries: thousands of models would take longer than all the rest.
        shown = [
            [
                {
                    "length": rung.length,
                    "entries": list(map(msgspec.structs.asdict, thinned(rung.entries, limit))),
                    "num_by_decision": rung.num_by_decision,
                }
                for rung in bracket
            ]
            for bracket in brackets
        ]
        return to_json({"brackets": shown}, inf_nan_mode="null")

    body = master.encodings.encoded(("search", limit, brackets), encode)
    return Response(body, media_type="application/json")


@router.post("/preview-search")
def preview_search(request: searches.PreviewSearch) -> searches.SearchPreview:
    """Say what a search would train, without creating anything."""
    config = validate_config(request.config)
    found = preview(config.search_config(), config.hyperparameters)
    return searches.SearchPreview(
        searcher=config.searcher.name,
        unit=config.searcher.length_unit,
        rows=[searches.PreviewRow(num_trials=row.trials, length=row.units) for row in found.rows],
    )


def action_of(master: Master, action: Action) -> Callable[[Transaction, int], None]:
    """Return what carries an action out."""
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


def context_path_exists(master: Master, digest: str) -> bool:
    """Tell whether a context was uploaded."""
    is_digest = len(digest) == 64 and all(c in "0123456789abcdef" for c in digest)
    return is_digest and (master.home.contexts_path / f"{digest}.tar.gz").is_file()


def _read(records: StoredRecords, experiment_id: int) -> Experiment:
    with records.database.read() as connection:
        row = experiment_row(connection, experiment_id)
        view = experiment_view(connection, row)
    return view.model_copy(update={"notes": row.notes})
