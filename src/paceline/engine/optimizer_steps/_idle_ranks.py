"""Ranks without samples of a global batch: the chief tells them what the others do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core import DistributedContext
from paceline.engine.gradients._loss_weights import Accumulation
from paceline.engine.state._rank_differences import RankDigest
from paceline.engine.tensors._optimizer_parameters import parameters_of

if TYPE_CHECKING:
    from paceline.engine.optimizer_steps._stepper import Stepper

# What the chief announces besides steps of optimizers: that none is left, that the gradients of a
# backward pass are summed, or a loss.
NO_MORE, SUM, LOSS = -1, -2, -3


class IdleRanks:
    """Announcements of the chief to the ranks without samples, and the results that they get.

    The last ranks have no samples in the last batch of an epoch if that has too few shards.

    Args:
        distributed: Where the ranks meet.
        device: The device of this rank.
        accumulation: Knows whether there are such ranks in the present batch.
        optimizers: The optimizers, which are announced by their index.

    Attributes:
        are_given_results: Whether they get the parameters of the present batch from the chief, as
            they cannot compute them.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        device: torch.device,
        accumulation: Accumulation,
        optimizers: list[torch.optim.Optimizer],
    ) -> None:
        self.are_given_results = False
        self._distributed = distributed
        self._device = device
        self._accumulation = accumulation
        self._optimizers = optimizers
        self._is_idle = False
        self._before: RankDigest | None = None

    def begin_batch(self, stepper: "Stepper", *, is_idle: bool, has_others: bool) -> None:
        """Note that a batch leaves ranks without samples; all ranks call it before that.

        Args:
            stepper: The models and optimizers.
            is_idle: Whether this rank is one of them.
            has_others: Whether all ranks have samples in other batches.
        """
        self._is_idle = is_idle
        # The user's code may change weights before a step, and does so on the other ranks only.
        compares = has_others and stepper.rank_check.is_on
        self._before = self._digest(stepper) if compares else None

    def announce_step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        gives_results: bool = True,
        is_summed: bool = True,
    ) -> None:
        """Tell them that an optimizer steps.

        Args:
            optimizer: One of the optimizers.
            gives_results: Whether they get the result from the chief.
            is_summed: Whether the gradients are summed already.
        """
        if not self._accumulation.is_even:
            index = next(i for i, o in enumerate(self._optimizers) if o is optimizer)
            self._broadcast(index, gives_results=gives_results, is_summed=is_summed)

    def announce_sum(self) -> None:
        """Have them sum the gradients of a backward pass too."""
        self._announce(SUM)

    def announce_loss(self) -> None:
        """Have them sum the losses of a closure too."""
        self._announce(LOSS)

    def announce_end(self) -> None:
        """Tell them that no further optimizer steps."""
        self._broadcast(NO_MORE)

    def hear(self) -> tuple[int, bool]:
        """Return, on one of them, what comes next, and whether gradients are summed already."""
        return self._broadcast(NO_MORE)

    def join_loss(self) -> None:
        """Sum the losses of a closure, on one of them, with those of the others."""
        dist.all_reduce(torch.zeros((), device=self._device, dtype=torch.float64))

    def _announce(self, what: int) -> None:
        if not self._accumulation.is_even:
            self._broadcast(what, gives_results=True, is_summed=True)

    def _broadcast(
        self, index: int, *, gives_results: bool = False, is_summed: bool = False
    ) -> tuple[int, bool]:
        word = torch.tensor([index, int(gives_results), int(is_summed)], device=self._device)
        dist.broadcast(word, src=0)
        told, are_given, summed = word.tolist()
        self.are_given_results = self.are_given_results or bool(are_given)
        return told, bool(summed)

    def give_results(self, stepper: "Stepper") -> None:
        """Give the chief's parameters and optimizers to all ranks, which all call it.

        Raises:
            RanksDifferError: Ranks differ in what the chief's would replace.
        """
        self._compare(stepper)
        is_chief = self._distributed.rank == 0
        own = [_results_of(stepper) if is_chief else None]
        dist.broadcast_object_list(own, src=0)
        if own[0] is not None and not is_chief:
            _take_results(stepper, own[0])

    def _compare(self, stepper: "Stepper") -> None:
        """Compare all ranks as they began the batch, then those with samples."""
        check, exchange = stepper.rank_check, self._distributed.allgather
        if self._before is not None:
            check.compare(self._before, exchange)
        if check.is_on:
            after = self._digest(stepper)
            check.compare(after.of_present(is_absent=self._is_idle), exchange)

    def _digest(self, stepper: "Stepper") -> RankDigest:
        return stepper.rank_check.digest(
            stepper.models, stepper.optimizers, is_idle=self._is_idle, is_trained_only=True
        )


def _results_of(stepper: "Stepper") -> tuple[Any, ...]:
    """Return what the optimizer steps of a batch have changed, on the CPU."""
    optimizers, scaler = stepper.optimizers, stepper.scaler
    return (
        [[p.detach().cpu() for p in parameters_of(o)] for o in optimizers],
        [optimizer.state_dict() for optimizer in optimizers],
        None if scaler is None else scaler.state_dict(),
        stepper.calls.shared_gradients(),
    )


def _take_results(stepper: "Stepper", results: Sequence[Any]) -> None:
    parameters, states, scaler_state, gradients = results
    for optimizer, values, state in zip(stepper.optimizers, parameters, states, strict=True):
        with torch.no_grad():
            for parameter, value in zip(parameters_of(optimizer), values, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(state)
    if scaler_state is not None:
        stepper.scaler.load_state_dict(scaler_state)
    stepper.calls.take_gradients(gradients)
