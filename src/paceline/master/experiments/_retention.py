"""Deleting checkpoints beside everything else that a master does."""

import logging
import threading
import time
from collections import Counter

from sqlalchemy import select

from paceline.master.experiments._checkpoint_sweep import RETRY_S, sweep_checkpoints
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import Database, DatabaseLostError, tables

logger = logging.getLogger(__name__)

_TICK_S = 1.0
# A store that does not answer is not waited for when a master ends.
_CLOSE_S = 5.0


class Retention:
    """A thread that applies retention policies, woken by changes and once a second.

    A thread of its own, as nothing else may wait for a store that is slow to delete, or hangs.
    """

    def __init__(self, database: Database, changes: StateChanges) -> None:
        self._database = database
        self._changes = changes
        # When an experiment is to be looked at again, in seconds since the epoch.
        self._next_sweeps: dict[int, float] = {}
        # How often each storage has failed lately, for whichever experiment.
        self._failures = Counter[str]()
        self._failures_since = 0.0
        self._wakeup = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Ask for a pass soon; safe from any thread."""
        self._wakeup.set()

    def close(self) -> None:
        """Stop; what is left to do is done when a master starts on this home again."""
        self._is_closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def make_pass(self) -> None:
        """Delete checkpoints of experiments that have ended, or have stored another one."""
        experiments = tables.experiments
        with self._database.read() as connection:
            due = connection.execute(
                select(experiments.c.id).where(
                    experiments.c.retention_done.is_(False),
                    experiments.c.external_id.is_(None),
                )
            ).scalars()
            experiment_ids = due.all()
        if time.time() >= self._failures_since + RETRY_S:
            self._failures.clear()
            self._failures_since = time.time()
        for experiment_id in experiment_ids:
            if self._is_closing:
                return
            if time.time() < self._next_sweeps.get(experiment_id, 0.0):
                continue
            next_s = sweep_checkpoints(self._changes, self._database, experiment_id, self._failures)
            self._next_sweeps.pop(experiment_id, None)
            if next_s is not None:
                self._next_sweeps[experiment_id] = next_s

    def _run(self) -> None:
        while True:
            self._wakeup.wait(_TICK_S)
            if self._is_closing:
                return
            self._wakeup.clear()
            try:
                self.make_pass()
            except DatabaseLostError:
                # The database has told of it.
                return
            except Exception:
                logger.exception("Checkpoints could not be deleted; the next pass tries again.")
                time.sleep(_TICK_S)
