"""Averages of weights and other untrained models, on ranks without samples of a batch."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.tensors import TensorDigests, parameters_of


class FollowingModels:
    """Models without an optimizer, watched over a batch without samples for some ranks.

    All ranks make this before the batch and call `share` after it.

    Args:
        models: All models; those that are trained are left alone.
        optimizers: The optimizers.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        trained = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        self._tensors: dict[str, torch.Tensor] = {}
        for index, model in enumerate(map(plain_model, models)):
            if trained.isdisjoint(map(id, model.parameters())):
                named = chain(model.named_parameters(), model.named_buffers())
                self._tensors |= {f"{index}.{name}": tensor for name, tensor in named}
        self._before = self._digests()

    def share(self, *, is_idle: bool) -> None:
        """Give the chief's tensors that the batch has changed to ranks without samples.

        Args:
            is_idle: Whether this rank is one of them.
        """
        if not self._tensors:
            return
        after, before = self._digests(), self._before
        changed = [name for name, digest in after.items() if digest != before[name]]
        told: list[Any] = [{name: self._tensors[name].detach().cpu() for name in changed}]
        dist.broadcast_object_list(told, src=0)
        if is_idle:
            with torch.no_grad():
                for name, value in told[0].items():
                    self._tensors[name].copy_(value)

    def _digests(self) -> dict[str, str]:
        digests = TensorDigests()
        # Digests of the chief alone show the changes.
        if self._tensors and dist.get_rank() == 0:
            for name, tensor in self._tensors.items():
                digests.add(name, tensor)
        return digests.finish()
