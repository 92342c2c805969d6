"""System metrics of a node during training: processors, memory, disk, network and GPUs."""

import logging
import operator
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline._base.gpus import Nvml, NvmlDevice, names_in_variable
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import encode_metrics
from paceline.core._arguments import rank_group
from paceline.core._attempt_journal import record_metrics
from paceline.core._distributed_context import DistributedContext
from paceline.core._tensorboard_files import TensorboardFiles

logger = logging.getLogger(__name__)

Sample = dict[str, float]


class SystemSampler:
    """Sampler of this node's metrics; a failing source is logged once and then left out.

    Rates are means since the last sample, so the first one has none. For use in one thread.

    Args:
        disk: A path on the file system whose use is sampled.
        num_processes: The number of training processes on this node, see `_visible_gpus`.
    """

    def __init__(self, disk: Path, num_processes: int = 1) -> None:
        self._disk = disk
        self._num_processes = num_processes
        self._counters: dict[str, tuple[float, float]] = {}
        self._sources: dict[str, Callable[[], Sample]] = {}
        self._nvml: Nvml | None = None

    def open(self) -> None:
        """Find the sources. Without GPUs of NVIDIA, there are none for GPUs."""
        import psutil

        process = psutil.Process()
        # First call only sets the start: psutil measures from call to call.
        psutil.cpu_percent()
        self._sources = {
            "CPU": lambda: {"cpu_percent": psutil.cpu_percent()},
            "memory": lambda: _memory_metrics(psutil.virtual_memory(), process.memory_info().rss),
            "disk": lambda: self._disk_sample(psutil.disk_io_counters()),
            "network": lambda: self._network_sample(psutil.net_io_counters()),
        }
        self._open_gpus()

    def take(self) -> Sample:
        """Return a sample: metric names, each with its unit, to values."""
        sample: Sample = {}
        for name, source in list(self._sources.items()):
            try:
                sample.update(source())
            except Exception as error:
                # Drivers and containers fail in ways of their own; training must continue.
                logger.warning("The %s metrics of this node end here: %s", name, error)
                del self._sources[name]
        return sample

    def close(self) -> None:
        """Give up the GPUs."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            try:
                nvml.close()
            except Exception as error:
                logger.debug("NVML did not shut down: %s", error)

    def _disk_sample(self, counters: Any) -> Sample:
        import psutil

        sample = {"disk_percent": psutil.disk_usage(str(self._disk)).percent}
        if counters is not None:  # a container may show none
            for name, value in (
                ("disk_read_bytes_per_s", counters.read_bytes),
                ("disk_write_bytes_per_s", counters.write_bytes),
                ("disk_operations_per_s", counters.read_count + counters.write_count),
            ):
                sample.update(self._rate(name, value))
        return sample

    def _network_sample(self, counters: Any) -> Sample:
        if counters is None:
            return {}
        return {
            **self._rate("network_received_bytes_per_s", counters.bytes_recv),
            **self._rate("network_sent_bytes_per_s", counters.bytes_sent),
        }

    def _rate(self, name: str, count: float) -> Sample:
        now = time.monotonic()
        before = self._counters.get(name)
        self._counters[name] = (now, count)
        # A counter that falls was reset, for example by a driver that was loaded again.
        if before is None or now <= before[0] or count < before[1]:
            return {}
        return {name: (count - before[1]) / (now - before[0])}

    def _open_gpus(self) -> None:
        try:
            self._nvml = Nvml()
        except Exception as error:
            logger.info("There are no GPU metrics of this node: %s", error)
            return
        for gpu in _visible_gpus(self._nvml.gpus, self._num_processes):
            for what, read in _GPU_SOURCES.items():
                self._sources[f"{what} of GPU {gpu.number}"] = _gpu_source(gpu, read)


def _memory_metrics(memory: Any, own_bytes: int) -> Sample:
    return {
        "memory_percent": memory.percent,
        "memory_used_bytes": memory.total - memory.available,
        "process_memory_bytes": own_bytes,
    }


def _gpu_use(gpu: NvmlDevice) -> Sample:
    return {"percent": gpu.use_percent()}


def _gpu_memory(gpu: NvmlDevice) -> Sample:
    used, total = gpu.memory_bytes()
    return {"memory_used_bytes": used, "memory_percent": 100 * used / total}


def _gpu_power(gpu: NvmlDevice) -> Sample:
    return {"power_w": gpu.power_w()}


# Each on its own, as a GPU in a virtual machine may report its memory but not its power.
_GPU_SOURCES: dict[str, Callable[[NvmlDevice], Sample]] = {
    "use": _gpu_use,
    "memory": _gpu_memory,
    "power": _gpu_power,
}


def _gpu_source(gpu: NvmlDevice, read: Callable[[NvmlDevice], Sample]) -> Callable[[], Sample]:
    return lambda: {f"gpu_{gpu.number}_{name}": value for name, value in read(gpu).items()}


def _visible_gpus(gpus: list[NvmlDevice], num_processes: int) -> list[NvmlDevice]:
    """Return the GPUs left to this node's processes by CUDA_VISIBLE_DEVICES.

    All of them if the variable names fewer than there are processes: then each process has been
    given its own, and this one does not see the GPUs of the others.
    """
    names = names_in_variable()
    if names is None:
        return gpus
    found = [
        gpu
        for gpu in gpus
        if any(name == str(gpu.number) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
               for name in names)
    ]  # fmt: skip
    is_own_only = 0 < len(names) < num_processes
    return gpus if is_own_only or (names and not found) else found


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
        """Begin to sample, or continue with other settings.

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
        """Stop sampling and report the last samples; do nothing if off."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.finish()

    def note_steps(self, steps_completed: int) -> None:
        """Note the number of completed batches, on a rank without metric reports of its own.

        Args:
            steps_completed: The number of batches that training has completed.
        """
        self._noted_steps = operator.index(steps_completed)

    def _report(self, means: dict[str, float]) -> bool:
        """Write a row and return True; return False if the newest step already has a row."""
        step = max(self._noted_steps, self._reported_steps())
        if step <= self._last_step:
            return False
        self._last_step = step
        group = rank_group(SYSTEM_GROUP, self._distributed.rank)
        encoded = encode_metrics(means)
        record_metrics(self._journal, group, step, encoded)
        self._tensorboard.write(group, step, encoded)
        return True


class _SamplingThread(threading.Thread):
    """Sampling thread; keeps only a sum and a count for each metric, so memory stays bounded."""

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
                self._take_sample()
                if self._num_samples >= self._samples_per_report:
                    self._write()
            self._take_sample()
            self._write()
            self._sampler.close()
        except Exception:
            # Metrics are an extra: a driver's error must not end training.
            logger.exception("The system metrics of this node end here.")

    def finish(self) -> None:
        """Take a last sample and end."""
        self._stopping.set()
        self.join(_JOIN_S)
        # The thread may hang in the driver, and must not report later.
        with self._lock:
            self._is_given_up = True
        if self.is_alive():
            logger.warning("The system metrics of this node hang; training goes on without them.")

    def _take_sample(self) -> None:
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
    # Negated comparison: NaN is refused as well.
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
