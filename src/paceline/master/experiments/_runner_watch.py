"""The watch over runners: those that do not follow or give no sign of life are ended."""

import logging
import time
from collections.abc import Callable, Collection

from paceline.master.executors import Executor
from paceline.master.experiments._multi_node_attempts import AttemptRunner
from paceline.master.experiments._runner_leases import Leases
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import Database, Transaction
from paceline.messages.attempts import AttemptEnd
from paceline.messages.master_info import RUNNER_GRACE_S
from paceline.messages.states import ExitReason

logger = logging.getLogger(__name__)

# One that has not even taken note by then is killed so long after it was told.
_NOTE_GRACE_S = 3.0
# One that has not taken note and that nobody reaches: others of its attempt wait for its end.
_ABSENT_GRACE_S = 1.0
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
        end: Callable[[Transaction, AttemptRunner, AttemptEnd, bool], None],
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

    def look(self, runner: AttemptRunner) -> bool:
        """Look at an attempt whose runner is at work; True if the runner was killed just now."""
        self._leases.begin(runner.id)
        sign = self._executor.sign_of_life(runner.id)
        if sign != self._signs.setdefault(runner.id, sign):
            self._signs[runner.id] = sign
            self._leases.renew(runner.id)
        if self._leases.is_over(runner.id):
            return self._end_silent(runner)
        return bool(runner.should_kill) and self._kill_when_late(runner)

    def ship(self, runner_id: int) -> None:
        """Have what a runner left behind sent; what sends it asks for no news."""
        self._forget(runner_id)
        self._shipping.add(runner_id)
        self._executor.ship(runner_id)

    def _forget(self, runner_id: int) -> None:
        self._shipping.discard(runner_id)
        self._leases.end(runner_id)
        self._told_at.pop(runner_id, None)
        self._killed_at.pop(runner_id, None)
        self._signs.pop(runner_id, None)

    def keep(self, runner_ids: Collection[int]) -> None:
        """Forget all other attempts."""
        for runner_id in (self._signs.keys() | self._shipping) - set(runner_ids):
            self._forget(runner_id)

    def _kill_when_late(self, runner: AttemptRunner) -> bool:
        now = time.monotonic()
        has_noted = self._leases.has_seen(runner.id, runner.control_version)
        is_hung = not has_noted and runner.id not in self._shipping
        grace_s = _NOTE_GRACE_S if is_hung else RUNNER_GRACE_S
        if is_hung and self._executor.is_out_of_reach(runner.id):
            grace_s = _ABSENT_GRACE_S
        if now < self._told_at.setdefault(runner.id, now) + grace_s:
            return False
        logger.warning("The runner of attempt %d does not follow and is killed.", runner.attempt_id)
        return self._kill(runner)

    def _end_silent(self, runner: AttemptRunner) -> bool:
        if runner.id in self._killed_at:
            return self._kill(runner)
        of_node = f" of {runner.place}" if runner.place else ""
        text = (
            f"The runner{of_node} gave no sign of life for {self._leases.length_s:g} s"
            " (`paceline up --runner-timeout`) and is ended with the attempt's processes."
        )
        logger.warning("Attempt %d: %s", runner.attempt_id, text)
        self._database.write(
            lambda transaction: self._changes.note(
                transaction, runner.trial_id, runner.number, "WARNING", text
            )
        ).result()
        return self._kill(runner)

    def _kill(self, runner: AttemptRunner) -> bool:
        """Kill a runner; one that cannot be killed loses its attempt all the same, in time."""
        now = time.monotonic()
        is_out_of_reach = self._executor.is_out_of_reach(runner.id)
        if runner.id not in self._killed_at:
            self._killed_at[runner.id] = now
            self._executor.kill_runner(runner.id)
            if not is_out_of_reach:
                return True
        if is_out_of_reach or now > self._killed_at[runner.id] + _LAST_GRACE_S:
            end = AttemptEnd(
                reason=ExitReason.RUNNER_LOST,
                code=None,
                signal=None,
                time=time.time(),
                detail="the runner gave no sign of life and could not be ended",
            )
            self._database.write(
                lambda transaction: self._end(transaction, runner, end, is_out_of_reach)
            ).result()
        return False
