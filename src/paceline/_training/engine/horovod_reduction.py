"""Sums of gradients by Horovod."""

from typing import Any

import torch

from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import DistributedPeerError
from paceline.core._launcher_place import launched_place


def import_horovod() -> Any:
    """Return the module of Horovod for torch.

    Raises:
        ImportError: It is not installed, or was built without torch.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ImportError(
            '`data_parallel="horovod"` needs Horovod, built for this torch, but it cannot be'
            f" imported ({error}). Hint: docs/backends.md shows how to build it."
        ) from error
    return hvd


def join_horovod(distributed: DistributedContext | None) -> DistributedContext:
    """Initialize Horovod and return this process's place, equal to Horovod's.

    Args:
        distributed: The place, if it is known.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: Horovod knows another place.
    """
    hvd = import_horovod()
    hvd.init()
    place = distributed or launched_place()
    if place is not None:
        _check_place(hvd, place.rank, place.size)
    return distributed or DistributedContext.from_horovod(hvd)


def join_horovod_as(rank: int, size: int) -> None:
    """Initialize Horovod in a process with a known place.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: Horovod knows another place.
    """
    hvd = import_horovod()
    hvd.init()
    _check_place(hvd, rank, size)


def _check_place(hvd: Any, rank: int, size: int) -> None:
    if (rank, size) != (hvd.rank(), hvd.size()):
        raise ValueError(
            f"Horovod must know this process as rank {rank} of {size}, but knows it as rank"
            f" {hvd.rank()} of {hvd.size()}. Hint: start it by `python -m paceline.launch.horovod`"
            " or `horovodrun`."
        )


class HorovodSum:
    """Replace a tensor by its sum over all ranks.

    Raises:
        ImportError: Horovod is not installed, or was built without torch.
        RuntimeError: It is not initialized.
    """

    def __init__(self) -> None:
        self._hvd = import_horovod()
        if not self._hvd.is_initialized():
            raise RuntimeError(
                "Horovod must be initialized before gradients are summed, but is not. Hint:"
                " hvd.init()."
            )

    def __call__(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place; all ranks call in the same order.

        Raises:
            DistributedPeerError: Another rank has gone.
        """
        from horovod.common.exceptions import HorovodInternalError

        # The ranks agree on a name once, and remember it.
        name = f"paceline.{tensor.numel()}.{tensor.dtype}"
        try:
            self._hvd.allreduce_(tensor, name=name, op=self._hvd.Sum)
        except HorovodInternalError as error:
            # Whoever watches the ranks looks for the one that failed first.
            raise DistributedPeerError(
                f"All ranks must take part in a sum by Horovod, but one has gone ({error})."
            ) from error
