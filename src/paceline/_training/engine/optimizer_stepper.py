"""Steps from a loss to changed parameters: weighting, accumulation, reduction, precision.

Also: idle ranks.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline._training.engine.fsdp_and_tensor_parallel import (
    RankGrid,
    check_shard_size,
    check_tensor_options,
    place_gradients,
)
from paceline._training.engine.gradient_reduction import (
    AllReduce,
    DataParallel,
    FlatReduction,
    OptimizerReductions,
    OverlappedAllReduce,
    TravellingSignal,
)
from paceline._training.engine.horovod_reduction import HorovodSum
from paceline._training.engine.model_preparation import FrozenBase, ModelOptions, ModelWrapper
from paceline._training.engine.own_loop_gradients import Accumulation
from paceline._training.engine.precision import Precision
from paceline._training.engine.profiling import BACKWARD, REDUCE, STEP, StepTimer
from paceline._training.engine.rank_differences import RankCheck, RankDigest
from paceline._training.engine.steps_by_user_code import WatchedUserCalls
from paceline._training.engine.tensor_copies_and_digests import (
    all_parameters,
    is_sharded,
    parameters_of,
)
from paceline._training.engine.verify_steps import StepReplay
from paceline.core._distributed_context import DistributedContext

# Codes announced by the chief besides indices of optimizers: no more steps, sum of the
# gradients of a backward pass, sum of a loss.
NO_MORE, SUM, LOSS = -1, -2, -3


@dataclass(eq=False, repr=False)
class IdleRanks:
    """Announcements of the chief to ranks without samples, and the transfer of results to them.

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

    distributed: DistributedContext
    device: torch.device
    accumulation: Accumulation
    optimizers: list[torch.optim.Optimizer]

    def __post_init__(self) -> None:
        self.are_given_results = False
        self._is_idle = False
        self._before: RankDigest | None = None

    def begin_batch(self, stepper: "Stepper", *, is_idle: bool, has_others: bool) -> None:
        """Prepare for a batch with idle ranks; all ranks call this before the batch.

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
        """Tell the idle ranks about an optimizer step.

        Args:
            optimizer: One of the optimizers.
            gives_results: Whether they get the result from the chief.
            is_summed: Whether the gradients are summed already.
        """
        if not self.accumulation.is_even:
            index = next(i for i, o in enumerate(self.optimizers) if o is optimizer)
            self._broadcast(index, gives_results=gives_results, is_summed=is_summed)

    def announce_sum(self) -> None:
        """Have them sum the gradients of a backward pass too."""
        self._announce(SUM)

    def announce_loss(self) -> None:
        """Have them sum the losses of a closure too."""
        self._announce(LOSS)

    def announce_end(self) -> None:
        """Tell the idle ranks about the end of optimizer steps."""
        self._broadcast(NO_MORE)

    def hear(self) -> tuple[int, bool]:
        """Return, on an idle rank, the next code, and whether gradients are already summed."""
        return self._broadcast(NO_MORE)

    def join_loss(self) -> None:
        """Take part, on an idle rank, in the sum of a closure's losses."""
        dist.all_reduce(torch.zeros((), device=self.device, dtype=torch.float64))

    def _announce(self, what: int) -> None:
        if not self.accumulation.is_even:
            self._broadcast(what, gives_results=True, is_summed=True)

    def _broadcast(
        self, index: int, *, gives_results: bool = False, is_summed: bool = False
    ) -> tuple[int, bool]:
        word = torch.tensor([index, int(gives_results), int(is_summed)], device=self.device)
        dist.broadcast(word, src=0)
        told, are_given, summed = word.tolist()
        if told == SUM or (told >= 0 and not summed):
            self._check_gradients(told)
        self.are_given_results = self.are_given_results or bool(are_given)
        return told, bool(summed)

    def _check_gradients(self, code: int) -> None:
        """Compare the sizes of the next sums: unequal ones would end the processes.

        Raises:
            RuntimeError: They train other parameters.
        """
        optimizers = self.optimizers if code == SUM else [self.optimizers[code]]
        trained = (p for o in optimizers for p in parameters_of(o) if p.requires_grad)
        num_values = sum(parameter.numel() for parameter in trained)
        extremes = torch.tensor([num_values, -num_values], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most, least = extremes[0].item(), -extremes[1].item()
        if most != least:
            raise RuntimeError(
                "`train_batch` must train the same parameters on all ranks, but this last batch of"
                " an epoch leaves ranks without samples, where it is not called: some rank trains"
                f" {least} values, and another {most}. Hint: change `requires_grad` and parameter"
                " groups in a callback, such as `on_training_epoch_start`, or use drop_last=True of"
                " the loader."
            )

    def give_results(self, stepper: "Stepper") -> None:
        """Send the chief's parameters and optimizer states to all ranks; collective.

        Raises:
            RanksDifferError: Ranks differ in state that the chief's would replace.
        """
        self._compare(stepper)
        is_chief = self.distributed.rank == 0
        own = [_results_of(stepper) if is_chief else None]
        dist.broadcast_object_list(own, src=0)
        if own[0] is not None and not is_chief:
            _take_results(stepper, own[0])

    def _compare(self, stepper: "Stepper") -> None:
        """Compare all ranks as they began the batch, then those with samples."""
        check, exchange = stepper.rank_check, self.distributed.allgather
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
    """Return all state changed by the optimizer steps of a batch, on the CPU."""
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


ClipGrads = Callable[[Iterable[torch.nn.Parameter]], Any]
_DEFAULT_OPTIONS = ModelOptions()


class Stepper:
    """The models and optimizers of a training, and how they step.

    Args:
        distributed: Where the ranks meet.
        device: The device of this rank.
        precision: The number format of the forward pass.
        data_parallel: How gradients are summed over the ranks.
        shard_size: With FSDP, the number of ranks that hold one copy of a model; None for all. With
            a tensor-parallel plan, the number of groups.
        tensor_size: The ranks that divide a model by a tensor-parallel plan.
        rank_check: How ranks are compared; by default completely.

    Raises:
        TypeError: `tensor_size` is no integer.
        ValueError: `shard_size` is below 2 or given without FSDP; `tensor_size` does not divide the
            number of ranks or does not go with `data_parallel`; or the precision is fp16 with one.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        device: torch.device,
        precision: Precision = Precision.FP32,
        data_parallel: DataParallel = DataParallel.FLAT,
        shard_size: int | None = None,
        tensor_size: int = 1,
        rank_check: RankCheck | None = None,
    ) -> None:
        check_shard_size(shard_size, data_parallel)
        # Grid of the ranks: groups sharing a model, and groups sharing the samples.
        self.grid = RankGrid(distributed, device, tensor_size, shard_size)
        check_tensor_options(self.grid.tensor_size, data_parallel)
        self.device = device
        self.rank_check = rank_check or RankCheck()
        self.data_parallel = data_parallel
        is_by_horovod = data_parallel is DataParallel.HOROVOD and distributed.size > 1
        self.all_reduce: AllReduce | None = HorovodSum() if is_by_horovod else self.grid.all_reduce
        # Whether FSDP divides models among the ranks.
        self.is_sharded = data_parallel is DataParallel.FSDP and self.grid.data_size > 1
        # Whether that or a tensor-parallel plan does, so that ranks must call models together.
        self.is_divided = self.is_sharded or self.grid.tensor_size > 1
        self._wrapper = ModelWrapper(device, self.grid, is_sharded=self.is_sharded)
        self.models: list[torch.nn.Module] = []
        # Frozen bases: per model the part left out of checkpoints, or None.
        self.bases: list[FrozenBase | None] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.use_precision(precision)
        self.accumulation = Accumulation()
        self.signal = TravellingSignal(device)
        self.is_stop_requested = False
        # Set by the loop for batches whose loss counts in full and after which optimizers step, on
        # one rank, in fp32 and untimed: `backward` and `step` then do no more than torch's.
        self.is_plain = False
        # Set while a step is computed twice.
        self.replay: StepReplay | None = None
        # Timer for the optimizer steps of the present batch; None if untimed.
        self.timer: StepTimer | None = None
        self._distributed = distributed
        self._is_alone = distributed.size == 1
        self.num_steps_of: dict[int, int] = {}
        self._reductions = OptimizerReductions(
            device,
            self.all_reduce,
            self.models,
            # Single tensor-parallel group: nothing to sum, but the ranks' signals still travel.
            sums_gradients=self.grid.data_size > 1,
            sums_sharded=not self.is_sharded,
        )
        self.idle_ranks = IdleRanks(distributed, device, self.accumulation, self.optimizers)
        self._has_told = False
        self._has_stepped = False
        self._has_scaled = False
        # Parameters whose gradients stay after a step, as sums over the ranks.
        self._left: dict[torch.nn.Parameter, None] = {}
        self.calls = WatchedUserCalls(self, distributed.size)

    def use_precision(self, precision: Precision) -> None:
        """Set the number format of the forward pass; for use before training.

        Raises:
            ValueError: It is fp16, and models are divided.
        """
        if self.is_divided and precision is Precision.FP16:
            option = 'data_parallel="fsdp"' if self.is_sharded else "tensor_parallel_size"
            raise ValueError(
                f'`precision` must be "fp32" or "bf16" with `{option}`, but got "fp16".'
            )
        self.precision = precision
        self.computes_in_fp32 = precision is Precision.FP32
        self.scaler: Any = precision.make_scaler(self.device)
        self.is_scaling_automatic = self.scaler is not None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss."""
        return self.precision.autocast(self.device)

    def outside_autocast(self) -> AbstractContextManager[Any]:
        """Return a context for backward pass and step, to use inside of `autocast`."""
        return self.precision.outside_autocast(self.device)

    def add_model(
        self, model: torch.nn.Module, options: ModelOptions = _DEFAULT_OPTIONS
    ) -> torch.nn.Module:
        """Move a model to the device and make its weights the same on all ranks.

        Args:
            model: The model.
            options: How it is trained and stored.

        Returns:
            The model to call: the same one, or with OVERLAPPED a wrapper.

        Raises:
            TypeError: An option is nothing of its kind.
            ValueError: An option does not fit the model or the others; or the model is divided
                over other ranks.
        """
        base = self._wrapper.wrap(model, options, has_autocast=not self.computes_in_fp32)
        self.bases.append(base)
        self.models.append(self._overlapped(model))
        return self.models[-1]

    def _overlapped(self, model: torch.nn.Module) -> torch.nn.Module:
        is_overlapped = self.data_parallel is DataParallel.OVERLAPPED and not self._is_alone
        if is_overlapped and any(parameter.requires_grad for parameter in model.parameters()):
            return OverlappedAllReduce(model, self.device, _weight_in_backward(self))
        return model

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the gradients of an optimizer's parameters summed over the ranks.

        Raises:
            ValueError: It was made before its model was divided.
        """
        self._check_made_after(optimizer)
        self.optimizers.append(optimizer)
        self.calls.watch_optimizer(optimizer)

    def _check_made_after(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_sharded and self.grid.tensor_size > 1:
            self.grid.check_optimizer(optimizer, self.models)
        if self.is_sharded and not any(map(is_sharded, parameters_of(optimizer))):
            raise ValueError(
                'With `data_parallel="fsdp"` an optimizer must be made of the parameters of a model'
                f" that was wrapped before, but those of {type(optimizer).__name__} are not"
                " sharded. Hint: model = context.wrap_model(model), then"
                " Optimizer(model.parameters())."
            )

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all models, then others of optimizers; without repeats."""
        return all_parameters(self.models, self.optimizers)

    def _optimized(self) -> Iterable[torch.nn.Parameter]:
        return (p for optimizer in self.optimizers for p in parameters_of(optimizer))

    def _is_summed(self) -> bool:
        """Tell whether the backward pass of the present shard leaves the gradients of the step."""
        is_alone = self.grid.data_size == 1
        is_summed = is_alone or self.is_sharded or self.is_overlapping()
        return is_summed and self.accumulation.is_boundary

    def begin_shard(self) -> None:
        """Tell the models whether the backward pass of this shard sums gradients over ranks."""
        if self.data_parallel is DataParallel.OVERLAPPED:
            is_summed = self.is_overlapping()
            for model in self.models:
                if isinstance(model, OverlappedAllReduce):
                    model.sum_in_backward(is_summed)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of a shard's mean loss, weighted by its samples."""
        if self.replay is not None:
            self.replay.note_backward(loss)
        if not self._is_alone:
            self._leave_sums_to_chief()
        # Weight by samples: shards and ranks may have unequal numbers of them.
        weight = self.accumulation.weight
        if weight != 1.0:
            loss = loss * weight
        if self.is_scaling_automatic:
            loss = self.scaler.scale(loss)
        calls = self.calls
        calls.note_backward()
        calls.is_context_calling = True
        try:
            if self.computes_in_fp32 and self.timer is None:
                loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]
            else:
                with self.measured(BACKWARD), self.outside_autocast():
                    loss.backward(gradient, retain_graph, create_graph)  # type: ignore[no-untyped-call]
            if self.is_divided and not self.is_sharded:
                place_gradients(self.parameters())
        finally:
            calls.is_context_calling = False
        calls.changes.note(self._optimized, is_complete=self._is_summed())

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        scaler: Any = None,
    ) -> bool:
        """Step an optimizer if its gradients are complete; return whether they were.

        Gradients are complete with the last shard of the last batch of an aggregation window.

        Args:
            optimizer: One of the optimizers.
            clip_grads: Called with the optimizer's parameters before the step.
            scaler: A gradient scaler that scaled the loss by hand.
        """
        if self.replay is not None and self.replay.reach(optimizer):
            return False
        is_summed = self.calls.note_step()
        if self.calls.changes.find(optimizer):
            self.calls.warn_of_changes()
        if not self.accumulation.is_boundary:
            return False
        self.count_step(optimizer)
        scaler = self.scaler if self.is_scaling_automatic else scaler
        try:
            self._take_step(optimizer, clip_grads, scaler, is_summed=is_summed)
        finally:
            self.calls.is_context_calling = False
        return True

    def count_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer step taken by the context."""
        self._has_stepped = self.calls.is_context_calling = True
        counts, key = self.num_steps_of, id(optimizer)
        counts[key] = counts.get(key, 0) + 1

    def keep_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer's gradients stay after its step, to be added to."""
        if not self._is_alone:
            self._left.update(dict.fromkeys(parameters_of(optimizer)))

    def _leave_sums_to_chief(self) -> None:
        """Drop gradients that are sums already on all ranks but the chief.

        What the ranks add to them is summed, and they with it: they must count once.
        """
        for left in (self._left, *(m.left for m in self.models if type(m) is OverlappedAllReduce)):
            if left and self.grid.data_rank != 0:
                for parameter in left:
                    if not is_sharded(parameter):
                        parameter.grad = None
            left.clear()

    def step_without_data(self) -> None:
        """Take part in the steps of the other ranks, on a rank without samples."""
        while True:
            index, is_summed = self.idle_ranks.hear()
            if index == NO_MORE:
                return
            if index == SUM:
                self.calls.join_sum()
            elif index == LOSS:
                self.idle_ranks.join_loss()
            else:
                self._step_without_data(self.optimizers[index], is_summed=is_summed)

    def _step_without_data(self, optimizer: torch.optim.Optimizer, *, is_summed: bool) -> None:
        self.count_step(optimizer)
        if is_summed:
            # The chief's gradients come later, with its parameters.
            self.calls.is_context_calling = False
            return
        self._reduce(optimizer)
        if self.idle_ranks.are_given_results:
            # Step omitted: clipping and manual scaling happen only on ranks with samples,
            # so the chief sends the results.
            pass
        elif self.is_scaling_automatic:
            # A scaler refuses to step before it has scaled something.
            self.scaler.scale(torch.zeros((), device=self.device))
            self._has_scaled = True
            self.scaler.step(optimizer)
        else:
            optimizer.step()
        self.calls.is_context_calling = False
        optimizer.zero_grad()

    def finish_batch(self) -> bool:
        """Forget the batch's steps; return whether there were any.

        Raises:
            RanksDifferError: Ranks differ that get the results of the chief.
        """
        if not self._is_alone and self.calls.is_context_used:
            self._leave_sums_to_chief()
        has_stepped, self._has_stepped = self._has_stepped, False
        if has_stepped:
            self.accumulation.num_steps += 1
        if self.is_plain:
            return has_stepped
        if has_stepped:
            self.calls.settle()
        idle_ranks = self.idle_ranks
        if self._has_scaled and (self._distributed.rank == 0 or not idle_ranks.are_given_results):
            self.scaler.update()
        if idle_ranks.are_given_results:
            idle_ranks.are_given_results = False
            idle_ranks.give_results(self)
        self._has_told = self._has_scaled = False
        return has_stepped

    def sum_over_ranks(self, reduction: FlatReduction) -> None:
        """Sum gradients; the first sum in a batch carries the ranks' signals."""
        has_told, self._has_told = self._has_told, True
        if reduction.is_empty and self.data_parallel is not DataParallel.HOROVOD:
            if not has_told:
                self.signal.travel_alone(self.device)
        elif has_told:
            reduction.reduce()
        else:
            total = reduction.reduce(self.signal.take())
            self.signal.receive(self.grid.summed_within(total))

    def _take_step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None,
        scaler: Any,
        *,
        is_summed: bool,
    ) -> None:
        with self.outside_autocast():
            if not self._is_alone:
                with self.measured(REDUCE):
                    by_hand = scaler is not None and not self.is_scaling_automatic
                    self.idle_ranks.announce_step(
                        optimizer,
                        gives_results=by_hand or clip_grads is not None,
                        is_summed=is_summed,
                    )
                    if not is_summed:
                        self._reduce(optimizer)
            self._has_scaled = self._has_scaled or self.is_scaling_automatic
            with self.measured(STEP):
                if clip_grads is not None:
                    if scaler is not None:
                        scaler.unscale_(optimizer)
                    clip_grads(parameters_of(optimizer))
                if scaler is not None:
                    scaler.step(optimizer)
                else:
                    optimizer.step()

    def measured(self, part: str) -> AbstractContextManager[Any]:
        """Return a context for timing a part of the present batch; a null context if untimed."""
        return nullcontext() if self.timer is None else self.timer.measure(part)

    def _reduce(self, optimizer: torch.optim.Optimizer) -> None:
        complete, outside = self._reductions.of(optimizer)
        self.sum_over_ranks(outside if self.is_overlapping() else complete)

    def is_overlapping(self) -> bool:
        """Tell whether overlapped models sum their gradients in the present backward pass."""
        accumulation = self.accumulation
        return (
            self.data_parallel is DataParallel.OVERLAPPED
            and accumulation.is_boundary
            and accumulation.is_even
        )


def _weight_in_backward(stepper: Stepper) -> Callable[[], float]:
    """Return a function for the gradients' weight; 1.0 if the loss is already weighted."""
    stepper_of = weakref.ref(stepper)

    def weight() -> float:
        stepper = stepper_of()
        if stepper is None or stepper.calls.is_context_calling or not stepper.calls.is_in_batch:
            return 1.0
        return stepper.accumulation.weight

    return weight
