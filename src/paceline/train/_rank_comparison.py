"""Comparison of the ranks of a user's own loop, at its start and with checkpoints."""

import pickle
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline._training.engine.own_loop_gradients import GradientSync
from paceline._training.engine.rank_differences import (
    RankCheck,
    RankDigest,
    check_digests,
    check_same_as_chief,
    data_digest,
)
from paceline._training.engine.tensor_copies_and_digests import parameters_of
from paceline.train._prepared_loader_and_steps import models_wrapped_by_the_user

if TYPE_CHECKING:
    pass


# Of more optimizers of the user's own, none is looked at.
_MAX_STRANGERS = 4
_START, _END = "start", "end"


@dataclass(eq=False, repr=False)
class RankComparison:
    """Each rank leaves digests of its prepared models in torch's store; the chief compares them.

    It does so at the first backward pass, also of models that are prepared later, with each
    checkpoint, and at the end of a function that trains after its last checkpoint.

    Args:
        check: The values to compare.
        gradients: The prepared models and optimizers.
        run: The identity of this generation of a run.
        rank: The rank.
        world_size: The number of ranks.
        num_busy_ranks: The first ranks, which have samples of their own.
    """

    check: RankCheck
    gradients: GradientSync
    run: str
    _: KW_ONLY
    rank: int
    world_size: int
    num_busy_ranks: int

    def __post_init__(self) -> None:
        self._is_idle = self.rank >= self.num_busy_ranks
        self._num_known = 0
        # Comparisons still due on the chief, besides checkpoints.
        self._begun: list[str] = []
        self._is_on = self.check.is_on and self.world_size > 1 and dist.is_initialized()
        # Optimizers that step models which are not prepared, and the hook that notices them.
        self._strangers: list[torch.optim.Optimizer] = []
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook: Any = None
        if self._is_on:
            self.gradients.before_sums = self._note_backward
            self._hook = register_optimizer_step_pre_hook(self._note_step)

    def leave(self, name: str) -> None:
        """Leave a digest of this rank under a name equal on all ranks."""
        if self._is_on:
            self._set(name, self._digest())

    def compare(self, name: str, num_ranks: int) -> None:
        """Compare the digests left by the first ranks; called on the chief.

        Raises:
            RanksDifferError: They differ.
        """
        if self._is_on:
            check_digests(self._taken(name, num_ranks))

    def compare_start(self) -> None:
        """Compare, on the chief, the ranks' digests of their first backward pass, if still due.

        Raises:
            RanksDifferError: They differ.
        """
        for name in list(self._begun):
            keys = [self._key(name, rank) for rank in range(self.world_size)]
            # The next call comes soon.
            if _store().check(keys):
                self._begun.remove(name)
                self.compare(name, self.world_size)

    def leave_end(self, device: torch.device) -> bool:
        """Leave the values to compare at the end; return, on the chief, whether there are any.

        Args:
            device: Where this rank trains.
        """
        gradients = self.gradients
        is_known = bool(gradients.models or gradients.optimizers or self._strangers)
        if not (self._is_on and dist.is_initialized() and is_known):
            return False
        # The function of one rank may have moved or rebuilt its model, to store it.
        tensors = [p for model in gradients.models for p in model.parameters()]
        is_moved = any(tensor.device.type != device.type for tensor in tensors)
        self._set(_END, self._digest().of_present(is_absent=is_moved))
        # Setting a value waits for no answer: this call returns as soon as the store has the value.
        _store().check([self._key(_END, self.rank)])
        return self.rank == 0

    def end(self) -> None:
        """Notice no more steps."""
        if self._hook is not None:
            self._hook.remove()

    def compare_end(self) -> None:
        """Compare, on the chief, the ranks as their functions have ended, which they all have.

        Raises:
            RanksDifferError: They differ in values that all have.
        """
        keys = [self._key(_END, rank) for rank in range(self.num_busy_ranks)]
        # A rank has none if its function has left the process group.
        if dist.is_initialized() and _store().check(keys):
            self.compare(_END, self.num_busy_ranks)

    def of_chief(self, name: str, value: int, data: Any) -> int:
        """Return the chief's value; other ranks wait for the chief's call of the same name.

        Args:
            name: The name.
            value: The value.
            data: A data set or loader that must be the same on all ranks.

        Raises:
            ValueError: It is another one than the chief's.
        """
        if self.world_size == 1 or not dist.is_initialized():
            return value
        key, digest = self._key(name, 0), data_digest(data) if self._is_on else ""
        if self.rank == 0:
            _store().set(key, pickle.dumps((value, digest)))
            return value
        of_chief, digest_of_chief = pickle.loads(_store().get(key))  # noqa: S301 - our own rank's
        check_same_as_chief(name, digest, digest_of_chief, self.rank)
        return int(of_chief)

    def _digest(self) -> RankDigest:
        gradients = self.gradients
        return self.check.digest(
            gradients.models,
            gradients.optimizers,
            is_idle=self._is_idle,
            others=self._parameters_of_strangers(),
        )

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note an optimizer, beside a prepared model or loader, whose gradients nobody may sum."""
        gradients = self.gradients
        is_beside = gradients.models or gradients.has_been_fed
        if is_beside and optimizer not in self._known:
            self._known.add(optimizer)
            # A wrapper of the user's own sums them, or leaves a piece to each rank.
            is_summed = not gradients.models and models_wrapped_by_the_user()
            unwatched = (p for p in parameters_of(optimizer) if id(p) not in gradients.watched)
            if not is_summed and any(True for _ in unwatched):
                self._strangers.append(optimizer)
        if len(self._strangers) > _MAX_STRANGERS:
            # Optimizers come and go, such as for copies that are trained for a few steps.
            self._strangers.clear()
            self.end()

    def _parameters_of_strangers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, optimizer in enumerate(self._strangers):
            for index, parameter in enumerate(parameters_of(optimizer)):
                if id(parameter) not in self.gradients.watched:
                    kind = type(optimizer).__name__
                    yield f"parameter {index} of {kind} {number}, not prepared", parameter

    def _set(self, name: str, digest: RankDigest) -> None:
        _store().set(self._key(name, self.rank), pickle.dumps(digest))

    def _note_backward(self) -> None:
        num_known = len(self.gradients.models) + len(self.gradients.optimizers)
        if num_known != self._num_known:
            self._num_known = num_known
            name = f"{_START} {num_known}"
            self.leave(name)
            self._begun += [name] if self.rank == 0 else []
        elif self._begun:
            self.compare_start()

    def _taken(self, name: str, num_ranks: int) -> Sequence[RankDigest]:
        store, keys = _store(), [self._key(name, rank) for rank in range(num_ranks)]
        digests = [pickle.loads(store.get(key)) for key in keys]  # noqa: S301 - our own ranks'
        for key in keys:
            store.delete_key(key)
        return digests

    def _key(self, name: str, rank: int) -> str:
        return f"paceline/{self.run}/{name}/{rank}"


def _store() -> Any:
    # The group has one of its own, even if a user made it.
    return torch.distributed.distributed_c10d._get_default_store()
