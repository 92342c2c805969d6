"""The slots of this machine."""

import json
import os
import re
import shutil
import subprocess
from typing import Any

from paceline._usable_cores import num_cores

_GPU_LINE = re.compile(r"GPU \d+: (?P<name>.+) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")


def find_devices(num_slots: int | None) -> list[str]:
    """Return one entry per slot: a GPU's id, else "cpu" per core; `num_slots` sets their number.

    A device of a GPU that is divided by MIG is a slot, too.

    Raises:
        ValueError: `num_slots` is less than 1, or more than the GPUs there are.
    """
    if num_slots is not None and num_slots < 1:
        raise ValueError(f"`num_slots` must be at least 1, but got {num_slots}.")
    gpus = _gpu_ids()
    if gpus:
        if num_slots is not None and num_slots > len(gpus):
            raise ValueError(
                f"`num_slots` must be at most {len(gpus)}, the number of GPUs, but got {num_slots}."
                " Hint: hide the GPUs by CUDA_VISIBLE_DEVICES= to have one slot per CPU core."
            )
        return gpus[:num_slots]
    if num_slots is None:
        num_slots = num_cores()
    return ["cpu"] * num_slots


def gpu_names_of_node() -> str:
    """Return what the GPUs are called, each name once; "GPU" where no program tells."""
    names = [f"{gpu} {profile}".strip() for gpu, profile, _ in _mig_devices()] or _query_nvidia(
        "name"
    )
    if not names:
        found = [one.get("asic") for one in _query_amd("static", "--asic")]
        names = [str(asic["market_name"]) for asic in found if asic and asic.get("market_name")]
    return ", ".join(sorted(set(names))) or "GPU"


def _gpu_ids() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES may have; ROCm understands it as well."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return _listed_gpus(visible)
    # MIG devices have no numbers, and numbers and UUIDs cannot be mixed.
    if mig_devices := _mig_devices():
        return [uuid for _, _, uuid in mig_devices]
    if numbers := _query_nvidia("index"):
        return numbers
    if (visible := os.environ.get("HIP_VISIBLE_DEVICES")) is not None:
        return _listed_gpus(visible)
    # The number for HIP, where it is told, may be another one than that of amd-smi.
    return [str(one.get("hip_id", one["gpu"])) for one in _query_amd("list") if "gpu" in one]


def _listed_gpus(visible: str) -> list[str]:
    return [entry.strip() for entry in visible.split(",") if entry.strip() not in ("", "-1")]


def _mig_devices() -> list[tuple[str, str, str]]:
    """Return the GPU, the profile and the UUID of each device, if any GPU is divided by MIG.

    GPUs that are not divided come with an empty profile.
    """
    found: list[tuple[str, str, str]] = []
    gpu, whole = "GPU", None
    for line in [*_run_gpu_program("nvidia-smi", "--list-gpus").splitlines(), "GPU"]:
        if line.startswith("GPU") and whole is not None:
            found.append(whole)
            whole = None
        if match := _GPU_LINE.match(line):
            gpu = match["name"]
            whole = (gpu, "", match["uuid"])
        elif match := _MIG_LINE.match(line):
            whole = None
            found.append((gpu, f"MIG {match['profile']}", match["uuid"]))
    return found if any(profile for _, profile, _ in found) else []


def _query_nvidia(field: str) -> list[str]:
    """Return a field of `nvidia-smi` for each GPU; an empty list where it tells of none."""
    listed = _run_gpu_program("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return [line.strip() for line in listed.splitlines() if line.strip()]


def _query_amd(*arguments: str) -> list[dict[str, Any]]:
    """Return what `amd-smi` tells of each GPU; an empty list where it tells of none."""
    try:
        told = json.loads(_run_gpu_program("amd-smi", *arguments, "--json") or "[]")
    except ValueError:
        return []
    # From ROCm 7 on, some of its commands put the list into an object.
    listed = told.get("gpu_data", []) if isinstance(told, dict) else told
    return [one for one in listed if isinstance(one, dict)]


def _run_gpu_program(name: str, *arguments: str) -> str:
    """Return the output of a program; nothing if it is not there or fails."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
