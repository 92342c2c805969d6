"""Sums of gradients over the ranks, accumulated windows, and the signal sent along."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline._training.engine.checkpoints.tensor_reader import StoredTensor
from paceline._training.engine.tensor_copies_and_digests import (
    is_sharded,
    like_piece,
    local_part,
    parameters_of,
)
from paceline.data._order_and_random_generators import EpochOrder


class DataParallel(str, Enum):
    """Method of summing gradients over the ranks.

    FLAT sums them in one buffer after the backward pass, in an order that never changes.
    OVERLAPPED sums them in buckets during the backward pass, which suits GPUs. FSDP divides the
    parameters among the ranks as well. HOROVOD does what FLAT does by Horovod's allreduce.
    """

    FLAT = "flat"
    OVERLAPPED = "overlapped"
    FSDP = "fsdp"
    HOROVOD = "horovod"

    @classmethod
    def of(cls, value: "str | DataParallel") -> "DataParallel":
        """Return the member of a name.

        Raises:
            ValueError: There is none of this name.
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                "`data_parallel` must be 'flat', 'overlapped', 'fsdp' or 'horovod', but got"
                f" {value!r}."
            ) from None


def default_data_parallel(
    device_type: str, backend: str | None, num_ranks: int, tensor_size: int = 1
) -> DataParallel:
    """Return how gradients are summed if the user does not say.

    They are summed during the backward pass where that saves time: among several ranks with a GPU
    each, which NCCL joins. gloo takes the processor that the backward pass computes on.

    Args:
        device_type: The type of the ranks' devices, such as "cuda".
        backend: The back end of the process group; None without one.
        num_ranks: The number of ranks.
        tensor_size: The ranks of a tensor-parallel group, whose models are not overlapped.
    """
    is_on_gpus = device_type == "cuda" and backend == "nccl"
    if is_on_gpus and num_ranks > 1 and tensor_size == 1:
        return DataParallel.OVERLAPPED
    return DataParallel.FLAT


# Behind the gradients: the travelling signal and the divisor, then one flag per parameter.
_NUM_EXTRAS = 2

AllReduce: TypeAlias = Callable[[torch.Tensor], object]
"""Replaces a tensor by its sum over all ranks."""


class FlatReduction:
    """Sum the gradients of some parameters over all ranks.

    All gradients of a device and dtype travel in one buffer in parameter order, so the order of
    additions does not depend on when gradients became ready. A parameter without a gradient
    counts as zero on this rank, and stays without one if no rank has any. Of a parameter that a
    tensor-parallel plan divides, this rank's piece travels.

    Args:
        parameters: The parameters, in an order that is the same on all ranks.
        device: Where the signal travels if there are no parameters.
        all_reduce: What sums a buffer; the default process group by default.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        device: torch.device,
        all_reduce: AllReduce | None = None,
    ) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                key = (parameter.device, parameter.dtype)
                groups.setdefault(key, []).append(parameter)
        # Then there are no gradients to sum.
        self.is_empty = not groups
        if not groups:
            groups[(device, torch.float32)] = []
        all_reduce = all_reduce or dist.all_reduce
        self._buffers = [_FlatBuffer(*key, members, all_reduce) for key, members in groups.items()]

    def reduce(self, signal: float = 0.0, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Replace each gradient by its sum over all ranks; the host does not wait for a device.

        Args:
            signal: A number that travels along; the sum over ranks is returned.
            divisor: A count of this rank, as a 0-d tensor: gradients are divided by its sum over
                all ranks. None if they are weighted already.

        Returns:
            The sum of `signal`, a 0-d tensor on the gradients' device.
        """
        totals = [buffer.reduce(signal, divisor) for buffer in self._buffers]
        return totals[0]


