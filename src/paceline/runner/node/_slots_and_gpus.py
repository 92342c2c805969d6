"""The slots of this machine."""

import os
from collections.abc import Sequence
from typing import Final

from paceline._usable_cores import num_cores
from paceline.runner.node._amd_gpus import amd_gpus
from paceline.runner.node._known_gpu import KnownGpu
from paceline.runner.node._nvidia_gpus import nvidia_gpus

CPU: Final = "cpu"


def find_slots(num_slots: int | None) -> list[KnownGpu]:
    """Return one entry per slot: a GPU, else one with the id "cpu" per core.

    A device of a GPU that is divided by MIG is a slot, too.

    Args:
        num_slots: How many there are to be; None is one per GPU or else core.

    Raises:
        ValueError: `num_slots` is less than 1, or more than the GPUs there are.
    """
    if num_slots is not None and num_slots < 1:
        raise ValueError(f"`num_slots` must be at least 1, but got {num_slots}.")
    gpus = _usable_gpus()
    if gpus:
        if num_slots is not None and num_slots > len(gpus):
            raise ValueError(
                f"`num_slots` must be at most {len(gpus)}, the number of GPUs, but got {num_slots}."
                " Hint: hide the GPUs by CUDA_VISIBLE_DEVICES= to have one slot per CPU core."
            )
        return gpus[:num_slots]
    if num_slots is None:
        num_slots = num_cores()
    return [KnownGpu(id=CPU)] * num_slots


def names_of_gpus(slots: Sequence[KnownGpu]) -> str:
    """Return what the GPUs of slots are called, each name once; "GPU" where nobody tells."""
    return ", ".join(sorted({slot.name for slot in slots if slot.name})) or "GPU"


def memory_of_gpus(slots: Sequence[KnownGpu]) -> list[int]:
    """Return the memory of each slot in bytes, 0 for one that is unknown; none if all are."""
    sizes = [slot.memory_bytes for slot in slots]
    return sizes if any(sizes) else []


def _usable_gpus() -> list[KnownGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; ROCm understands it as well."""
    visible = _listed_gpus("CUDA_VISIBLE_DEVICES")
    if visible == []:
        return []
    gpus = nvidia_gpus()
    if not gpus:
        gpus = amd_gpus()
        if visible is None:
            visible = _listed_gpus("HIP_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return [_gpu_of_entry(entry, gpus) for entry in visible]


def _listed_gpus(variable: str) -> list[str] | None:
    visible = os.environ.get(variable)
    if visible is None:
        return None
    return [entry.strip() for entry in visible.split(",") if entry.strip() not in ("", "-1")]


def _gpu_of_entry(entry: str, gpus: list[KnownGpu]) -> KnownGpu:
    """Return the GPU of an entry. Of one that may be any of them, only what all have is known."""
    if not entry.isdecimal():
        # The beginning of a UUID is enough for CUDA.
        found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    elif os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        found = [gpu for gpu in gpus if gpu.id == entry]
    else:
        # CUDA counts the fastest GPU first unless it is told to count as nvidia-smi does.
        found = []
    if len(found) == 1:
        return found[0].with_id(entry)
    names, sizes = {gpu.name for gpu in gpus}, {gpu.memory_bytes for gpu in gpus}
    return KnownGpu(
        id=entry,
        name=", ".join(sorted(names - {""})),
        memory_bytes=sizes.pop() if len(sizes) == 1 else 0,
    )
