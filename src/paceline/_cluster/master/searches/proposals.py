"""Proposals of people and agents: hyperparameters that wait for a search to take them."""

import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from paceline._base.arguments_and_errors import Rng
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of
from paceline.search._hyperparameter_kinds import SpaceError
from paceline.search._samplers import merged
from paceline.search._search import Search
from paceline.search._search_messages import Create, Proposed

if TYPE_CHECKING:
    pass


# Kinds of documents: a proposal is of the second kind once a trial has been made of it.
_WAITING, _TAKEN = "proposal", "proposal-taken"


def add_proposal(
    connection: sa.Connection, experiment_id: int, search: Search, proposal: dict[str, Any]
) -> int:
    """Store a proposal for the next trial of a search, and return its number.

    Args:
        connection: The writer's.
        experiment_id: The experiment.
        search: Its search.
        proposal: `hparams`, of which those left out come from a draw, `by` and `why`.

    Raises:
        RefusedError: The search will have no trial for it, or does not have such hyperparameters.
    """
    checked_proposal(search, search.space.sample(Rng(0)), proposal["hparams"])
    waiting = _count(connection, experiment_id, _WAITING)
    left = search.num_trials() - len(search.trials()) + search.num_asks
    if waiting >= left:
        raise RefusedError(
            "no_trial_left",
            f"A proposal needs a trial that is still to come, but experiment {experiment_id} will"
            f" create {max(left, 0)} more and {waiting} proposals wait. Hint: `paceline e fork`"
            " makes a new search.",
        )
    number = waiting + _count(connection, experiment_id, _TAKEN) + 1
    now = time.time()
    connection.execute(
        sa.insert(tables.documents).values(
            kind=_WAITING,
            parent=str(experiment_id),
            name=f"{number:09}",
            content={**proposal, "number": number},
            created_at=now,
            changed_at=now,
            experiment_id=experiment_id,
        )
    )
    return number


def checked_proposal(
    search: Search, drawn: dict[str, Any], given: dict[str, Any]
) -> dict[str, Any]:
    """Return the hyperparameters of a proposal, with those of a draw where it names none.

    Raises:
        RefusedError: The search does not have such hyperparameters.
    """
    try:
        return search.space.check(merged(drawn, given))
    except (SpaceError, TypeError) as error:
        what = str(error).partition("\n")[0]
        raise RefusedError("outside_space", f"A proposal must lie in the space: {what}") from None


def read_proposals(connection: sa.Connection, experiment_id: int) -> list[dict[str, Any]]:
    """Return the proposals for a search by number, with the trials made of them."""
    trials = tables.trials.c
    rows = _rows(connection, experiment_id, _WAITING, _TAKEN)
    ids = [row.content.get("request_id") for row in rows]
    query = sa.select(trials.request_id, trials.id).where(
        trials.experiment_id == experiment_id, trials.request_id.in_(filter(None, ids))
    )
    made = {row.request_id: row.id for row in connection.execute(query)}
    return [
        {
            **{name: row.content.get(name) for name in ("number", "hparams", "by", "why")},
            "problem": row.content.get("problem"),
            "created_at": row.created_at,
            "trial_id": made.get(request_id),
        }
        for row, request_id in zip(rows, ids, strict=True)
    ]


def take_proposal(
    connection: sa.Connection, experiment: sa.Row[Any], search: Search, create: Create
) -> Proposed | None:
    """Return the oldest proposal as the answer to a search's ask; None without any.

    One that does not fit the draw of the trial is put aside with the problem. The points that the
    config names come first.
    """
    waiting = _rows(connection, experiment.id, _WAITING)
    points = len(config_of(experiment).searcher.points_to_evaluate) if waiting else 0
    if points and len(search.observations()) < points:
        return None
    for row in waiting:
        content = row.content
        try:
            hparams = search.space.check(merged(create.hparams, content["hparams"]))
        except (SpaceError, TypeError) as error:
            _note_taken(connection, row, problem=str(error).partition("\n")[0])
            continue
        _note_taken(connection, row, request_id=create.request_id)
        by, why = content["by"], content["why"]
        return Proposed(request_id=create.request_id, hparams=hparams, by=by, why=why)
    return None


def _note_taken(connection: sa.Connection, row: sa.Row[Any], **facts: str) -> None:
    documents = tables.documents
    place = (documents.c[name] == getattr(row, name) for name in ("kind", "parent", "name"))
    values = {"kind": _TAKEN, "content": {**row.content, **facts}, "changed_at": time.time()}
    connection.execute(sa.update(documents).where(*place).values(values))


def _rows(connection: sa.Connection, experiment_id: int, *kinds: str) -> list[sa.Row[Any]]:
    documents = tables.documents
    query = sa.select(documents).where(
        documents.c.kind.in_(kinds), documents.c.parent == str(experiment_id)
    )
    return list(connection.execute(query.order_by(documents.c.name)))


def _count(connection: sa.Connection, experiment_id: int, kind: str) -> int:
    documents = tables.documents.c
    query = sa.select(sa.func.count()).where(
        documents.kind == kind, documents.parent == str(experiment_id)
    )
    return connection.execute(query).scalar_one()