class _FlatBuffer:
    """Flat buffer for the gradients of the same device and dtype."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        parameters: Sequence[torch.nn.Parameter],
        all_reduce: AllReduce,
    ) -> None:
        self._all_reduce = all_reduce
        self._is_divided = any(map(is_sharded, parameters))
        locals_ = [local_part(parameter) for parameter in parameters]
        sizes = [local.numel() for local in locals_]
        num_values = sum(sizes)
        self._parameters = parameters
        self._flat = torch.zeros(
            num_values + _NUM_EXTRAS + len(parameters), device=device, dtype=dtype
        )
        self._gradients = self._flat[:num_values]
        self._signal = self._flat[num_values]
        self._divisor = self._flat[num_values + 1]
        self._flags = self._flat[num_values + _NUM_EXTRAS :]
        pieces = torch.split(self._gradients, sizes) if sizes else ()
        self._views = [
            piece.view(local.shape) for piece, local in zip(pieces, locals_, strict=True)
        ]
        self._present: list[bool] = []
        self._own_flags = torch.zeros_like(self._flags)

    def reduce(self, signal: float, divisor: torch.Tensor | None) -> torch.Tensor:
        present = [parameter.grad is not None for parameter in self._parameters]
        views = self._views
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._is_divided:
            gradients = [*map(local_part, gradients)]
        if len(gradients) < len(views):
            self._gradients.zero_()
            views = [view for view, has in zip(views, present, strict=True) if has]
        if gradients:
            torch._foreach_copy_(views, [gradient.detach() for gradient in gradients])
        # Flags sent to the device only after a change: most steps have the same.
        if present != self._present:
            self._present = present
            self._own_flags.copy_(torch.tensor(present, dtype=self._flat.dtype))
        self._flags.copy_(self._own_flags)
        self._signal.fill_(signal)
        if divisor is None:
            self._divisor.zero_()
        else:
            self._divisor.copy_(divisor)
        self._all_reduce(self._flat)
        if divisor is not None:
            self._gradients /= self._divisor
        if gradients:
            torch._foreach_copy_(gradients, views)
        if len(gradients) < len(self._views):
            self._give_missing(present)
        return self._signal

    def _give_missing(self, present: Sequence[bool]) -> None:
        """Create gradients of parameters with a gradient on other ranks only."""
        # Complex numbers know no order.
        anywhere = (self._flags != 0).tolist()
        for index, parameter in enumerate(self._parameters):
            if anywhere[index] and not present[index]:
                parameter.grad = like_piece(self._views[index].clone(), parameter)


class OverlappedAllReduce(DistributedDataParallel):
    """Model wrapper summing (not averaging) gradients in buckets during the backward pass.

    The sum is the mean over all samples if losses are weighted, or else by `weight`. Buffers stay
    each rank's own. Attributes of the wrapped model are also attributes of this wrapper.

    Args:
        model: The model, on its device.
        device: The device.
        weight: Returns what this rank's gradients count in the present step; None if its losses
            are weighted already.

    Attributes:
        summed: The parameters whose gradients it sums; not those that were frozen when it was made.
        left: The parameters whose gradients are sums since this was last emptied.
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
            # Fixed bucket layout: otherwise torch rebuilds buckets after the first step, and a
            # resumed run would add in another order than an uninterrupted run.
            find_unused_parameters=True,
        )
        self.summed = tuple(p for p in model.parameters() if p.requires_grad)
        self.left: dict[torch.nn.Parameter, None] = {}
        self.register_comm_hook((weight, self.left), _sum_bucket)

    def sum_in_backward(self, is_wanted: bool) -> None:
        """Set whether the next backward passes sum gradients."""
        self.require_backward_grad_sync = is_wanted
        if not is_wanted:
            # A forward pass that no backward pass followed, as of a GAN, still expects a sum.
            self.reducer._reset_state()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own model, without the wrapper."""
    return model.module if isinstance(model, OverlappedAllReduce) else model


# torch asks for these very annotations.
def _sum_bucket(
    state: tuple[Callable[[], float] | None, dict[torch.nn.Parameter, None]],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # missing in torch's stubs
) -> torch.futures.Future[torch.Tensor]:
    weight, left = state
    gradients = bucket.buffer()
    left.update(dict.fromkeys(bucket.parameters()))
    count = 1.0 if weight is None else weight()
    if count != 1.0:
        gradients *= count
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """Reductions of an optimizer, with the facts showing whether they are still valid."""

    num_parameters: int
    summed: Sequence[torch.nn.Parameter]
    pattern: Sequence[bool]
    complete: FlatReduction
    outside: FlatReduction

    def is_of(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Tell whether they hold still: layers may be frozen, and groups added."""
        if len(parameters) != self.num_parameters:
            return False
        return [parameter.requires_grad for parameter in self.summed] == self.pattern


