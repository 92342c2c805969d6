"""A run that waits at each report until its driver lets it go on."""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.journal import Control, RunDirectory, encode_metrics
from paceline.train._checkpoint import Checkpoint
from paceline.train._results import Report, Results
from paceline.train._run_driver import RunDriver
from paceline.train._run_iterator import RunIterator

logger = logging.getLogger(__name__)

# How long the ranks may take to come to the report at which a run is stopped, in seconds.
_STOP_S = 2.0


class StepwiseRun(Iterator[Report]):
    """Yield the chief's reports of a run that waits at each of them; see `Trainer.run_stepwise`.

    Asking for the next report lets the function go on from the last one.

    Args:
        driver: The run, started.
        iterator: Its reports.
        known: The `recent` of an earlier run that this one goes on from.
    """

    def __init__(
        self, driver: RunDriver, iterator: RunIterator, known: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._driver = driver
        self._iterator = iterator
        self._recent = {number: dict(metrics) for number, metrics in known.items()}
        self._released = 0
        self._run = RunDirectory(driver.run_dir)

    def __next__(self) -> Report:
        """Let the function go on, and return its next report.

        Raises:
            StopIteration: The run is finished.
            Exception: What ended the run.
        """
        while True:
            self._run.write_control(Control(reports_released=self._released))
            report = next(self._iterator)
            self._released = max(self._released, report.number)
            if self._is_new(report):
                return report

    @property
    def recent(self) -> dict[int, dict[str, Any]]:
        """The encoded metrics since the latest checkpoint, by the numbers of their reports.

        A run that goes on from that checkpoint may report them again.
        """
        latest = self.latest_checkpoint
        # Checkpoints of earlier versions have the number as the step.
        facts = {"num_reports": 0} if latest is None else latest.metadata
        first = int(facts.get("num_reports", facts.get("steps_completed", 0)))
        self._recent = {n: metrics for n, metrics in self._recent.items() if n > first}
        return dict(self._recent)

    def _is_new(self, report: Report) -> bool:
        """Note a report, and tell whether it repeats one from before a restart.

        A function that saves after it reports repeats the last report. One that saves before it
        reports has another report of the same number; its metrics tell that.
        """
        metrics = encode_metrics(report)
        if self._recent.get(report.number) == metrics:
            return False
        self._recent = {n: known for n, known in self._recent.items() if n < report.number}
        self._recent[report.number] = metrics
        return True

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that the function has saved before its present report."""
        return self._driver.latest_checkpoint

    def get_results(self) -> Results:
        """Return what the functions returned, after the end of the run.

        Raises:
            Exception: What ended the run.
        """
        return self._iterator.get_results()

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """End the run at its present report.

        `train.report` raises an exception in the function. The workers stay if all of them come to
        the report in time; else they are killed, and started again for the next run.

        Args:
            timeout_s: How long to wait for them, in seconds.
        """
        if self._driver.is_finished:
            return
        self._run.write_control(Control(reports_released=self._released, is_stopped=True))
        deadline = time.monotonic() + timeout_s
        try:
            while not self._driver.is_finished and time.monotonic() < deadline:
                self._driver.advance(max(0.0, deadline - time.monotonic()))
        except Exception:
            # Nobody waits for what this run would have returned.
            logger.debug("A stopped run has failed.", exc_info=True)
        self.close()

    def close(self) -> None:
        """Give up a run that is not finished; its workers are killed."""
        self._iterator.close()
