"""The GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""

import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import Final

from paceline.gpus._amd_gpus import amd_gpus
from paceline.gpus._known_gpu import KnownGpu
from paceline.gpus._nvidia_gpus import nvidia_gpus

CUDA_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

# Those of the machine, once some were found: a driver that was slow once may answer later.
_found: list[KnownGpu] = []


def gpus_of_machine() -> list[KnownGpu]:
    """Return all GPUs of this machine; each device of one that MIG divides is one."""
    return nvidia_gpus() or amd_gpus()


def visible_gpus() -> list[KnownGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; ROCm understands it as well."""
    visible = names_in_variable()
    if visible == []:
        return []
    gpus = nvidia_gpus()
    if not gpus:
        gpus = amd_gpus()
        if visible is None:
            visible = names_in_variable("HIP_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return [_gpu_of_name(name, gpus) for name in visible]


def num_visible_gpus() -> int:
    """Return the number of GPUs that this process may use; torch counts them if it is loaded.

    CUDA gives a process one MIG device at most, unless the variable names several.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count())
    visible = names_in_variable()
    if visible == []:
        return 0
    number = _num_usable_gpus()
    return number if visible is None else min(len(visible), number)


def names_in_variable(variable: str = CUDA_VARIABLE) -> list[str] | None:
    """Return the GPUs that a variable names, by number or UUID; None if it is not set.

    Those behind an entry that names none, such as -1, are hidden.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    names = (name.strip() for name in value.split(","))
    return [*takewhile(lambda name: name and not name.startswith("-"), names)]


def _num_usable_gpus() -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES may name at most, or CUDA finds without it."""
    if not _found:
        # What no program tells of, as in some containers, the driver's files do.
        _found.extend(gpus_of_machine() or _gpus_by_device_files())
    if names_in_variable() is not None:
        return len(_found)
    if any(gpu.is_mig for gpu in _found):
        return 1
    hip = names_in_variable("HIP_VISIBLE_DEVICES")
    # Numbers are NVIDIA's.
    is_amd = not any(gpu.number for gpu in _found)
    return len(_found) if hip is None or not is_amd else min(len(hip), len(_found))


def _gpus_by_device_files() -> list[KnownGpu]:
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*"))
    return [KnownGpu(id=one, number=one) for one in sorted(numbers) if one.isdecimal()]


def _gpu_of_name(name: str, gpus: list[KnownGpu]) -> KnownGpu:
    """Return the GPU of a name. Of one that may be any of them, only what all have is known."""
    # CUDA counts the fastest GPU first unless it is told to count as nvidia-smi does.
    is_certain = not name.isdecimal() or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found = [gpu for gpu in gpus if is_certain and gpu.is_called(name)]
    if len(found) == 1:
        return found[0].with_id(name)
    names, sizes = {gpu.name for gpu in gpus}, {gpu.memory_bytes for gpu in gpus}
    return KnownGpu(
        id=name,
        name=", ".join(sorted(names - {""})),
        memory_bytes=sizes.pop() if len(sizes) == 1 else 0,
    )