@dataclass(eq=False, repr=False)
class OptimizerReductions:
    """The reductions of optimizers, made when they are needed.

    Args:
        device: The device of this rank.
        all_reduce: Sums a tensor over the ranks; None for torch's own.
        models: The models of the training, which may still come.
        sums_gradients: Whether the ranks have gradients to sum.
        sums_sharded: Whether gradients of sharded parameters are summed here. FSDP sums them in the
            backward pass.
    """

    device: torch.device
    all_reduce: AllReduce | None
    models: Sequence[torch.nn.Module]
    _: KW_ONLY
    sums_gradients: bool
    sums_sharded: bool

    def __post_init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[FlatReduction, FlatReduction]:
        """Return the reductions of all parameters, and of those outside overlapped models."""
        parameters = parameters_of(optimizer)
        known = self._known.get(id(optimizer))
        if known is None or not known.is_of(parameters):
            known = self._known[id(optimizer)] = self._make(parameters)
        return known.complete, known.outside

    def _make(self, parameters: Sequence[torch.nn.Parameter]) -> "_Known":
        summed = [p for p in parameters if self._is_summed(p)]
        overlapped = {
            parameter
            for model in self.models
            if isinstance(model, OverlappedAllReduce)
            for parameter in model.summed
        }
        outside = [parameter for parameter in summed if parameter not in overlapped]
        complete = FlatReduction(summed, self.device, self.all_reduce)
        is_all = len(outside) == len(summed)
        return _Known(
            num_parameters=len(parameters),
            summed=summed,
            pattern=[parameter.requires_grad for parameter in summed],
            complete=complete,
            outside=complete if is_all else FlatReduction(outside, self.device, self.all_reduce),
        )

    def _is_summed(self, parameter: torch.nn.Parameter) -> bool:
        return self.sums_gradients and (self.sums_sharded or not is_sharded(parameter))


# Reading a number from a GPU would make the host wait for the step that computes it. Read so many
# steps later it is there already.
_LAG_ON_GPU = 8

# A sum of its own takes half a millisecond of processor time. So it is not made at each step, but
# after half a second, so many steps, or an eighth of the steps so far, whichever comes first.
_PERIOD_S = 0.5
_LONGEST_PERIOD = 50
_MIN_STEPS_PER_PERIOD = 8


class _Sum(NamedTuple):
    """Sum due at a later step; `begun_at` is the start step of a sum sent on its own."""

    read_at: int
    total: torch.Tensor
    event: torch.cuda.Event | None
    begun_at: int | None


