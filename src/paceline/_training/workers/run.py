"""Run of a call by workers over their generations: restarts after losses, growth."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from paceline._training.workers.failures_and_restarts import (
    WorkerFailedError,
    WorkerStartError,
    restart_cause,
)
from paceline._training.workers.worker_pools import PendingCall
from paceline._training.workers.workers import Workers

logger = logging.getLogger(__name__)

# How often to look whether the call has ended, in seconds, and while there are too few workers.
_INTERVAL_S = 0.01
_FORM_INTERVAL_S = 0.25


class Run(ABC):
    """Call carried out by workers: repeated after losses, continued by others from a checkpoint.

    `begin` it. Then `wait`, and by its answer `take_end` or `go_on`, until `take_end` returns
    values. Subclasses define the call of the workers and the steps between two generations.

    Args:
        workers: The workers.
    """

    # Errors that end a generation and may be followed by another one; others end the run.
    _retried: tuple[type[Exception], ...] = (WorkerFailedError,)

    def __init__(self, workers: Workers[Any]) -> None:
        self._workers = workers
        self._call: PendingCall | None = None
        self._call_lock = threading.Lock()
        self._has_ended = threading.Event()
        self._form_at: float | None = None
        # At the last look for more workers, or when the generation began.
        self._num_commits_seen = 0
        self._is_growing = False
        # Causes of the failed starts since the last start that was recorded.
        self._restart_causes: list[str] = []

    @property
    @abstractmethod
    def num_commits(self) -> int:
        """How many checkpoints were committed, since the first start."""

    @abstractmethod
    def _submit(self) -> PendingCall:
        """Begin the call on the present workers."""

    @abstractmethod
    def _decide(self, error: Exception) -> None:
        """Return if the workers start again after a failure; all of them have ended.

        Raises:
            Exception: They do not.
        """

    @abstractmethod
    def _has_recorded(self) -> bool:
        """Tell whether the workers of the present generation have begun to record."""

    def _prepare_next(self) -> None:  # noqa: B027 - some have nothing to do here
        """Have the next workers begin where the last checkpoint was committed."""

    def _note_restart(self, error: Exception) -> None:  # noqa: B027 - likewise
        """Report a restart of the workers after a failure."""

    def _values_of(self, call: PendingCall) -> list[Any]:
        """Return the values of an ended call.

        Raises:
            Exception: It has failed.
        """
        return call.wait() or []

    def _is_complete(self) -> bool:
        """Tell whether nothing is left to do, though the workers were ended to have others."""
        return False

    def _ask_to_move(self) -> None:  # noqa: B027 - some cannot be asked
        """Ask the workers for a checkpoint soon, as others are ready to resume from there."""

    def _wake(self, call: PendingCall) -> None:  # noqa: B027 - most look by themselves
        """Handle the end of the present call; runs in another thread."""

    # ---- the generations -----------------------------------------------------------------

    def begin(self) -> None:
        """Form the workers if necessary and begin the call, or schedule a later attempt.

        Raises:
            Exception: The workers cannot be formed.
        """
        self._has_ended.clear()
        self._is_growing = False
        while True:
            try:
                delay_s = 0.0 if self._workers.is_alive else self._workers.try_form()
                self._form_at = time.monotonic() + delay_s if delay_s else None
                if not delay_s:
                    self._begin_call()
                return
            except (WorkerFailedError, WorkerStartError) as error:
                if not self._workers.pool.can_restart:
                    raise
                self._take_failure(error)

    def _begin_call(self) -> None:
        self._num_commits_seen = self.num_commits
        self._call = self._submit()
        self._call.add_done_callback(self._note_end)

    def _note_end(self, call: PendingCall) -> None:
        # Calls end here too if their workers were replaced by others.
        with self._call_lock:
            is_present = call is self._call
            if is_present:
                self._has_ended.set()
        if is_present:
            self._wake(call)

    def wait(self) -> bool:
        """Wait a moment for the end of the call; return whether the call has ended."""
        if self._form_at is None:
            return self._has_ended.wait(_INTERVAL_S)
        left_s = max(0.0, self._form_at - time.monotonic())
        return self._has_ended.wait(min(_FORM_INTERVAL_S, left_s))

    def go_on(self) -> None:
        """Do any work due during the call: form workers, or replace them."""
        if self._form_at is not None:
            if time.monotonic() >= self._form_at:
                self.begin()
        elif not self._is_growing and self.num_commits > self._num_commits_seen:
            self._num_commits_seen = self.num_commits
            self._resize_if_due()
        elif self._workers.prepare_growth():
            self._ask_to_move()

    def _resize_if_due(self) -> None:
        """Form more workers, or leave nodes, from the checkpoint just committed."""
        present, wanted = self._workers.num_present, self._workers.next_size()
        if wanted is None or self._has_ended.is_set():
            return
        logger.info(
            "%d workers can run: ending the present %d after a checkpoint, to go on from it.",
            wanted,
            present,
        )
        self._begin_others()

    def _begin_others(self) -> None:
        """End the workers, as others resume from the last checkpoint."""
        self._is_growing = True
        self._workers.end_generation()
        with self._call_lock:
            self._call = None
        self._begin_next()

    def take_end(self) -> list[Any] | None:
        """Return the values of the ended call, or None if other workers repeat the call.

        Raises:
            Exception: What ended the call, if the workers do not start again.
        """
        assert self._call is not None
        if not self._is_growing or self._is_complete():
            try:
                return self._values_of(self._call)
            except self._retried as error:
                if not self._workers.pool.can_restart:
                    raise
                self._take_failure(error)
                self.begin()
                return None
        self._begin_next()
        return None

    def _begin_next(self) -> None:
        self._restart_causes.clear()
        self._prepare_next()
        self.begin()

    def _take_failure(self, error: Exception) -> None:
        """Prepare the generation after a failure.

        Raises:
            Exception: There is none.
        """
        # Until the others have ended they may commit and delete checkpoints.
        self._workers.await_end()
        self._decide(error)
        if self._has_recorded():
            self._restart_causes.clear()
        self._restart_causes.append(restart_cause(error))
        self._prepare_next()
        self._note_restart(error)
