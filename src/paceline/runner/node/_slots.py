"""The slots of this machine."""

from collections.abc import Sequence
from typing import Final

from paceline._usable_cores import num_cores
from paceline.gpus import KnownGpu, visible_gpus

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
    gpus = visible_gpus()
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
