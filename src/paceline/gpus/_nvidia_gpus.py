"""The GPUs of NVIDIA: by NVML where it can be loaded, else by the text of nvidia-smi."""

import json
import logging
import os
import re
import subprocess
import sys
from importlib.util import find_spec

from paceline.gpus._gpu_programs import ask_gpu_program, run_gpu_program
from paceline.gpus._known_gpu import KnownGpu
from paceline.gpus._nvml import NO_DRIVER

logger = logging.getLogger(__name__)

_GPU_LINE = re.compile(r"GPU (?P<number>\d+): (?P<name>.+) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
# Linux has one of them while a driver is loaded, or the Linux inside of Windows its own.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
_FIELDS = ("index", "uuid", "name", "memory.total")
# With the modules of this process, wherever it was started.
_NVML_PROGRAM = """
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from paceline.gpus._nvml import main
main()
"""


def nvidia_gpus() -> list[KnownGpu]:
    """Return the GPUs of NVIDIA in their order; each device of one that MIG divides is one.

    The id is the number for nvidia-smi. If any GPU is divided it is the UUID, as MIG devices have
    no numbers, and numbers and UUIDs cannot be mixed.
    """
    gpus = _gpus_by_nvml()
    if gpus is None:
        gpus = _gpus_by_nvidia_smi()
    if any(gpu.is_mig for gpu in gpus):
        return [gpu.with_id(gpu.uuid) for gpu in gpus]
    return gpus


def _gpus_by_nvml() -> list[KnownGpu] | None:
    """Return what NVML tells; None if it cannot be asked.

    Another process asks, as a driver may hang in a call that nothing ends. It takes 0.1 s, which a
    machine without a driver is spared.
    """
    if find_spec("pynvml") is None or not any(map(os.path.exists, _DRIVER_FILES)):
        return None
    command = [sys.executable, "-c", _NVML_PROGRAM, os.pathsep.join(sys.path)]
    try:
        told = json.loads(ask_gpu_program(command, "NVML").splitlines()[-1])
    except subprocess.CalledProcessError as error:
        if error.returncode != NO_DRIVER:
            lines = [line for line in str(error.stderr).splitlines() if line.strip()]
            why = lines[-1] if lines else f"exit code {error.returncode}"
            logger.warning("NVML does not tell of the GPUs: %s", why)
        return None
    except subprocess.TimeoutExpired:
        return None
    except (OSError, ValueError, IndexError) as error:
        logger.warning("NVML does not tell of the GPUs: %s", error)
        return None
    problems = told["problems"]
    for problem in problems:
        logger.warning("%s", problem)
    return [
        KnownGpu(
            # CUDA may not count a GPU that cannot be used, which changes the numbers.
            id=one["uuid"] if problems else str(one["number"]),
            uuid=one["uuid"],
            name=one["name"],
            memory_bytes=one["memory_bytes"],
            is_mig=one["is_mig"],
            number=str(one["number"]),
        )
        for one in told["gpus"]
    ]


def _gpus_by_nvidia_smi() -> list[KnownGpu]:
    listed = run_gpu_program("nvidia-smi", "--list-gpus")
    if not listed:
        return []
    rows = _rows_of_nvidia_smi()
    divided = _gpus_of_listing(listed, {gpu.uuid: gpu for gpu in rows})
    return divided if not rows or any(gpu.is_mig for gpu in divided) else rows


def _rows_of_nvidia_smi() -> list[KnownGpu]:
    table = run_gpu_program(
        "nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"
    )
    gpus = []
    for line in table.splitlines():
        row = dict(zip(_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        if row.get("index"):
            mebibytes = row.get("memory.total", "")
            gpus.append(
                KnownGpu(
                    id=row["index"],
                    number=row["index"],
                    uuid=row.get("uuid", ""),
                    name=row.get("name", ""),
                    # GPUs that share the memory of the machine tell of none.
                    memory_bytes=int(mebibytes) << 20 if mebibytes.isdecimal() else 0,
                )
            )
    return gpus


def _gpus_of_listing(listed: str, rows: dict[str, KnownGpu]) -> list[KnownGpu]:
    """Return each MIG device of a listing, and each GPU that has none.

    The listing tells the memory of neither; that of whole GPUs is in the rows, by their UUIDs.
    """
    found: list[KnownGpu] = []
    whole: KnownGpu | None = None
    for line in listed.splitlines():
        if match := _GPU_LINE.match(line):
            plain = KnownGpu(
                id=match["number"],
                number=match["number"],
                uuid=match["uuid"],
                name=match["name"],
            )
            whole = rows.get(match["uuid"], plain)
            found.append(whole)
        elif (match := _MIG_LINE.match(line)) and whole is not None:
            if found[-1] is whole:
                found.pop()
            found.append(
                KnownGpu(
                    id=whole.id,
                    number=whole.number,
                    uuid=match["uuid"],
                    name=f"{whole.name} MIG {match['profile']}",
                    is_mig=True,
                )
            )
    return found
