"""System metrics of each node, sampled while training runs."""

import logging
import operator
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.core._attempt_journal import record_metrics
from paceline.core._distributed_context import DistributedContext
from paceline.core._report_checks import group_of_rank
from paceline.core._system_metrics import SystemSampler
from paceline.core._tensorboard_files import TensorboardFiles
from paceline.journal import JournalWriter, encode_metrics

logger = logging.getLogger(__name__)

SYSTEM_GROUP = "system"

_LEAST_INTERVAL_S = 0.1
# A driver that hangs must not keep the process from its end.
_JOIN_S = 5.0


class ProfilerContext:
    """Sample processors, memory, disk, network and GPUs, once per node.

    Every rank may call `on` and `off`; the first rank of each node samples, in a thread. Means of
    the samples go to the metric group "system", or "system_rank_8" if rank 8 is the first of its
    node. A row belongs to the newest step that the rank has reported, so there is one per step.
    """

    def __init__(
        self,
        *,
        journal: JournalWriter,
        distributed: DistributedContext,
        disk: Path,
        reported_steps: Callable[[], int],
        first_step: int,
        tensorboard: TensorboardFiles,
    ) -> None:
        self._tensorboard = tensorboard
        self._journal = journal
        self._distributed = distributed
        self._disk = disk
        self._reported_steps = reported_steps
        self._noted_steps = 0
        # Rows of earlier attempts stand up to here.
        self._last_step = first_step - 1
        self._thread: _SamplingThread | None = None

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Begin to sample, or go on with other settings.

        Errors while sampling do not end training: the source is named in the log and left out.

        Args:
            sampling_interval: Seconds between two samples, at least 0.1.
            samples_per_report: The least number of samples whose means make a row.

        Raises:
            TypeError: A value is no number.
            ValueError: `sampling_interval` is below 0.1, or `samples_per_report` below 1.
        """
        interval, count = _checked_profiler_settings(sampling_interval, samples_per_report)
        self.off()
        if self._distributed.local_rank == 0:
            sampler = SystemSampler(self._disk, self._distributed.local_size)
            self._thread = _SamplingThread(sampler, interval, count, self._report)
            self._thread.start()

    def off(self) -> None:
        """Stop sampling, and report what was sampled last; does nothing if it is off."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.finish()

    def note_steps(self, steps_completed: int) -> None:
        """Tell how far training is, on a rank that reports no metrics itself.

        Args:
            steps_completed: The number of batches that training has completed.
        """
        self._noted_steps = operator.index(steps_completed)

    def _report(self, means: dict[str, float]) -> bool:
        """Write a row, unless the newest step has one."""
        step = max(self._noted_steps, self._reported_steps())
        if step <= self._last_step:
            return False
        self._last_step = step
        group = group_of_rank(SYSTEM_GROUP, self._distributed.rank)
        encoded = encode_metrics(means)
        record_metrics(self._journal, group, step, encoded)
        self._tensorboard.write(group, step, encoded)
        return True


class _SamplingThread(threading.Thread):
    """Take samples until told to finish; hold no more than one sum for each metric."""

    def __init__(
        self,
        sampler: SystemSampler,
        interval_s: float,
        samples_per_report: int,
        report: Callable[[dict[str, float]], bool],
    ) -> None:
        super().__init__(name="paceline-system-metrics", daemon=True)
        self._sampler = sampler
        self._interval_s = interval_s
        self._samples_per_report = samples_per_report
        self._report = report
        self._stopping = threading.Event()
        # A thread that hung may come back after the journal was closed.
        self._lock = threading.Lock()
        self._is_given_up = False
        self._sums: dict[str, tuple[float, int]] = {}
        self._num_samples = 0

    def run(self) -> None:
        """Sample and report."""
        try:
            self._sampler.open()
            while not self._stopping.wait(self._interval_s):
                self._take()
                if self._num_samples >= self._samples_per_report:
                    self._write()
            self._take()
            self._write()
            self._sampler.close()
        except Exception:
            logger.exception("The system metrics of this node end here.")

    def finish(self) -> None:
        """Take a last sample and end."""
        self._stopping.set()
        self.join(_JOIN_S)
        with self._lock:
            self._is_given_up = True
        if self.is_alive():
            logger.warning("The system metrics of this node hang; training goes on without them.")

    def _take(self) -> None:
        for name, value in self._sampler.take().items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        self._num_samples += 1

    def _write(self) -> None:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        with self._lock:
            if not self._is_given_up and means and self._report(means):
                self._sums, self._num_samples = {}, 0


def _checked_profiler_settings(
    sampling_interval: float, samples_per_report: int
) -> tuple[float, int]:
    if isinstance(sampling_interval, bool) or not isinstance(sampling_interval, (int, float)):
        raise TypeError(f"`sampling_interval` must be a number, but got {sampling_interval!r}.")
    # Not `<`, so that NaN is refused as well.
    if not _LEAST_INTERVAL_S <= sampling_interval <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"`sampling_interval` must be at least {_LEAST_INTERVAL_S} seconds, but got"
            f" {sampling_interval}."
        )
    if isinstance(samples_per_report, bool) or not isinstance(samples_per_report, int):
        raise TypeError(f"`samples_per_report` must be an integer, but got {samples_per_report!r}.")
    if samples_per_report < 1:
        raise ValueError(f"`samples_per_report` must be at least 1, but got {samples_per_report}.")
    return float(sampling_interval), samples_per_report
