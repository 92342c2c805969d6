"""System metrics: what is sampled, where it is reported, and that it never ends training."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline import core
from paceline.core._profiler_context import SystemSampler
from paceline.journal import MetricsReported

HOST = {
    "cpu_percent", "memory_percent", "memory_used_bytes", "process_memory_bytes", "disk_percent",
    "disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_operations_per_s",
    "network_received_bytes_per_s", "network_sent_bytes_per_s",
}  # fmt: skip


class FakeNvml(ModuleType):
    """Two GPUs as NVML tells of them; the power of the second is not supported."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.num_shutdowns = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-%d-a" % handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=40 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=1 << 30, total=4 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise RuntimeError("Not Supported")
        return 71_500


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[SystemSampler]:
    sampler = SystemSampler(tmp_path)
    sampler.open()
    yield sampler
    sampler.close()


def sampling_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "paceline-system-metrics"]


def wait_for_rows(context: core.Context, records_of: Callable[..., Any], count: int) -> Any:
    rows: list[MetricsReported] = []
    while len(rows) < count:
        threading.Event().wait(0.02)
        records = records_of(context.run_dir, MetricsReported)
        rows = [record for record in records if record.group == "system"]
    return rows


def test_rows_belong_to_reported_steps_and_end_with_the_context(
    records_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with core.init() as context:
        context.profiler.on(sampling_interval=0.1, samples_per_report=2)
        first = wait_for_rows(context, records_of, 1)[0]
        assert first.steps_completed == 0
        assert first.metrics.keys() == HOST
        assert 0 <= first.metrics["memory_percent"] <= 100
        context.train.report_training_metrics(7, {"loss": 1.0})
        assert wait_for_rows(context, records_of, 2)[1].steps_completed == 7
        # What is sampled while no step is done waits for the next one, or the end.
        context.train.report_training_metrics(9, {"loss": 1.0})
    rows = wait_for_rows(context, records_of, 3)
    assert [row.steps_completed for row in rows] == [0, 7, 9]
    assert sampling_threads() == []

    with core.init(resume=context.run_dir) as context:
        context.profiler.on(0.1, 1)
        context.profiler.on(0.1, 2)
        assert len(sampling_threads()) == 1
        context.profiler.note_steps(3)
        context.profiler.off()
        assert sampling_threads() == []
        context.profiler.off()
    assert [row.steps_completed for row in wait_for_rows(context, records_of, 4)] == [0, 7, 9, 3]


def test_a_resumed_attempt_leaves_rows_of_earlier_ones_alone(
    records_of: Callable[..., Any],
) -> None:
    for _ in range(2):
        with core.init(name="again", resume="auto") as context:
            with context.checkpoint.store_path({"steps_completed": 4}):
                pass
            context.train.report_training_metrics(4, {"loss": 1.0})
            context.profiler.on(0.1, 1)
            context.preempt.settle()
    assert [row.steps_completed for row in wait_for_rows(context, records_of, 1)] == [4]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0.05,), ValueError, "at least 0.1 seconds, but got 0.05"),
        ((float("nan"),), ValueError, "at least 0.1 seconds"),
        (("1",), TypeError, "`sampling_interval` must be a number"),
        ((1, 0), ValueError, "`samples_per_report` must be at least 1"),
        ((1, 2.0), TypeError, "`samples_per_report` must be an integer"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with core.init() as context, pytest.raises(error, match=match):
        context.profiler.on(*arguments)


def test_gpus_are_sampled_and_a_failing_source_is_named_once(
    nvml: FakeNvml, sampler: SystemSampler, caplog: pytest.LogCaptureFixture
) -> None:
    sample = sampler.take()
    assert (sample["gpu_0_percent"], sample["gpu_1_percent"]) == (40, 41)
    assert (sample["gpu_1_memory_used_bytes"], sample["gpu_1_memory_percent"]) == (1 << 30, 25)
    assert sample["gpu_0_power_w"] == 71.5
    assert "gpu_1_power_w" not in sample
    assert "power of GPU 1 metrics of this node end here: Not Supported" in caplog.text
    caplog.clear()
    # The second sample has rates as well.
    assert sampler.take().keys() - sample.keys() == {name for name in HOST if "per_s" in name}
    assert caplog.text == ""
    sampler.close()
    assert nvml.num_shutdowns == 1


@pytest.mark.parametrize(
    ("visible", "num_processes", "expected"),
    [
        (None, 1, [0, 1]),
        ("1", 1, [1]),
        ("GPU-1", 1, [1]),
        ("", 1, []),
        # Each of two processes was given its own GPU.
        ("1", 2, [0, 1]),
        ("MIG-7", 1, [0, 1]),
    ],
)
def test_gpus_are_those_of_the_node_s_processes(
    nvml: FakeNvml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    num_processes: int,
    expected: list[int],
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sampler = SystemSampler(tmp_path, num_processes)
    sampler.open()
    assert [i for i in (0, 1) if f"gpu_{i}_percent" in sampler.take()] == expected
    sampler.close()


def test_a_driver_that_fails_at_once_leaves_the_other_metrics(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    sampler = SystemSampler(tmp_path)
    sampler.open()
    assert not any(name.startswith("gpu") for name in sampler.take())


def test_a_sampler_that_hangs_does_not_keep_the_process(
    records_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hanging, released = threading.Event(), threading.Event()

    def hang(sampler: SystemSampler) -> dict[str, float]:
        hanging.set()
        released.wait()
        return {"cpu_percent": 1.0}

    monkeypatch.setattr(SystemSampler, "take", hang)
    monkeypatch.setattr("paceline.core._profiler_context._JOIN_S", 0.1)
    with core.init() as context:
        context.profiler.on(0.1, 1)
        hanging.wait()
    assert "hang; training goes on without them" in caplog.text
    released.set()
    for thread in sampling_threads():
        thread.join()
    # Nothing is written after the journal was closed.
    assert records_of(context.run_dir, MetricsReported) == []
