"""Waiting for what a search decides on a validation report."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.core._control_file import ControlFile
from paceline.journal import decode_value

logger = logging.getLogger(__name__)

DECISION_TIMEOUT_S = 10.0
"""How long a training process waits for a search's decision at most."""

_POLL_S = 0.002


class SearchDecision:
    """Know the newest report that the search judges, and wait for the decision on it.

    The chief's process reports and waits. Once a decision has not come in time, no later one is
    waited for until the runner has written the control file again.

    Args:
        control: What the runner tells.
        generation: The generation of this process's journal.
        metrics: The validation metrics that the search needs to judge a report; None if there is
            no search that stops trials.
    """

    def __init__(
        self, *, control: ControlFile, generation: int, metrics: Sequence[str] | None
    ) -> None:
        self._control = control
        self._generation = generation
        self._metrics = metrics
        self._lock = threading.Lock()
        self._pending: tuple[int, int] | None = None
        self._pending_step = 0
        # How often the control file had changed when a decision failed to come.
        self._silent_at: int | None = None

    @property
    def metrics(self) -> Sequence[str] | None:
        """The validation metrics that the search needs; None if there is no such search."""
        return self._metrics

    @property
    def is_expected(self) -> bool:
        """Whether the search judges validation reports, the same on every rank."""
        return self._metrics is not None

    def expect_none(self) -> None:
        """Wait for no report any more: the search judges what operations complete."""
        self._metrics = self._pending = None

    def reported(self, sequence: int, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Note a validation report.

        Args:
            sequence: The number of its record in the journal.
            steps_completed: The step that it tells of.
            metrics: All that was reported of that step, encoded.
        """
        if self._metrics is None or not all(_is_number(metrics.get(n)) for n in self._metrics):
            return
        with self._lock:
            self._pending = (self._generation, sequence)
            self._pending_step = steps_completed

    def wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until the newest report is decided on, for `DECISION_TIMEOUT_S` at most.

        Args:
            is_over: Tells whether there is nothing to wait for any more, such as after a signal.

        Returns:
            Whether there was a report to wait for.
        """
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None or self._is_silent():
            return False
        deadline = time.monotonic() + DECISION_TIMEOUT_S
        while not is_over() and (self._control.read().judged or (-1, -1)) < pending:
            if time.monotonic() >= deadline:
                self._silent_at = self._control.num_changes
                logger.warning(
                    "The search's decision on the validation at step %d has not come within %g s."
                    " Training goes on, and waits for no other decision until the master answers"
                    " again.",
                    self._pending_step,
                    DECISION_TIMEOUT_S,
                )
                break
            time.sleep(_POLL_S)
        return True

    def _is_silent(self) -> bool:
        """Tell whether nothing has come from the runner since a decision failed to come."""
        self._control.read()
        return self._silent_at == self._control.num_changes


def _is_number(value: Any) -> bool:
    return type(decode_value(value)) in (int, float)
