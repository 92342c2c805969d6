"""Small tensors of CUDA devices, which reach the host by one copy for each device and type."""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch

# Larger ones take about as long one by one.
_SMALL_BYTES = 2**16
# What is gathered takes as much memory besides, on the device and on the host: so many bytes, or
# this share of a large state.
_GATHERED_BYTES, _GATHERED_SHARE = 2**23, 1 / 256
# Fewer tensors of a type are not worth a kernel.
_FEWEST = 8
# Each copy begins at a cache line; copies to other addresses are slower.
ALIGNMENT_BYTES = 64

Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
"""What a tensor is like."""


class _Group(NamedTuple):
    """Tensors of one device and type.

    Attributes:
        indices: Which they are.
        bounds: Where each begins among the values of all, and where the last ends.
        values: Where they arrive on the host.
    """

    indices: list[int]
    bounds: list[int]
    values: torch.Tensor


class GatheredCopies:
    """Copy small tensors of a device to the host together.

    Each copy from a device to the host takes some microseconds, however small it is. So one kernel
    joins the tensors on the device, one copy takes them to the host, and `scatter` moves them to
    their places.

    Args:
        allocate: Returns so many bytes of page-locked memory.
        device_type: Which devices' tensors are gathered.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], device_type: str = "cuda") -> None:
        self._allocate = allocate
        self._device_type = device_type
        self._block = torch.empty(0, dtype=torch.uint8)
        self._groups: list[_Group] = []

    def plan(self, kinds: Sequence[Kind], is_own: Sequence[bool]) -> list[bool]:
        """Choose tensors by what they are like; return for each whether it is gathered.

        Args:
            kinds: All tensors.
            is_own: Whether each is copied at all.
        """
        chosen: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        sizes = [shape.numel() for shape, _, _ in kinds]
        all_bytes = [shape.numel() * dtype.itemsize for shape, dtype, _ in kinds]
        room = max(_GATHERED_BYTES, sum(all_bytes) * _GATHERED_SHARE)
        for index, (_, dtype, device) in enumerate(kinds):
            num_bytes = all_bytes[index]
            is_small = 0 < num_bytes <= min(room, _SMALL_BYTES)
            if is_small and device.type == self._device_type and is_own[index]:
                chosen[device, dtype].append(index)
                room -= num_bytes
        groups = {kind: group for kind, group in chosen.items() if len(group) >= _FEWEST}
        self._lay_out(groups, sizes)
        is_gathered = [False] * len(kinds)
        for index in (index for group in groups.values() for index in group):
            is_gathered[index] = True
        return is_gathered

    def _lay_out(
        self, groups: dict[tuple[torch.device, torch.dtype], list[int]], sizes: list[int]
    ) -> None:
        stop = 0
        places = []
        for (_, dtype), indices in groups.items():
            bounds = [0]
            for index in indices:
                bounds.append(bounds[-1] + sizes[index])
            start = stop + -stop % ALIGNMENT_BYTES
            stop = start + bounds[-1] * dtype.itemsize
            places.append((indices, bounds, start, stop, dtype))
        if stop > self._block.numel():
            self._block = self._allocate(stop)
        self._groups = [
            _Group(indices, bounds, self._block[start:stop].view(dtype))
            for indices, bounds, start, stop, dtype in places
        ]

    def copy(self, sources: Sequence[torch.Tensor]) -> None:
        """Begin to copy those that were chosen.

        Args:
            sources: All tensors, of the kinds that were planned with.
        """
        for indices, bounds, values in self._groups:
            chosen = [sources[index].resolve_neg().resolve_conj().reshape(-1) for index in indices]
            gathered = torch.empty(bounds[-1], dtype=values.dtype, device=chosen[0].device)
            pieces = torch.split(gathered, [end - begin for begin, end in pairwise(bounds)])
            torch._foreach_copy_([*pieces], chosen)
            values.copy_(gathered, non_blocking=True)

    def scatter(self, places: Sequence[int]) -> None:
        """Move the copies to their places, once they have arrived on the host.

        Args:
            places: The addresses of all tensors' places.
        """
        for indices, bounds, values in self._groups:
            size, address = values.element_size(), values.data_ptr()
            for index, (begin, end) in zip(indices, pairwise(bounds), strict=True):
                ctypes.memmove(places[index], address + begin * size, (end - begin) * size)
