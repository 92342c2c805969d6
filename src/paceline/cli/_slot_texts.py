"""Words for slots, their memory, and labels."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol


class _SlotCounts(Protocol):
    @property
    def num_slots_used(self) -> int: ...
    @property
    def num_slots_drained(self) -> int: ...
    @property
    def num_slots_draining(self) -> int: ...


def slots_text(counts: _SlotCounts, num_slots: int, *, verb: str = "") -> str:
    """Return how many of the slots that can be used are in use, and how many are drained.

    Args:
        counts: How many are in use, drained, and both.
        num_slots: How many there are, drained ones among them.
        verb: What stands behind the numbers, such as ` in use`.
    """
    used = counts.num_slots_used - counts.num_slots_draining
    text = f"{used} of {num_slots - counts.num_slots_drained}{verb}"
    if counts.num_slots_drained:
        text += f", {counts.num_slots_drained} drained"
    if counts.num_slots_draining:
        text += f" ({counts.num_slots_draining} still in use)"
    return text


def memory_text(sizes: Sequence[int]) -> str | None:
    """Return the memory of devices, such as `4 x 79.6 GiB`; None if it is unknown."""
    from paceline.cli._console_output import format_bytes

    if not any(sizes):
        return None
    # The order is that of the slots.
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return ", ".join(
        (f"{number} x " if number > 1 else "") + (format_bytes(size) if size else "unknown")
        for size, number in runs
    )


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels as `k=v, k=v`."""
    return ", ".join(f"{key}={value}" for key, value in labels.items())
