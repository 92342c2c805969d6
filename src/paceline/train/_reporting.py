"""What a rank reports, on its way into the rank's journal."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.journal import (
    AttemptFinished,
    AttemptStarted,
    JournalWriter,
    MetricsReported,
    encode_metrics,
)
from paceline.testing import faults
from paceline.train._spec import METRICS_GROUP, TIMINGS_GROUP, RunSpec, WorkerPlace, group_of_rank

faults.register("train.report")

# How often throughput is recorded, in seconds.
_TIMINGS_INTERVAL_S = 1.0
_LONGEST_ERROR = 2000


class Throughput:
    """Batches and samples that loaders gave out, and how long the function waited for them."""

    def __init__(self) -> None:
        self.begin(time.perf_counter())

    def begin(self, now: float) -> None:
        """Count anew."""
        self.num_batches = 0
        self.num_samples = 0
        self.data_wait_s = 0.0
        self.began = now

    def take(self, now: float) -> dict[str, float]:
        """Return the rates since the last call, and begin anew."""
        elapsed = now - self.began
        rates = {
            "samples_per_second": self.num_samples / elapsed,
            "batches_per_second": self.num_batches / elapsed,
            "data_wait_fraction": self.data_wait_s / elapsed,
        }
        self.begin(now)
        return rates


class Reporter:
    """A rank's journal in one generation of a run.

    A report's number counts as its step: those of a rank are numbered from 1, and go on from the
    checkpoint that `begin` was told of.

    Args:
        spec: The run.
        place: The rank.
        directory: Where the journal goes.
        on_report: Called after each report; for a function that runs in its driver's process.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: WorkerPlace,
        directory: Path,
        on_report: Callable[[], None] | None,
    ) -> None:
        self.journal = JournalWriter(directory)
        self.throughput = Throughput()
        self.num_reports = 0
        self.last_metrics: dict[str, Any] = {}
        self._spec = spec
        self._place = place
        self._on_report = on_report
        self._group = group_of_rank(METRICS_GROUP, place.rank)
        self._has_begun = False
        self._reach_fault = faults.reach if faults.is_active() else None

    def begin(self, steps_completed: int | None = None, resumed_from: str | None = None) -> None:
        """Say from which step on this rank reports; only the first call counts.

        It comes late, as only `load_checkpoint()` shows that the function goes on from there.
        """
        if self._has_begun:
            return
        if steps_completed is None:
            steps_completed = self._spec.first_report
        self._has_begun = True
        self.num_reports = steps_completed
        self.journal.append(
            AttemptStarted(
                time=time.time(),
                attempt=self._spec.attempt,
                generation=self._spec.generation,
                rank=self._place.rank,
                world_size=self._place.world_size,
                pid=os.getpid(),
                host=os.uname().nodename,
                resumed_from=resumed_from,
                steps_completed=steps_completed,
            )
        )

    def report(self, metrics: dict[str, Any]) -> None:
        """Record metrics; see `train.report`."""
        if not self._has_begun:
            self.begin()
        encoded = encode_metrics(metrics)
        self.num_reports = number = self.num_reports + 1
        self.last_metrics = encoded
        now = time.time()
        self.journal.append(
            MetricsReported(time=now, group=self._group, steps_completed=number, metrics=encoded)
        )
        if self._reach_fault is not None:
            self._reach_fault("train.report")
        if self.throughput.num_batches:
            self._record_timings(_TIMINGS_INTERVAL_S)
        if self._on_report is not None:
            self._on_report()

    def finish(self, error: BaseException | None) -> None:
        """Record the end and close the journal."""
        self.begin()
        if self.throughput.num_batches:
            self._record_timings(0.0)
        text = None if error is None else f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        outcome = "completed" if error is None else "error"
        self.journal.append(AttemptFinished(time=time.time(), outcome=outcome, error=text))
        self.journal.close()

    def _record_timings(self, interval_s: float) -> None:
        now = time.perf_counter()
        if now - self.throughput.began < interval_s:
            return
        self.journal.append(
            MetricsReported(
                time=time.time(),
                group=group_of_rank(TIMINGS_GROUP, self._place.rank),
                steps_completed=self.num_reports,
                metrics=dict(self.throughput.take(now)),
            )
        )
