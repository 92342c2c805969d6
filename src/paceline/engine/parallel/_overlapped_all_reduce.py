"""Gradients that are summed over the ranks while the backward pass still runs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class OverlappedAllReduce(DistributedDataParallel):
    """A model whose gradients are summed, not averaged, in buckets during the backward pass.

    The sum is the mean over all samples if losses are weighted, or else by `weight`. Buffers stay
    each rank's own. Attributes of the wrapped model are those of this one.

    Args:
        model: The model, on its device.
        device: The device.
        weight: Returns what this rank's gradients count in the present step; None if its losses
            are weighted already.

    Attributes:
        summed: The parameters whose gradients it sums; not those that were frozen when it was made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        weight: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,
            # Else the buckets are laid out anew after the first step: the additions of a resumed
            # run would have another order than those of a straight one.
            find_unused_parameters=True,
        )
        self.summed = tuple(p for p in model.parameters() if p.requires_grad)
        self.register_comm_hook(weight, _sum_bucket)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that the user made."""
    return model.module if isinstance(model, OverlappedAllReduce) else model


# torch asks for these very annotations.
def _sum_bucket(
    weight: Callable[[], float] | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # missing in torch's stubs
) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    count = 1.0 if weight is None else weight()
    if count != 1.0:
        gradients *= count
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
