"""The watch over runners: those that do not follow or give no sign of life are ended."""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Row

from paceline.master.executors import Executor
from paceline.master.experiments._leases import Leases
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import Database, Transaction
from paceline.messages.attempts import AttemptEnd
from paceline.messages.states import ExitReason

logger = logging.getLogger(__name__)

# A runner that still holds on so long after it was told to kill is killed itself.
RUNNER_GRACE_S = 30.0
# One that has not even taken note by then is killed so long after it was told.
_NOTE_GRACE_S = 3.0
# A runner that cannot be killed has lost its attempt after so long.
_LAST_GRACE_S = 30.0


class RunnerWatch:
    """Look after the runners that are at work, once per pass of the reconciler.

    Args:
        database: Where ends of attempts are recorded.
        changes: Writes to the logs of trials.
        executor: Ends runners.
        leases: What is known of the runners' signs of life.
        end: Records the end of an attempt in a transaction.
    """

    def __init__(
        self,
        database: Database,
        changes: StateChanges,
        executor: Executor,
        leases: Leases,
        end: Callable[[Transaction, int, AttemptEnd], None],
    ) -> None:
        self._executor = executor
        self._database = database
        self._changes = changes
        self._leases = leases
        self._end = end
        # When each attempt was told to kill, and when its silent runner was killed.
        self._told_at: dict[int, float] = {}
        self._killed_at: dict[int, float] = {}
        self._signs: dict[int, object] = {}
        self._shipping: set[int] = set()

    def look(self, attempt: Row[Any]) -> bool:
        """Look at an attempt whose runner is at work; True if the runner was killed just now."""
        self._leases.begin(attempt.id)
        sign = self._executor.sign_of_life(attempt.id)
        if sign != self._signs.setdefault(attempt.id, sign):
            self._signs[attempt.id] = sign
            self._leases.renew(attempt.id)
        if self._leases.is_over(attempt.id):
            return self._end_silent(attempt)
        return bool(attempt.should_kill) and self._kill_when_late(attempt)

    def ship(self, attempt_id: int) -> None:
        """Have what a runner left behind sent; what sends it asks for no news."""
        self._forget(attempt_id)
        self._shipping.add(attempt_id)
        self._executor.ship(attempt_id)

    def _forget(self, attempt_id: int) -> None:
        self._shipping.discard(attempt_id)
        self._leases.end(attempt_id)
        self._told_at.pop(attempt_id, None)
        self._killed_at.pop(attempt_id, None)
        self._signs.pop(attempt_id, None)

    def keep(self, attempt_ids: Collection[int]) -> None:
        """Forget all other attempts."""
        for attempt_id in (self._signs.keys() | self._shipping) - set(attempt_ids):
            self._forget(attempt_id)

    def _kill_when_late(self, attempt: Row[Any]) -> bool:
        now = time.monotonic()
        has_noted = self._leases.has_seen(attempt.id, attempt.control_version)
        is_hung = not has_noted and attempt.id not in self._shipping
        grace_s = _NOTE_GRACE_S if is_hung else RUNNER_GRACE_S
        if now < self._told_at.setdefault(attempt.id, now) + grace_s:
            return False
        logger.warning("The runner of attempt %d does not follow and is killed.", attempt.id)
        return self._kill(attempt)

    def _end_silent(self, attempt: Row[Any]) -> bool:
        if attempt.id in self._killed_at:
            return self._kill(attempt)
        text = (
            f"The runner gave no sign of life for {self._leases.length_s:g} s"
            " (`paceline up --runner-timeout`) and is ended with the attempt's processes."
        )
        logger.warning("Attempt %d: %s", attempt.id, text)
        self._database.write(
            lambda transaction: self._changes.note(
                transaction, attempt.trial_id, attempt.number, "WARNING", text
            )
        ).result()
        return self._kill(attempt)

    def _kill(self, attempt: Row[Any]) -> bool:
        """Kill a runner; one that cannot be killed loses its attempt all the same, in time."""
        now = time.monotonic()
        is_out_of_reach = self._executor.is_out_of_reach(attempt.id)
        if attempt.id not in self._killed_at:
            self._killed_at[attempt.id] = now
            self._executor.kill_runner(attempt.id)
            if not is_out_of_reach:
                return True
        if is_out_of_reach or now > self._killed_at[attempt.id] + _LAST_GRACE_S:
            end = AttemptEnd(
                reason=ExitReason.RUNNER_LOST,
                code=None,
                signal=None,
                time=time.time(),
                detail="the runner gave no sign of life and could not be ended",
            )
            self._database.write(
                lambda transaction: self._end(transaction, attempt.id, end)
            ).result()
        return False
