"""Trials whose last attempts failed: on which nodes, and how often they could not start there."""

from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Row, exists, or_, select

from paceline.master.store import tables
from paceline.messages.node_runners import LOCAL_NODE
from paceline.messages.states import LIVE_ATTEMPTS, ErrorKind, ExitReason, TrialState

_FAILED = frozenset({ExitReason.EXITED.value, ExitReason.START_FAILED.value})


def is_failed_start(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt could not start for a reason that may hold for its node alone."""
    is_transient = exit_.get("kind") == ErrorKind.TRANSIENT.value
    return bool(exit_["reason"] == ExitReason.START_FAILED.value and not is_transient)


def nodes_of_failed_attempts(connection: Connection) -> dict[int, frozenset[int]]:
    """Return of trials that wait the nodes on which their last attempts failed in a row.

    An attempt that stored a checkpoint ends the row, as its node is good for the trial. So does one
    on several nodes, of which any may be the cause.
    """
    trials, attempts, checkpoints = tables.trials.c, tables.attempts.c, tables.checkpoints.c
    running = select(attempts.trial_id).where(attempts.state.in_(LIVE_ATTEMPTS))
    has_stored = exists().where(
        checkpoints.trial_id == attempts.trial_id, checkpoints.attempt == attempts.number
    )
    query = (
        select(
            attempts.trial_id,
            attempts.exit,
            attempts.node_id,
            attempts.members,
            attempts.run_attempt,
            has_stored.label("has_stored"),
        )
        .join(tables.trials, trials.id == attempts.trial_id)
        .where(
            trials.state == TrialState.ACTIVE.value,
            or_(trials.restarts > 0, trials.retries > 0),
            trials.id.not_in(running),
        )
        .order_by(attempts.trial_id, attempts.number.desc())
    )
    found = {}
    for trial_id, rows in groupby(connection.execute(query), attrgetter("trial_id")):
        failed = takewhile(_has_failed_on_its_node, rows)
        if nodes := frozenset(row.node_id or LOCAL_NODE for row in failed):
            found[trial_id] = nodes
    return found


def _has_failed_on_its_node(row: Row[Any]) -> bool:
    if row.exit is None or row.members is not None or row.run_attempt is not None:
        return False
    if row.exit.get("store") is not None:
        return False  # The node is not the cause.
    return row.exit["reason"] in _FAILED and row.exit.get("kind") is not None and not row.has_stored
