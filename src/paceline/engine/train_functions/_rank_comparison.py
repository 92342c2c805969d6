"""Comparison of the ranks of a user's own loop, in which no rank waits for another one."""

import pickle
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.engine.gradients._gradient_sync import GradientSync
from paceline.engine.loaders._same_data import check_same_as_chief, data_digest
from paceline.engine.state._rank_differences import RankCheck, RankDigest, check_digests
from paceline.engine.tensors._optimizer_parameters import parameters_of

# Of more optimizers of the user's own, none is looked at.
_MAX_STRANGERS = 4

_START, _END = "start", "end"


class RankComparison:
    """Each rank leaves digests of its prepared models in torch's store; the chief compares them.

    It does so at the first backward pass, also of models that are prepared later, with each
    checkpoint, and at the end of a function that trains after its last checkpoint.

    Args:
        check: What is compared.
        gradients: The prepared models and optimizers.
        run: What tells this generation of a run from others.
        rank: The rank.
        world_size: The number of ranks.
        num_busy_ranks: The first ranks, which have samples of their own.
    """

    def __init__(
        self,
        check: RankCheck,
        gradients: GradientSync,
        run: str,
        *,
        rank: int,
        world_size: int,
        num_busy_ranks: int,
    ) -> None:
        self._check = check
        self._gradients = gradients
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._num_busy_ranks = num_busy_ranks
        self._is_idle = rank >= num_busy_ranks
        self._num_known = 0
        # What the chief has not compared yet, besides checkpoints.
        self._begun: list[str] = []
        self._is_on = check.is_on and world_size > 1 and dist.is_initialized()
        # Optimizers that step what is not prepared, and the hook that notices them.
        self._strangers: list[torch.optim.Optimizer] = []
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook: Any = None
        if self._is_on:
            gradients.before_sums = self._note_backward
            self._hook = register_optimizer_step_pre_hook(self._note_step)

    def leave(self, name: str) -> None:
        """Leave a digest of this rank, under a name that is the same on all ranks."""
        if self._is_on:
            self._set(name, self._digest())

    def compare(self, name: str, num_ranks: int) -> None:
        """Compare, on the chief, what the first ranks have left.

        Raises:
            RanksDifferError: They differ.
        """
        if self._is_on:
            check_digests(self._taken(name, num_ranks))

    def compare_start(self) -> None:
        """Compare, on the chief, the ranks at their first backward pass, unless that was done.

        Raises:
            RanksDifferError: They differ.
        """
        for name in list(self._begun):
            keys = [self._key(name, rank) for rank in range(self._world_size)]
            # The next call comes soon.
            if _store().check(keys):
                self._begun.remove(name)
                self.compare(name, self._world_size)

    def leave_end(self, device: torch.device) -> bool:
        """Leave what is compared at the end; tell, on the chief, whether there is anything.

        Args:
            device: Where this rank trains.
        """
        gradients = self._gradients
        is_known = bool(gradients.models or gradients.optimizers)
        if not (self._is_on and dist.is_initialized() and is_known):
            return False
        # The function of one rank may have moved or rebuilt its model, to store it.
        tensors = [p for model in gradients.models for p in model.parameters()]
        is_moved = any(tensor.device.type != device.type for tensor in tensors)
        self._set(_END, self._digest().of_present(is_absent=is_moved))
        return self._rank == 0

    def end(self) -> None:
        """Notice no more steps."""
        if self._hook is not None:
            self._hook.remove()

    def compare_end(self) -> None:
        """Compare, on the chief, the ranks as their functions have ended, which they all have.

        Raises:
            RanksDifferError: They differ in what they all have.
        """
        keys = [self._key(_END, rank) for rank in range(self._num_busy_ranks)]
        # A rank has none if its function has left the process group.
        if dist.is_initialized() and _store().check(keys):
            self.compare(_END, self._num_busy_ranks)

    def of_chief(self, name: str, value: int, data: Any) -> int:
        """Return the chief's value; the others wait until it has called this by the same name.

        Args:
            name: The name.
            value: The value.
            data: A data set or loader that must be the same on all ranks.

        Raises:
            ValueError: It is another one than the chief's.
        """
        if self._world_size == 1 or not dist.is_initialized():
            return value
        key, digest = self._key(name, 0), data_digest(data) if self._is_on else ""
        if self._rank == 0:
            _store().set(key, pickle.dumps((value, digest)))
            return value
        of_chief, digest_of_chief = pickle.loads(_store().get(key))  # noqa: S301 - our own rank's
        check_same_as_chief(name, digest, digest_of_chief, self._rank)
        return int(of_chief)

    def _digest(self) -> RankDigest:
        gradients = self._gradients
        return self._check.digest(
            gradients.models,
            gradients.optimizers,
            is_idle=self._is_idle,
            others=self._parameters_of_strangers(),
        )

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note an optimizer beside a prepared model whose gradients nobody may sum."""
        if self._gradients.models and optimizer not in self._known:
            self._known.add(optimizer)
            if any(id(p) not in self._gradients.watched for p in parameters_of(optimizer)):
                self._strangers.append(optimizer)
        if len(self._strangers) > _MAX_STRANGERS:
            # They come and go, such as those of copies that are trained for a few steps.
            self._strangers.clear()
            self.end()

    def _parameters_of_strangers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, optimizer in enumerate(self._strangers):
            for index, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in self._gradients.watched:
                    kind = type(optimizer).__name__
                    yield f"parameter {index} of {kind} {number}, not prepared", parameter

    def _set(self, name: str, digest: RankDigest) -> None:
        _store().set(self._key(name, self._rank), pickle.dumps(digest))

    def _note_backward(self) -> None:
        num_known = len(self._gradients.models) + len(self._gradients.optimizers)
        if num_known != self._num_known:
            self._num_known = num_known
            name = f"{_START} {num_known}"
            self.leave(name)
            self._begun += [name] if self._rank == 0 else []
        elif self._begun:
            self.compare_start()

    def _taken(self, name: str, num_ranks: int) -> Sequence[RankDigest]:
        store, keys = _store(), [self._key(name, rank) for rank in range(num_ranks)]
        digests = [pickle.loads(store.get(key)) for key in keys]  # noqa: S301 - our own ranks'
        for key in keys:
            store.delete_key(key)
        return digests

    def _key(self, name: str, rank: int) -> str:
        return f"paceline/{self._run}/{name}/{rank}"


def _store() -> Any:
    # The group has one of its own, whoever has made it.
    return torch.distributed.distributed_c10d._get_default_store()
