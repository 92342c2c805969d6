"""Trials whose last attempts failed: on which nodes, and how often they could not start there."""

from typing import Any

from sqlalchemy import Connection, Row, exists, or_, select

from paceline.master.store import tables
from paceline.messages.node_runners import LOCAL_NODE
from paceline.messages.states import ErrorKind, ExitReason, TrialState

_FAILED = frozenset({ExitReason.EXITED.value, ExitReason.START_FAILED.value})
# So many attempts of a trial are looked at.
_NUM_LOOKED_AT = 16


def is_failed_start(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt could not start for a reason that may hold for its node alone."""
    is_transient = exit_.get("kind") == ErrorKind.TRANSIENT.value
    return bool(exit_["reason"] == ExitReason.START_FAILED.value and not is_transient)


def nodes_of_failed_attempts(connection: Connection) -> dict[int, frozenset[int]]:
    """Return of active trials the nodes on which their last attempts failed in a row.

    An attempt that stored a checkpoint ends the row, as its node is good for the trial. So does one
    on several nodes, of which any may be the cause.
    """
    trials = tables.trials.c
    query = select(trials.id).where(
        trials.state == TrialState.ACTIVE.value, or_(trials.restarts > 0, trials.retries > 0)
    )
    found = {}
    for trial_id in connection.execute(query).scalars().all():
        if nodes := _nodes_of_row(connection, trial_id):
            found[trial_id] = nodes
    return found


def _nodes_of_row(connection: Connection, trial_id: int) -> frozenset[int]:
    attempts, checkpoints = tables.attempts, tables.checkpoints
    has_stored = exists().where(
        checkpoints.c.trial_id == trial_id, checkpoints.c.attempt == attempts.c.number
    )
    query = (
        select(
            attempts.c.exit,
            attempts.c.node_id,
            attempts.c.members,
            attempts.c.run_attempt,
            has_stored.label("has_stored"),
        )
        .where(attempts.c.trial_id == trial_id)
        .order_by(attempts.c.number.desc())
        .limit(_NUM_LOOKED_AT)
    )
    nodes = set()
    for row in connection.execute(query):
        if not _has_failed_on_its_node(row):
            break
        nodes.add(row.node_id or LOCAL_NODE)
    return frozenset(nodes)


def _has_failed_on_its_node(row: Row[Any]) -> bool:
    if row.exit is None or row.members is not None or row.run_attempt is not None:
        return False
    return row.exit["reason"] in _FAILED and row.exit.get("kind") is not None and not row.has_stored