class TravellingSignal:
    """Signal of this rank to the others, sent with the next reduction, and the result.

    Every rank hears the sum after the same optimizer step: on a CPU at once, on a GPU `lag` steps
    later. Where a step has no gradients to sum, a sum of its own is made from time to time. It is
    waited for one step later, so that no rank stops for it.

    Args:
        device: Where the sums arrive.
        lag: After how many further steps a sum is read; by default what suits the device.
    """

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._lag = lag if lag is not None else _LAG_ON_GPU if self._is_cuda else 0
        self._told = 0.0
        self._heard = 0.0
        self._num_steps = 0
        self._on_their_way: deque[_Sum] = deque()
        self._spare: list[torch.Tensor] = []
        self._being_summed: tuple[torch.Tensor, dist.Work] | None = None
        # The step at which the next sum of its own begins; None while the last one does not say.
        self._next_alone: int | None = 0
        self._clock = _StepClock()

    def tell(self, value: float) -> None:
        """Set this rank's value for the next reduction."""
        self._told = value

    def take(self) -> float:
        """Return this rank's value and reset the value to 0."""
        told, self._told = self._told, 0.0
        return told

    def travel_alone(self, device: torch.device, *, is_awaited: bool = False) -> None:
        """Sum the values of all ranks without gradients, if due.

        All ranks call it at the same steps. With each sum the chief says after how many steps the
        next one begins, so that all begin it at the same step.

        Args:
            device: Where the process group communicates.
            is_awaited: Whether the sum is heard after this call, however far away the next one is.
        """
        if self._being_summed is not None:
            total, work = self._being_summed
            self._being_summed = None
            work.wait()
            self._expect(total, begun_at=self._num_steps)
        self._pass_step()
        if self._next_alone is not None and self._num_steps >= self._next_alone:
            self._next_alone = None
            words = torch.zeros(2, device=device)
            words[0] = self.take()
            if dist.get_rank() == 0:
                words[1] = self._clock.period(self._num_steps)
            work = dist.all_reduce(words, async_op=True)
            assert work is not None
            if is_awaited:
                work.wait()
                self._take_in(words, self._num_steps)
            else:
                self._being_summed = words, work

    def receive(self, total: torch.Tensor) -> None:
        """Take in the sum of a reduction, a 0-d tensor."""
        self._expect(total)
        self._pass_step()

    def hear(self) -> float:
        """Return the sum of all ranks since the last call, equal on every rank."""
        heard, self._heard = self._heard, 0.0
        return heard

    def _expect(self, total: torch.Tensor, begun_at: int | None = None) -> None:
        """Read a sum when the next step has passed, and the lag."""
        event, read_at = None, self._num_steps + 1 + self._lag
        if self._lag:
            copy = self._spare.pop() if self._spare and begun_at is None else self._copy_for(total)
            copy.copy_(total, non_blocking=True)
            total = copy
            if self._is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
                event.record()
        self._on_their_way.append(_Sum(read_at, total, event, begun_at))

    def _pass_step(self) -> None:
        self._num_steps += 1
        while self._on_their_way and self._on_their_way[0].read_at <= self._num_steps:
            _, total, event, begun_at = self._on_their_way.popleft()
            if event is not None:
                event.synchronize()
            if begun_at is None:
                self._heard += float(total)
                if self._lag:
                    self._spare.append(total)
            else:
                self._take_in(total, begun_at)

    def _take_in(self, words: torch.Tensor, begun_at: int) -> None:
        """Add a sum sent without gradients, and note the start step of the next."""
        told, period = words.tolist()
        self._heard += told
        self._next_alone = begun_at + int(period)

    def _copy_for(self, total: torch.Tensor) -> torch.Tensor:
        return torch.zeros(total.shape, pin_memory=self._is_cuda)


