"""Delays before the next start, after attempts that ended by a transient error."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, exists, select

from paceline.master.store import tables
from paceline.messages.node_runners import LOCAL_NODE
from paceline.messages.states import AttemptState, ErrorKind, ExitReason

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# More attempts than a pause of the longest kind follows.
_NUM_LOOKED_AT = 16


def is_lost_runner(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt ended because its runner died."""
    return bool(exit_["reason"] == ExitReason.RUNNER_LOST.value)


def is_not_formed(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt ended because its nodes did not come together."""
    return bool(exit_["reason"] == ExitReason.NOT_FORMED.value)


def is_transient_start(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt could not start for a reason that may pass."""
    if exit_["reason"] == ExitReason.SHORTAGE.value:
        return True
    is_failed = exit_["reason"] == ExitReason.START_FAILED.value
    return is_failed and exit_.get("kind") == ErrorKind.TRANSIENT.value


def is_store_failure(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt failed because a storage did not answer."""
    return exit_.get("store") is not None


def num_in_a_row(
    connection: Connection,
    trial_id: int,
    has_ended_so: Callable[[dict[str, Any]], bool],
    limit: int,
) -> int:
    """Return how many of a trial's newest attempts ended in some way, `limit` at most.

    One that stored a checkpoint is the first of a row: what was in the way before has passed.
    """
    attempts, checkpoints = tables.attempts, tables.checkpoints
    has_stored = exists().where(
        checkpoints.c.trial_id == trial_id, checkpoints.c.attempt == attempts.c.number
    )
    query = (
        select(attempts.c.exit, has_stored.label("has_stored"))
        .where(attempts.c.trial_id == trial_id, attempts.c.exit.is_not(None))
        .order_by(attempts.c.number.desc())
        .limit(limit)
    )
    number = 0
    for row in connection.execute(query):
        if not has_ended_so(row.exit):
            break
        number += 1
        if row.has_stored:
            break
    return number


def start_delay_after(num_shortages: int) -> float:
    """Return for how many seconds nothing is started after so many shortages in a row."""
    if num_shortages == 0:
        return 0.0
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_shortages - 1, 10))


def nodes_in_start_delay(connection: Connection, now: float) -> dict[int, float]:
    """Return of the nodes whose newest attempts lacked something a moment ago until when they rest.

    What one attempt lacked on a node, such as space on its disk, the next one would lack as well,
    whatever its trial. Other nodes have it.
    """
    resting = {}
    failed = {
        node_id
        for row in _failed_lately(connection, now, is_transient_start)
        for node_id, exit_ in _exits_by_node(row).items()
        if exit_ is not None and is_transient_start(exit_)
    }
    for node_id in failed:
        until = _node_rests_until(connection, now, node_id)
        if now < until:
            resting[node_id] = until
    return resting


def trials_in_start_delay(connection: Connection, now: float) -> dict[int, float]:
    """Return of the trials that lost their runner several times in a row until when they rest.

    A trial is tried again at once after the first time. One whose nodes did not come together, or
    whose storage did not answer, rests after that, too.
    """
    resting: dict[int, float] = {}
    ends = ((is_lost_runner, 1), (is_not_formed, 0), (is_store_failure, 0))
    for has_ended_so, num_at_once in ends:
        for row in _failed_lately(connection, now, has_ended_so):
            number = num_in_a_row(connection, row.trial_id, has_ended_so, _NUM_LOOKED_AT)
            until = row.ended_at + start_delay_after(number - num_at_once)
            # A clock that was set back would make the pause longer.
            if number > num_at_once and row.ended_at <= now < until:
                resting[row.trial_id] = max(until, resting.get(row.trial_id, until))
    return resting


def _failed_lately(
    connection: Connection, now: float, has_ended_so: Callable[[dict[str, Any]], bool]
) -> list[Any]:
    attempts = tables.attempts.c
    query = select(
        attempts.trial_id, attempts.node_id, attempts.members, attempts.ended_at, attempts.exit
    ).where(
        attempts.ended_at > now - _LONGEST_PAUSE_S,
        # Attempts of runs made without a master tell nothing of a node.
        attempts.run_attempt.is_(None),
        attempts.exit.is_not(None),
    )
    return [row for row in connection.execute(query) if has_ended_so(row.exit)]


def _exits_by_node(attempt: Any) -> dict[int, dict[str, Any] | None]:
    """Return how an attempt ended on each of its nodes; None where it has not."""
    if attempt.members is None:
        return {attempt.node_id or LOCAL_NODE: attempt.exit}
    return {member["node_id"]: member["exit"] for member in attempt.members}


def _node_rests_until(connection: Connection, now: float, node_id: int) -> float:
    attempts = tables.attempts.c
    is_own = attempts.node_id.is_(None) if node_id == LOCAL_NODE else attempts.node_id == node_id
    query = (
        select(attempts.node_id, attempts.members, attempts.ended_at, attempts.exit)
        .where(
            # The node of an attempt on several is that of rank 0.
            is_own | attempts.members.is_not(None),
            attempts.run_attempt.is_(None),
            attempts.state != AttemptState.PENDING.value,
        )
        .order_by(attempts.id.desc())
        .limit(_NUM_LOOKED_AT)
    )
    num_shortages, last = 0, 0.0
    for row in connection.execute(query):
        exits = _exits_by_node(row)
        if node_id not in exits:
            continue
        exit_ = exits[node_id]
        if exit_ is not None and exit_["reason"] == ExitReason.KILLED.value and len(exits) > 1:
            continue  # Another node had failed, which tells nothing of this one.
        if exit_ is None or not is_transient_start(exit_):
            break
        num_shortages += 1
        last = max(last, row.ended_at or 0.0)
    # A clock that was set back would make the pause longer.
    return last + start_delay_after(num_shortages) if last <= now else 0.0
