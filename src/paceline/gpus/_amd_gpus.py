"""The GPUs of AMD, by what amd-smi tells."""

import json
import re
from typing import Any

from paceline.gpus._gpu_programs import run_gpu_program
from paceline.gpus._known_gpu import KnownGpu

_MEBIBYTES = {"MB": 1, "MiB": 1, "GB": 1024, "GiB": 1024}


def amd_gpus() -> list[KnownGpu]:
    """Return the GPUs of AMD in the order of amd-smi."""
    listed = [one for one in _query_amd("list") if "gpu" in one]
    if not listed:
        return []
    # One question each: a release that does not know one of the options answers the other.
    names = {one.get("gpu"): _name(one.get("asic")) for one in _query_amd("static", "--asic")}
    sizes = {one.get("gpu"): _size(one.get("vram")) for one in _query_amd("static", "--vram")}
    return [
        KnownGpu(
            # The number for HIP, where it is told, may be another one than that of amd-smi.
            id=str(one.get("hip_id", one["gpu"])),
            uuid=str(one.get("uuid", "")),
            name=names.get(one["gpu"], ""),
            memory_bytes=sizes.get(one["gpu"], 0),
        )
        for one in listed
    ]


def _name(asic: Any) -> str:
    return str(asic.get("market_name") or "") if isinstance(asic, dict) else ""


def _size(vram: Any) -> int:
    """Return bytes: amd-smi tells `{"value": 196592, "unit": "MB"}`, or a text in old releases.

    Its MB are of 1,048,576 bytes.
    """
    size = vram.get("size") if isinstance(vram, dict) else vram
    text = f"{size.get('value')} {size.get('unit')}" if isinstance(size, dict) else str(size)
    match = re.fullmatch(r"(\d+) (\w+)", text)
    return int(match[1]) * _MEBIBYTES.get(match[2], 0) << 20 if match else 0


def _query_amd(*arguments: str) -> list[dict[str, Any]]:
    """Return what `amd-smi` tells of each GPU; an empty list where it tells of none."""
    try:
        told = json.loads(run_gpu_program("amd-smi", *arguments, "--json") or "[]")
    except ValueError:
        return []
    # From ROCm 7 on, some of its commands put the list into an object.
    listed = told.get("gpu_data", []) if isinstance(told, dict) else told
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
