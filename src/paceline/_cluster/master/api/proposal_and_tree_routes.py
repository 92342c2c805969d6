"""Routes of proposals, and of what experiments came from: their tree, and changes of their code."""

import asyncio
import difflib
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path as PathParameter
from fastapi import Query

from paceline._cluster.master.api import requests_and_answers as models
from paceline._cluster.master.api.access_guard import IdentityOf
from paceline._cluster.master.api.config_and_code_routes import reading_code
from paceline._cluster.master.api.experiment_routes import ExperimentId
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.experiment_edits import read_notes_history
from paceline._cluster.master.searches.proposals import read_proposals
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.row_ids_and_counts import NO_COUNTS, experiment_counts
from paceline._cluster.master.waiting import wait_for
from paceline._cluster.messages.experiment_models import CodeDiff, FileDiff, NotesVersion, Relative
from paceline._cluster.messages.search_and_metric_models import NewProposal, Proposal, SearchAsks
from paceline._cluster.messages.states import ExperimentState, shown_experiment_state

proposal_router = ApiRouter(tags=["experiments"], route_class=ReadingRoute)

_MOST_RELATIVES = 500
# Larger files are compared, but not shown; nor is more text than this altogether.
_MAX_SHOWN_BYTES = 128 * 1024
_MAX_DIFF_CHARACTERS = 512 * 1024
# Comparing takes the third power of this number of lines for some: half a second at 5,000.
_MAX_DIFF_LINES = 10_000
_MAX_TOTAL_LINES = 50_000
_PIECE_BYTES = 1024 * 1024


@proposal_router.post("/experiments/{experiment_id}/proposals", status_code=201)
async def propose(
    experiment_id: ExperimentId,
    request: NewProposal,
    master: models.MasterOf,
    identity: IdentityOf,
    key: models.RequestKey,
) -> Proposal:
    """Propose hyperparameters for the next trial of a search."""
    proposal = request.model_dump()
    if identity is not None:
        proposal["by"] = request.by or identity.user
    number = await models.write_once(
        master,
        key,
        lambda transaction: master.commands.propose(transaction, experiment_id, proposal),
    )
    proposals = await asyncio.to_thread(list_proposals, experiment_id, master)
    return next(one for one in proposals if one.number == number)


@proposal_router.get("/experiments/{experiment_id}/proposals")
def list_proposals(experiment_id: ExperimentId, master: models.MasterOf) -> list[Proposal]:
    """List the proposals for a search, and the trials that were made of them."""
    with master.database.read() as connection:
        models.experiment_row(connection, experiment_id)
        return [Proposal(**fields) for fields in read_proposals(connection, experiment_id)]


@proposal_router.get("/experiments/{experiment_id}/asks")
async def list_asks(
    experiment_id: ExperimentId,
    master: models.MasterOf,
    wait: Annotated[float, Query(ge=0, le=50, description="Seconds to wait for an ask.")] = 0.0,
) -> SearchAsks:
    """List the trials of a search that wait for hyperparameters, and what a sampler is told."""
    answers = master.sampler_answers
    with answers.waiting.listen(experiment_id) as changed:
        found = await asyncio.to_thread(answers.open_asks, experiment_id)
        if found.asks or not wait or master.is_closing or not await wait_for(changed, wait):
            return found
        return await asyncio.to_thread(answers.open_asks, experiment_id)


@proposal_router.post("/experiments/{experiment_id}/asks/{ask_id}", status_code=204)
async def answer_ask(
    experiment_id: ExperimentId,
    ask_id: Annotated[str, PathParameter(max_length=100)],
    request: NewProposal,
    master: models.MasterOf,
    identity: IdentityOf,
) -> None:
    """Give a waiting trial its hyperparameters; those left out come from its draw."""
    by = request.by or ("" if identity is None else identity.user)
    given = request.model_copy(update={"by": by})
    await models.write_rows(
        master, lambda t: master.commands.answer_ask(t, experiment_id, ask_id, given)
    )


@proposal_router.get("/experiments/{experiment_id}/tree")
def read_tree(experiment_id: ExperimentId, master: models.MasterOf) -> list[Relative]:
    """List what an experiment came from and all that came of that, parents before children."""
    experiments, trials = tables.experiments.c, tables.trials.c
    made = sa.select(experiments.id, experiments.forked_from, trials.experiment_id).join_from(
        tables.experiments, tables.trials, trials.id == experiments.parent_trial_id, isouter=True
    )
    with master.database.read() as connection:
        models.experiment_row(connection, experiment_id)
        derived = sa.or_(
            experiments.forked_from.is_not(None), experiments.parent_trial_id.is_not(None)
        )
        parents = {
            id_: forked_from if forked_from is not None else continued
            for id_, forked_from, continued in connection.execute(made.where(derived))
        }
        found = _family(experiment_id, parents)
        rows = connection.execute(sa.select(tables.experiments).where(experiments.id.in_(found)))
        known = {row.id: row for row in rows}
        counts = experiment_counts(connection, found)
        sources = (
            sa.select(trials.experiment_id, trials.source_checkpoint)
            .where(trials.experiment_id.in_(found), trials.source_checkpoint.is_not(None))
            .order_by(trials.id.desc())
        )
        started = {row.experiment_id: row.source_checkpoint for row in connection.execute(sources)}
    shown = []
    for row in (known[id_] for id_ in found if id_ in known):
        before = known.get(parents.get(row.id) or 0)
        running = counts.get(row.id, NO_COUNTS).num_running
        shown.append(
            Relative(
                id=row.id,
                name=row.name,
                state=shown_experiment_state(ExperimentState(row.state), running).value,
                labels=row.labels,
                parent=None if before is None else before.id,
                has_changed_code=before is not None and before.context_digest != row.context_digest,
                best_metric=row.best_metric,
                parent_trial_id=row.parent_trial_id,
                checkpoint=started.get(row.id),
            )
        )
    return shown


