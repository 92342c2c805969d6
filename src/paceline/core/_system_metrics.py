"""Samples of what this node does: processors, memory, disk, network and GPUs."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.gpus import Nvml, NvmlDevice, names_in_variable

logger = logging.getLogger(__name__)

Sample = dict[str, float]


class SystemSampler:
    """Take samples of this node; a source that fails is named once and left out from then on.

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
        """Find the sources. Without GPUs or `pynvml`, there are none for GPUs."""
        import psutil

        process = psutil.Process()
        psutil.cpu_percent()
        self._sources = {
            "CPU": lambda: {"cpu_percent": psutil.cpu_percent()},
            "memory": lambda: _memory_metrics(psutil.virtual_memory(), process.memory_info().rss),
            "disk": lambda: self._disk_sample(psutil.disk_io_counters()),
            "network": lambda: self._network_sample(psutil.net_io_counters()),
        }
        self._open_gpus()

    def take(self) -> Sample:
        """Return one sample: names to values, with the unit in each name."""
        sample: Sample = {}
        for name, source in list(self._sources.items()):
            try:
                sample.update(source())
            except Exception as error:
                # Drivers and containers fail in ways of their own; training must go on.
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
        if before is None or now <= before[0] or count < before[1]:
            return {}
        return {name: (count - before[1]) / (now - before[0])}

    def _open_gpus(self) -> None:
        try:
            self._nvml = Nvml()
        except ImportError:
            return
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


# Each on its own, as a GPU in a virtual machine may tell its memory but not its power.
_GPU_SOURCES: dict[str, Callable[[NvmlDevice], Sample]] = {
    "use": _gpu_use,
    "memory": _gpu_memory,
    "power": _gpu_power,
}


def _gpu_source(gpu: NvmlDevice, read: Callable[[NvmlDevice], Sample]) -> Callable[[], Sample]:
    return lambda: {f"gpu_{gpu.number}_{name}": value for name, value in read(gpu).items()}


def _visible_gpus(gpus: list[NvmlDevice], num_processes: int) -> list[NvmlDevice]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this node's processes.

    All of them if the variable names fewer than there are processes: then each process has been
    given its own, and this one does not see those of the others.
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