class _StepClock:
    """Set after how many steps ranks exchange their values again."""

    def __init__(self) -> None:
        self._step = 0
        self._time_s = time.monotonic()

    def period(self, step: int) -> int:
        """Return the number of steps; called on the chief at each sum."""
        now = time.monotonic()
        num_steps, seconds = step - self._step, max(now - self._time_s, 1e-6)
        self._step, self._time_s = step, now
        in_time = int(num_steps * _PERIOD_S / seconds)
        return max(1, min(in_time, _LONGEST_PERIOD, step // _MIN_STEPS_PER_PERIOD))


State = dict[str, Any]


def share_out_window(
    states: Sequence[State],
    rank: int,
    world_size: int,
    *,
    is_sharded: Sequence[bool],
    frequency: int,
) -> State:
    """Return a rank's share of an accumulated step begun by another group of ranks.

    The chief takes over what all of them have accumulated; the others begin with nothing. Of
    parameters that are sharded now, each rank takes its piece.

    Args:
        states: What `GradientSync.state` returned on each rank.
        rank: The rank.
        world_size: The number of ranks now.
        is_sharded: For each parameter whether it is sharded now.
        frequency: The batches of a step.
    """
    window, own = states[0]["window"], states[rank] if len(states) == world_size else None
    is_fed = window["num_all"] > 0
    # Divisors: of the stored sharded gradients, already means, and of the other gradients now.
    stored_divisor = window["num_all"] if is_fed else len(states) * frequency
    divisor = window["num_all"] if is_fed else world_size * frequency
    gradients: list[Any] = [None] * len(is_sharded)
    carried: list[Any] = [None] * len(is_sharded)
    for index, becomes_sharded in enumerate(is_sharded):
        stored = states[0]["gradients"][index]
        was_sharded = isinstance(stored, StoredTensor)
        if becomes_sharded:
            total = None if was_sharded else _window_total(states, index, is_fed=is_fed)
            gradients[index] = stored if total is None else total / stored_divisor
        elif own is not None and not was_sharded:
            gradients[index] = own["gradients"][index]
            carried[index] = own["window"]["carried"][index]
        elif rank == 0:
            total = stored.whole() if was_sharded else _window_total(states, index, is_fed=is_fed)
            if total is not None and (was_sharded or not is_fed):
                # Backward passes without a loader count equally on all ranks.
                total = total * (divisor if was_sharded else world_size / len(states))
            (carried if is_fed else gradients)[index] = total
    num_own = 0 if own is None else own["window"]["num_own"]
    return {"gradients": gradients, "window": {**window, "num_own": num_own, "carried": carried}}


def has_stored_tensors(state: State) -> bool:
    """Return whether a rank's state has gradients of formerly sharded parameters."""
    return any(isinstance(gradient, StoredTensor) for gradient in state["gradients"])


def _window_total(states: Sequence[State], index: int, *, is_fed: bool) -> torch.Tensor | None:
    """Return a parameter's gradient summed over all ranks, weighted by their samples."""
    parts = []
    for state in states:
        gradient, carried = state["gradients"][index], state["window"]["carried"][index]
        if gradient is not None:
            parts.append(gradient * state["window"]["num_own"] if is_fed else gradient)
        if carried is not None:
            parts.append(carried)
    return torch.stack(parts).sum(0) if parts else None


class AccumulatedWindow:
    """Batches of an accumulated step so far, with gradients set aside for weighting.

    Gradients of batches with equally many samples add up by themselves; the sums of those with
    other numbers are carried beside them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_batches = 0
        self.num_own = 0
        self.num_all = 0
        self._carried: dict[torch.nn.Parameter, torch.Tensor] = {}

    def carry(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take the gradients so far aside, weighted by their samples."""
        for parameter in parameters:
            if parameter.grad is not None:
                weighted = parameter.grad * self.num_own
                known = self._carried.get(parameter)
                self._carried[parameter] = weighted if known is None else known + weighted
                parameter.grad = None

    def give_back(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add the gradients set aside to the already averaged gradients."""
        for parameter in parameters if self._carried else ():
            carried = self._carried.pop(parameter, None)
            if carried is not None:
                mean = carried / self.num_all
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def state(self, parameters: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
        return {
            "num_batches": self.num_batches,
            "num_own": self.num_own,
            "num_all": self.num_all,
            "carried": [self._carried.get(parameter) for parameter in parameters],
        }

    def load_state(self, state: dict[str, Any], parameters: Sequence[torch.nn.Parameter]) -> None:
        self.num_batches, self.num_own = state["num_batches"], state["num_own"]
        self.num_all = state["num_all"]
        self._carried = {
            parameter: value.to(parameter.device)
            for parameter, value in zip(parameters, state["carried"], strict=True)
            if value is not None
        }


def existing_order(order: EpochOrder | None) -> EpochOrder:
    """Return the order of an epoch, known once its data has been prepared."""
    assert order is not None
    return order
