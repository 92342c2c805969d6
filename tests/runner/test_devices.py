"""The slots of a machine, from what programs of GPU vendors print, in its documented form."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._base import gpus as _visible_gpus
from paceline._base.gpus import machine_gpus, num_visible_gpus
from paceline._base.run_directory import RunInfo, TrialInfo
from paceline._cluster.runner.node_facts import find_slots, gpu_memory, gpu_names
from paceline.core._cluster_info import cluster_info_of

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
    {
        "gpu": number,
        "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002"},
        "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
    }
    for number in range(2)
]
MI300X_BYTES = 196592 * 2**20

Install = Callable[[str, dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a program; it answers by its first argument."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setattr("paceline._base.gpus._DRIVER_FILES", ())

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


def nvidia(listed: str, *sizes: str) -> dict[str, str]:
    rows = re.findall(r"GPU (\d+): (.+) \(UUID: (GPU-.+)\)", listed)
    table = "".join(
        f"{number}, {uuid}, {name}, {size}\n"
        for (number, name, uuid), size in zip(rows, sizes or ["81559"] * len(rows), strict=True)
    )
    return {"--list-gpus": listed, "--query-gpu=index,uuid,name,memory.total": table}


def ids(num_slots: int | None = None) -> list[str]:
    return [slot.id for slot in find_slots(num_slots)]


def names() -> str:
    return gpu_names(find_slots(None))


def sizes() -> list[int]:
    return gpu_memory(find_slots(None))


def amd(listed: object, static: object = AMD_STATIC) -> dict[str, str]:
    return {"list": json.dumps(listed) + "\n", "static": json.dumps(static) + "\n"}


def test_each_mig_device_is_a_slot_and_a_whole_gpu_beside_it_too(install: Install) -> None:
    install("nvidia-smi", nvidia(MIG))
    assert ids() == [*MIG_UUIDS, "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"]
    assert ids(1) == MIG_UUIDS[:1]
    assert names() == (
        "NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-40GB MIG 1g.5gb, NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    )


def test_the_mig_devices_of_an_old_driver_are_known(install: Install) -> None:
    install("nvidia-smi", nvidia(OLD_MIG))
    assert ids() == ["MIG-GPU-edfe6cbd-6ad5-8acb-3cf1-ae4bc41ec0f8/7/0"]


def test_gpus_that_are_not_divided_keep_their_numbers(install: Install) -> None:
    install("nvidia-smi", nvidia(WHOLE))
    install("amd-smi", amd(AMD_LIST))
    assert ids() == ["0", "1"]
    assert names() == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("listed", [AMD_LIST, {"gpu_data": AMD_LIST}])
def test_amd_gpus_are_slots(install: Install, listed: object) -> None:
    static = {"gpu_data": AMD_STATIC} if isinstance(listed, dict) else AMD_STATIC
    install("amd-smi", amd(listed, static))
    assert ids() == ["0", "1"]
    assert names() == "AMD Instinct MI300X"
    with pytest.raises(ValueError, match="at most 2, the number of GPUs, but got 3"):
        ids(3)


def test_the_number_for_hip_is_taken_where_it_is_told(install: Install) -> None:
    install("amd-smi", amd([one | {"hip_id": 1 - one["gpu"]} for one in AMD_LIST]))  # type: ignore[operator]
    assert ids() == ["1", "0"]


def test_a_limit_for_rocm_limits_the_slots(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("amd-smi", amd(AMD_LIST))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert ids() == ["1"]


@pytest.mark.parametrize("answer", ["no JSON", "{}", "[]", "[1]", '[{"bdf": "x"}]'])
def test_an_answer_without_gpus_gives_a_slot_per_core(install: Install, answer: str) -> None:
    install("amd-smi", {"list": f"{answer}\n"})
    assert ids() == ["cpu"] * len(os.sched_getaffinity(0))
    assert names() == "GPU"


def test_the_memory_of_whole_gpus_is_known_and_of_mig_devices_not(install: Install) -> None:
    install("nvidia-smi", nvidia(MIG, "40960", "40536"))
    assert sizes() == [0, 0, 40536 * 2**20]
    install("nvidia-smi", nvidia(WHOLE, "81559", "[N/A]"))
    assert sizes() == [81559 * 2**20, 0]
    install("nvidia-smi", nvidia(WHOLE, "[N/A]", "[Not Supported]"))
    assert sizes() == []


@pytest.mark.parametrize(
    ("visible", "order", "expected"),
    [
        ("1", "PCI_BUS_ID", [("1", "NVIDIA T4", 16)]),
        # Which one has this number for CUDA is not known.
        ("1", "FASTEST_FIRST", [("1", "NVIDIA H100, NVIDIA T4", 0)]),
        ("GPU-bb, GPU-aa", "", [("GPU-bb", "NVIDIA T4", 16), ("GPU-aa", "NVIDIA H100", 80)]),
        ("GPU-", "", [("GPU-", "NVIDIA H100, NVIDIA T4", 0)]),
        ("-1", "", []),
    ],
)
def test_a_gpu_that_is_listed_is_known_if_it_can_be_told_apart(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    order: str,
    expected: list[tuple[str, str, int]],
) -> None:
    listed = "GPU 0: NVIDIA H100 (UUID: GPU-aaaa)\nGPU 1: NVIDIA T4 (UUID: GPU-bbbb)\n"
    install("nvidia-smi", nvidia(listed, "80", "16"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    slots = [slot for slot in find_slots(None) if slot.id != "cpu"]
    assert [(slot.id, slot.name, slot.memory_bytes >> 20) for slot in slots] == expected


def test_listed_gpus_that_are_alike_are_known_by_any_number(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("nvidia-smi", nvidia(WHOLE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (ids(), names(), sizes()) == (["1"], "NVIDIA H100 80GB HBM3", [81559 * 2**20])


@pytest.mark.parametrize(
    ("vram", "expected"),
    [
        ({"size": {"value": 196592, "unit": "MB"}}, MI300X_BYTES),
        ({"size": {"value": 192, "unit": "GB"}}, 192 * 2**30),
        ({"size": "196592 MB"}, MI300X_BYTES),
        ("196592 MB", MI300X_BYTES),
        ("N/A", 0),
        ({"size": {"value": "N/A", "unit": "MB"}}, 0),
        ({"size": {"value": 1, "unit": "barrels"}}, 0),
        (None, 0),
    ],
)
def test_the_memory_of_amd_gpus_is_that_which_amd_smi_tells(
    install: Install, vram: object, expected: int
) -> None:
    install("amd-smi", amd(AMD_LIST, [{"gpu": 0}, {"gpu": 1, "vram": vram}]))
    assert sizes() == ([0, expected] if expected else [])


def test_a_program_that_hangs_is_ended(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline._base.gpus._LIMIT_S", 0.3)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile :; do :; done\n")
    program.chmod(0o755)
    assert ids() == ["cpu"] * len(os.sched_getaffinity(0))


def test_a_driver_that_fails_is_told(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    assert {slot.id for slot in find_slots(2)} == {"cpu"}
    assert (
        "nvidia-smi does not tell of the GPUs: it ended with 18: Driver/library version mismatch"
        in caplog.text
    )


def test_gpus_of_a_listing_are_slots_if_nothing_more_is_told(install: Install) -> None:
    install("nvidia-smi", {"--list-gpus": "GPU 0: NVIDIA A40 (UUID: GPU-9999)\n"})
    [slot] = find_slots(None)
    assert (slot.id, slot.name, slot.memory_bytes) == ("0", "NVIDIA A40", 0)


@pytest.mark.parametrize(
    ("visible", "number", "uuids"),
    [
        (None, 2, ["GPU-aaaa", "GPU-bbbb"]),
        ("1", 1, ["GPU-bbbb"]),
        ("GPU-b,0", 2, ["GPU-bbbb", "GPU-aaaa"]),
        ("1,-1,0", 1, ["GPU-bbbb"]),
        ("0,1,7", 2, ["GPU-aaaa", "GPU-bbbb"]),
        ("-1", 0, []),
    ],
)
def test_all_who_ask_for_gpus_are_told_the_same(
    visible: str | None,
    number: int,
    uuids: list[str],
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("nvidia-smi", nvidia(WHOLE))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(_visible_gpus, "_found", [])
    assert num_visible_gpus() == number
    trial = TrialInfo(trial_id=1, experiment_id=1, trial_seed=1, hparams={}, config={})
    run = RunInfo(
        run_id="1",
        name="one",
        created=1.0,
        attempt=1,
        trial=trial,
        checkpoint_storage="",
        slot_ids=[0, 1],
    )
    info = cluster_info_of(run)
    assert info is not None
    assert info.gpu_uuids == uuids


def test_gpus_are_counted_as_cuda_and_hip_show_them(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(_visible_gpus, "_found", [])
    assert num_visible_gpus() == 0
    install("amd-smi", amd(AMD_LIST))
    # That there were none is not kept.
    assert num_visible_gpus() == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert num_visible_gpus() == 1
    install("nvidia-smi", nvidia(MIG))
    monkeypatch.setattr(_visible_gpus, "_found", [])
    # CUDA shows a process one device of MIG.
    assert num_visible_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(MIG_UUIDS))
    assert num_visible_gpus() == 2


def test_numbers_name_gpus_where_others_are_divided(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("nvidia-smi", nvidia(MIG))
    names = {gpu.uuid for gpu in machine_gpus() if gpu.is_called("1")}
    assert names == {"GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"}
    assert [gpu for gpu in machine_gpus() if gpu.is_called("0")] == []
