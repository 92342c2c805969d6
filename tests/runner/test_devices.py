"""The slots of a machine, from what programs of GPU vendors print, in its documented form."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.runner.node._slots_and_gpus import find_devices, gpu_names_of_node

# As NVIDIA's guide for MIG shows them: two devices of one GPU, and a GPU that is not divided.
MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0)
  MIG 3g.20gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)
  MIG 1g.5gb      Device  1: (UUID: MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
"""
MIG_UUIDS = [
    "MIG-c7384736-a75d-5afc-978f-d2f1294409fd",
    "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d",
]
# The names of drivers before version 470.
OLD_MIG = """GPU 0: A100-SXM4-40GB (UUID: GPU-edfe6cbd-6ad5-8acb-3cf1-ae4bc41ec0f8)
  MIG 1g.5gb Device 0: (UUID: MIG-GPU-edfe6cbd-6ad5-8acb-3cf1-ae4bc41ec0f8/7/0)
"""
WHOLE = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
"""
AMD_LIST = [
    {
        "gpu": number,
        "bdf": f"0000:{bus}:00.0",
        "uuid": f"{bus}ff74a1-0000-1000-80e9-ddefa2d60fbe",
        "kfd_id": 24166 + number,
        "node_id": number + 1,
        "partition_id": 0,
    }
    for number, bus in enumerate(("0c", "22"))
]
AMD_STATIC = [
    {"gpu": number, "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002"}}
    for number in range(2)
]

Install = Callable[[str, dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a program; it answers by its first argument."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}")

    def make(name: str, answers: dict[str, str]) -> None:
        cases = []
        for number, (first, answer) in enumerate(answers.items()):
            (tmp_path / f"{name}.{number}").write_text(answer)
            cases.append(f"  {first}) while IFS= read -r line; do printf '%s\\n' \"$line\"; done"
                         f" < {tmp_path}/{name}.{number} ;;")  # fmt: skip
        program = tmp_path / name
        lines = ["#!/bin/sh", 'case "$1" in', *cases, "  *) exit 9 ;;", "esac", ""]
        program.write_text("\n".join(lines))
        program.chmod(0o755)

    return make


def nvidia(listed: str, numbers: str = "0\n1\n") -> dict[str, str]:
    names = "".join(f"{line[7:].partition(' (')[0]}\n" for line in listed.splitlines())
    return {"--list-gpus": listed, "--query-gpu=index": numbers, "--query-gpu=name": names}


def amd(listed: object, static: object = AMD_STATIC) -> dict[str, str]:
    return {"list": json.dumps(listed) + "\n", "static": json.dumps(static) + "\n"}


def test_each_mig_device_is_a_slot_and_a_whole_gpu_beside_it_too(install: Install) -> None:
    install("nvidia-smi", nvidia(MIG))
    assert find_devices(None) == [*MIG_UUIDS, "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"]
    assert find_devices(1) == MIG_UUIDS[:1]
    assert gpu_names_of_node() == (
        "NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-40GB MIG 1g.5gb, NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    )


def test_the_mig_devices_of_an_old_driver_are_known(install: Install) -> None:
    install("nvidia-smi", nvidia(OLD_MIG, "0\n"))
    assert find_devices(None) == ["MIG-GPU-edfe6cbd-6ad5-8acb-3cf1-ae4bc41ec0f8/7/0"]


def test_gpus_that_are_not_divided_keep_their_numbers(install: Install) -> None:
    install("nvidia-smi", nvidia(WHOLE))
    install("amd-smi", amd(AMD_LIST))
    assert find_devices(None) == ["0", "1"]
    assert gpu_names_of_node() == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("listed", [AMD_LIST, {"gpu_data": AMD_LIST}])
def test_amd_gpus_are_slots(install: Install, listed: object) -> None:
    static = {"gpu_data": AMD_STATIC} if isinstance(listed, dict) else AMD_STATIC
    install("amd-smi", amd(listed, static))
    assert find_devices(None) == ["0", "1"]
    assert gpu_names_of_node() == "AMD Instinct MI300X"
    with pytest.raises(ValueError, match="at most 2, the number of GPUs, but got 3"):
        find_devices(3)


def test_the_number_for_hip_is_taken_where_it_is_told(install: Install) -> None:
    install("amd-smi", amd([one | {"hip_id": 1 - one["gpu"]} for one in AMD_LIST]))  # type: ignore[operator]
    assert find_devices(None) == ["1", "0"]


def test_a_limit_for_rocm_limits_the_slots(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("amd-smi", amd(AMD_LIST))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert find_devices(None) == ["1"]


@pytest.mark.parametrize("answer", ["no JSON", "{}", "[]", "[1]", '[{"bdf": "x"}]'])
def test_an_answer_without_gpus_gives_a_slot_per_core(install: Install, answer: str) -> None:
    install("amd-smi", {"list": f"{answer}\n"})
    assert find_devices(None) == ["cpu"] * len(os.sched_getaffinity(0))
    assert gpu_names_of_node() == "GPU"
