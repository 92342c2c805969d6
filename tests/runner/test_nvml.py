"""The slots of a machine and its metrics by NVML: the real binding loads a small library in C."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._base import gpus as _nvidia_gpus
from paceline._cluster.runner.node_facts import find_slots, gpu_memory, gpu_names

SOURCE = Path(__file__).parent / "fake_nvml" / "nvml.c"
H100 = "NVIDIA H100 80GB HBM3"
H100_BYTES = 85520809984
NUM_CORES = len(os.sched_getaffinity(0))
# What the text path would say, if it were asked.
OTHER_GPU = """#!/bin/sh
case "$1" in
  --list-gpus) echo "GPU 0: NVIDIA A40 (UUID: GPU-9999)" ;;
  *) echo "0, GPU-9999, NVIDIA A40, 46068" ;;
esac
"""

Machine = Callable[[str], None]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the library."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT RUN: needs a C compiler")
    directory = tmp_path_factory.mktemp("nvml")
    target = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, SOURCE], check=True)
    return directory


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that says what is on the machine; nvidia-smi tells of another GPU."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text(OTHER_GPU)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setattr(_nvidia_gpus, "_DRIVER_FILES", (str(library),))
    return lambda kind: monkeypatch.setenv("FAKE_NVML", kind)


def ids() -> list[str]:
    return [slot.id for slot in find_slots(None)]


def test_whole_gpus_are_slots_by_their_numbers(machine: Machine) -> None:
    machine("whole")
    slots = find_slots(None)
    assert [slot.id for slot in slots] == ["0", "1"]
    assert gpu_names(slots) == H100
    # One that shares the memory of the machine tells of none.
    assert gpu_memory(slots) == [H100_BYTES, 0]


def test_nobody_asks_without_a_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("whole")
    monkeypatch.setattr(_nvidia_gpus, "_DRIVER_FILES", ("/nonexistent",))
    assert gpu_names(find_slots(None)) == "NVIDIA A40"


def test_each_mig_device_is_a_slot_with_its_own_memory(machine: Machine) -> None:
    machine("mig")
    slots = find_slots(None)
    assert [slot.id for slot in slots] == ["MIG-dddd3333", "MIG-eeee4444", "GPU-bbbb1111"]
    assert gpu_memory(slots) == [42144366592, 10468982784, H100_BYTES]
    assert gpu_names(slots) == f"{H100}, {H100} MIG 1g.10gb, {H100} MIG 3g.40gb"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("MIG-ee", [("MIG-ee", f"{H100} MIG 1g.10gb", 10468982784)]),
        ("GPU-bbbb1111", [("GPU-bbbb1111", H100, H100_BYTES)]),
        # A number may stand for a device or for the GPU.
        ("0", [("0", f"{H100}, {H100} MIG 1g.10gb, {H100} MIG 3g.40gb", 0)]),
    ],
)
def test_a_limit_for_cuda_limits_the_slots(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    expected: list[tuple[str, str, int]],
) -> None:
    machine("mig")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [(one.id, one.name, one.memory_bytes) for one in find_slots(None)] == expected


@pytest.mark.parametrize(
    ("kind", "expected", "warning"),
    [
        # CUDA may count anew without that GPU.
        ("lost", ["GPU-bbbb1111", "GPU-cccc2222"], "GPU 0 cannot be used: GPU is lost."),
        ("empty", ["GPU-bbbb1111"], "GPU 0 has MIG turned on, but no MIG devices."),
        ("noise", ["0", "1"], ""),
    ],
)
def test_a_gpu_that_cannot_be_used_is_no_slot(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    expected: list[str],
    warning: str,
) -> None:
    machine(kind)
    assert ids() == expected
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("kind", "warnings"),
    [
        ("refuse", ["NVML does not tell of the GPUs: .*version mismatch"]),
        ("hang", ["NVML does not tell of the GPUs: no answer for 4 s."]),
        ("none", []),
    ],
)
def test_nvidia_smi_is_asked_where_nvml_does_not_tell(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    warnings: list[str],
) -> None:
    monkeypatch.setattr("paceline._base.gpus._LIMIT_S", 4.0 if kind == "hang" else 60.0)
    machine(kind)
    [slot] = find_slots(None)
    assert (slot.id, slot.name, slot.memory_bytes) == ("0", "NVIDIA A40", 46068 * 2**20)
    assert len(caplog.records) == len(warnings)
    for record, warning in zip(caplog.records, warnings, strict=True):
        assert re.search(warning, record.message)


def test_without_a_library_nvidia_smi_is_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert ids() == ["0"]
    assert caplog.records == []


def test_a_module_in_the_working_directory_is_not_taken_for_another(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("whole")
    (tmp_path / "json.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert ids() == ["0", "1"]


def test_a_machine_without_gpus_has_a_slot_per_core(machine: Machine, tmp_path: Path) -> None:
    machine("none")
    (tmp_path / "nvidia-smi").unlink()
    assert ids() == ["cpu"] * NUM_CORES


def test_system_metrics_are_those_of_the_same_library(machine: Machine) -> None:
    """In a process of its own, as the loader reads its path at the start of one."""
    code = """
import json
from pathlib import Path
from paceline.core._profiler_context import SystemSampler
sampler = SystemSampler(Path("/"))
sampler.open()
print(json.dumps({k: v for k, v in sampler.take().items() if k.startswith("gpu")}))
sampler.close()
"""
    machine("lost")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    sample = json.loads(output)
    assert {name[:6] for name in sample} == {"gpu_1_", "gpu_2_"}
    assert (sample["gpu_2_percent"], sample["gpu_2_power_w"]) == (40, 71.5)
    assert sample["gpu_2_memory_percent"] == 25
