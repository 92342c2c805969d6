"""Delays before the next start, after an attempt could not start because a resource was missing."""

from sqlalchemy import Connection, select

from paceline.master.store import tables
from paceline.messages.states import AttemptState, ExitReason

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# More attempts than a pause of the longest kind follows.
_NUM_LOOKED_AT = 16


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
        if row.exit is None or row.exit["reason"] != ExitReason.SHORTAGE.value:
            break
        num_shortages += 1
        last = max(last, row.ended_at)
    # A clock that was set back would make the pause longer.
    return 0.0 <= now - last < pause_after(num_shortages)