@proposal_router.get("/experiments/{experiment_id}/notes-history")
def read_notes_versions(experiment_id: ExperimentId, master: models.MasterOf) -> list[NotesVersion]:
    """List the versions of an experiment's notes, the newest first."""
    with master.database.read() as connection:
        models.experiment_row(connection, experiment_id)
        return [NotesVersion(**one) for one in read_notes_history(connection, experiment_id)]


def _family(experiment_id: int, parents: dict[int, int | None]) -> list[int]:
    """Return the root of an experiment and all that came of it, at most `_MOST_RELATIVES`."""
    root = experiment_id
    while (parent := parents.get(root)) is not None:
        root = parent
    children: dict[int, list[int]] = {}
    for id_, parent in sorted(parents.items()):
        children.setdefault(parent or 0, []).append(id_)
    waiting, found = [root], list[int]()
    while waiting and len(found) < _MOST_RELATIVES:
        found.append(waiting.pop())
        waiting += reversed(children.get(found[-1], []))
    return found


@proposal_router.get("/experiments/{experiment_id}/diff")
def read_diff(
    experiment_id: ExperimentId,
    master: models.MasterOf,
    since: Annotated[
        int | None, Query(ge=1, le=2**62, description="Another experiment than its parent.")
    ] = None,
) -> CodeDiff:
    """Compare the code of an experiment with that of the one that it came from."""
    with master.database.read() as connection:
        row = models.experiment_row(connection, experiment_id)
        if since is None:
            trials = tables.trials.c
            continued = sa.select(trials.experiment_id).where(trials.id == row.parent_trial_id)
            since = row.forked_from or connection.scalar(continued)
        if since is None:
            raise models.ApiError(
                409,
                "no_parent",
                f"Experiment {experiment_id} must have been forked or continued from another, but"
                " was not. Hint: name one to compare with.",
            )
        before = models.experiment_row(connection, since)
    if before.context_digest == row.context_digest:
        return CodeDiff(since=since, files=[])
    paths = (
        None if one.context_digest is None else contexts / f"{one.context_digest}.tar.gz"
        for contexts in (master.home.contexts_path,)
        for one in (before, row)
    )
    return CodeDiff(since=since, files=list(_diff(*paths)))


@lru_cache(maxsize=16)
def _diff(before: Path | None, after: Path | None) -> tuple[FileDiff, ...]:
    """Return the files that differ; contexts never change, as their names are their digests."""
    old, new = dict(_contents(before)), dict(_contents(after))
    left, lines_left, found = _MAX_DIFF_CHARACTERS, _MAX_TOTAL_LINES, []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) == new.get(path):
            continue
        change: Any = "changed" if path in old and path in new else "added"
        change = "removed" if path not in new else change
        texts = _texts(old.get(path, b""), new.get(path, b""))
        text = None
        if texts is not None and (num_lines := sum(map(len, texts))) <= lines_left and left >= 0:
            text = _text_diff(path, *texts)
            left, lines_left = left - len(text), lines_left - num_lines
        found.append(FileDiff(path=path, change=change, diff=text if left >= 0 else None))
    return tuple(found)


def _contents(context: Path | None) -> Iterator[tuple[str, bytes | str]]:
    """Yield the content of each file of the code; of large ones a digest, which is a text."""
    if context is None:
        return
    with reading_code(context) as (archive, members):
        for member in members:
            file = archive.extractfile(member) if member.isfile() else None
            if file is None:
                if member.issym() or member.islnk():
                    yield member.name, f"link to {member.linkname}"
            elif member.size <= _MAX_SHOWN_BYTES:
                yield member.name, file.read()
            else:
                digest = hashlib.sha256()
                for piece in iter(lambda: file.read(_PIECE_BYTES), b""):  # noqa: B023
                    digest.update(piece)
                yield member.name, digest.hexdigest()


def _texts(*contents: bytes | str) -> list[list[str]] | None:
    """Return the lines of a file before and after; None if they are not shown."""
    if any(isinstance(one, str) or b"\0" in one for one in contents):
        return None
    try:
        texts = [one.decode().splitlines() for one in contents if isinstance(one, bytes)]
    except UnicodeDecodeError:
        return None
    return texts if sum(map(len, texts)) <= _MAX_DIFF_LINES else None


def _text_diff(path: str, before: list[str], after: list[str]) -> str:
    return "\n".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm=""))
