"""Delays before the next start, after attempts that ended by a transient error."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, select

from paceline.master.store import tables
from paceline.messages.states import AttemptState, ErrorKind, ExitReason

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# More attempts than a pause of the longest kind follows.
_NUM_LOOKED_AT = 16


def is_lost_runner(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt ended because its runner died."""
    return bool(exit_["reason"] == ExitReason.RUNNER_LOST.value)


def is_transient_start(exit_: dict[str, Any]) -> bool:
    """Tell whether an attempt could not start for a reason that may pass."""
    if exit_["reason"] == ExitReason.SHORTAGE.value:
        return True
    is_failed = exit_["reason"] == ExitReason.START_FAILED.value
    return is_failed and exit_.get("kind") == ErrorKind.TRANSIENT.value


def num_in_a_row(
    connection: Connection,
    trial_id: int,
    has_ended_so: Callable[[dict[str, Any]], bool],
    limit: int,
) -> int:
    """Return how many of a trial's newest attempts ended in some way, `limit` at most."""
    attempts = tables.attempts
    query = (
        select(attempts.c.exit)
        .where(attempts.c.trial_id == trial_id, attempts.c.exit.is_not(None))
        .order_by(attempts.c.number.desc())
        .limit(limit)
    )
    number = 0
    for exit_ in connection.execute(query).scalars():
        if not has_ended_so(exit_):
            break
        number += 1
    return number


def pause_after(num_shortages: int) -> float:
    """Return for how many seconds nothing is started after so many shortages in a row."""
    if num_shortages == 0:
        return 0.0
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_shortages - 1, 10))


def is_pausing(connection: Connection, now: float) -> bool:
    """Tell whether the newest attempts, of whichever trial, lacked something a moment ago.

    What one attempt lacked the next one would lack as well, whatever its trial.
    """
    attempts = tables.attempts
    # Attempts of runs made without a master tell nothing of this machine.
    query = (
        select(attempts.c.state, attempts.c.ended_at, attempts.c.exit)
        .where(attempts.c.run_attempt.is_(None), attempts.c.state != AttemptState.PENDING.value)
        .order_by(attempts.c.id.desc())
        .limit(_NUM_LOOKED_AT)
    )
    num_shortages, last = 0, 0.0
    for row in connection.execute(query):
        if row.exit is None or not is_transient_start(row.exit):
            break
        num_shortages += 1
        last = max(last, row.ended_at)
    # A clock that was set back would make the pause longer.
    return 0.0 <= now - last < pause_after(num_shortages)


def is_trial_pausing(connection: Connection, trial_id: int, now: float) -> bool:
    """Tell whether a trial lost its runner several times in a row, the last time a moment ago.

    It is tried again at once after the first time.
    """
    number = num_in_a_row(connection, trial_id, is_lost_runner, _NUM_LOOKED_AT)
    if number < 2:
        return False
    attempts = tables.attempts
    query = select(attempts.c.ended_at).where(attempts.c.trial_id == trial_id)
    last = connection.execute(query.order_by(attempts.c.number.desc()).limit(1)).scalar_one()
    return bool(0.0 <= now - last < pause_after(number - 1))
