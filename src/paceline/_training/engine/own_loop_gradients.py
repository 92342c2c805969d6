"""Gradients of a user's own loop, averaged over the samples of all ranks after a backward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline._training.engine.checkpoints.sharded_tensor_pieces import (
    accept_whole_states,
    accept_whole_tensors,
    check_sharded,
    replace_parameters,
)
from paceline._training.engine.checkpoints.tensor_reader import fit_stored_tensor
from paceline._training.engine.fsdp_and_tensor_parallel import (
    ShardUnits,
    make_mesh,
    shard_model,
    unsharded,
)
from paceline._training.engine.gradient_reduction import (
    AccumulatedWindow,
    AllReduce,
    FlatReduction,
    OverlappedAllReduce,
    existing_order,
    share_out_window,
)
from paceline._training.engine.schedules import Position
from paceline._training.engine.tensor_copies_and_digests import is_sharded, local_part
from paceline.data._order_and_random_generators import EpochOrder, worker_shards

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(slots=True)
class Accumulation:
    """The present place within an aggregation window; set by the loop before each shard.

    A window is `frequency` global batches. The gradient of an optimizer step is the mean over all
    samples of the window (over all shards and ranks), so that accumulation equals the large
    batch; without `average` it is the sum of the batches' means.

    Attributes:
        frequency: Global batches per optimizer step.
        average: Whether gradients are averaged over the window.
        weight: The weight of the present shard's loss.
        is_boundary: Whether this is the worker's last shard before an optimizer step.
        is_even: Whether every rank has a last shard in this window.
        is_idle: Whether this rank has no samples of the present batch.
        num_steps: Optimizer steps since the start of training.
    """

    frequency: int = 1
    average: bool = True
    weight: float = 1.0
    is_boundary: bool = True
    is_even: bool = True
    is_idle: bool = False
    num_steps: int = 0

    def is_window_end(self, batches: int) -> bool:
        """Return whether the next batch, after `batches` trained batches, ends a window."""
        return (batches + 1) % self.frequency == 0

    def num_window_records(
        self, position: Position, order_of: Callable[[int], EpochOrder | None]
    ) -> int:
        """Return the number of samples averaged by the current window's gradient.

        Args:
            position: Where the batch lies that is trained next.
            order_of: Returns the order of an epoch; the data have a length.
        """
        epoch, batch = position.epochs, position.batch_in_epoch
        order = existing_order(order_of(epoch))
        if not self.average:
            return order.num_records(batch)
        # The window may have begun in the epoch before and may end in the next one.
        batch -= position.batches % self.frequency
        while batch < 0:
            epoch -= 1
            batch += existing_order(order_of(epoch)).num_batches
        total = 0
        for _ in range(self.frequency):
            order = existing_order(order_of(epoch))
            total += order.num_records(batch)
            batch += 1
            if batch == order.num_batches:
                epoch, batch = epoch + 1, 0
        return total


# Each backward pass at first, then one of so many is looked at: code that changes gradients by
# hand does so in every batch, and a look costs 0.1 us for each parameter.
_INTERVAL = 16

_Mark = tuple[int, float]


class ChangedGradients:
    """Detector of gradients changed between a backward pass and the optimizer's step.

    Attributes:
        is_scaled: Whether losses are scaled, so that gradients are too until the step.
    """

    def __init__(self) -> None:
        self.is_scaled = False
        self._num_passes = 0
        self._is_found = False
        # The marks of the parameters' gradients after the last backward pass.
        self._seen: dict[int, _Mark] = {}

    def note(
        self, parameters: Callable[[], Iterable[torch.nn.Parameter]], *, is_complete: bool
    ) -> None:
        """Note, on the chief, the gradients after a backward pass if the step will get others.

        Args:
            parameters: Returns the parameters.
            is_complete: Whether nothing will be added to the gradients.
        """
        self._num_passes += 1
        is_early = self._num_passes <= _INTERVAL
        is_due = not self._is_found and (is_early or self._num_passes % _INTERVAL == 0)
        is_left_alone = is_complete and not self.is_scaled
        is_seen = is_due and not is_left_alone and _is_chief()
        self._seen = _gradient_marks(parameters()) if is_seen else {}

    def find(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's gradients have changed since; True once only.

        Gradients that are gone, as by `zero_grad`, are no changed ones.
        """
        if not self._seen:
            return False
        now = _gradient_marks(p for group in optimizer.param_groups for p in group["params"])
        was_found = self._is_found
        self._is_found = was_found or any(self._seen.get(key, now[key]) != now[key] for key in now)
        # The step will change them too.
        self._seen = {key: seen for key, seen in self._seen.items() if key not in now}
        return self._is_found and not was_found


def _is_chief() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _gradient_marks(parameters: Iterable[torch.nn.Parameter]) -> dict[int, _Mark]:
    """Return a mark per parameter with a gradient; a changed gradient has another mark."""
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    marks: dict[int, _Mark] = {key: (id(g), g._version) for key, g in gradients.items()}
    # Norms for sharded tensors: torch may change them in place without a new version.
    pieces = {key: local_part(g) for key, g in gradients.items() if is_sharded(g)}
    if pieces:
        norms = torch.stack(torch._foreach_norm([*pieces.values()])).nan_to_num_(-1.0).tolist()
        marks.update(
            (key, (id(gradients[key]), norm)) for key, norm in zip(pieces, norms, strict=True)
        )
    return marks


def with_mean_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], mean_loss: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a step's arguments with the closure, if any, wrapped to return the mean loss.

    An optimizer with a closure decides by the loss how often to call it, and all ranks must call it
    equally often.

    Args:
        args: The positional arguments, the optimizer first.
        kwargs: The others.
        mean_loss: Returns the mean over all ranks of a rank's loss.
    """
    by_name = "closure" in kwargs
    closure = kwargs["closure"] if by_name else args[1] if len(args) > 1 else None
    if not callable(closure):
        return args, kwargs

    def shared() -> Any:
        loss = closure()
        return mean_loss(torch.as_tensor(loss)) if loss is not None else None

    if by_name:
        return args, {**kwargs, "closure": shared}
    return (args[0], shared, *args[2:]), kwargs


@dataclass(eq=False, repr=False)
class GradientGroup:
    """Group of parameters with jointly summed gradients."""

    parameters: list[torch.nn.Parameter]
    device: torch.device
    all_reduce: AllReduce | None
    _: KW_ONLY
    is_overlapped: bool

    def __post_init__(self) -> None:
        self.is_sharded = False
        self.hooks: list[Any] = []
        self.is_hooked = False
        self.is_fired = False
        self.is_complete = False
        self._reductions: dict[tuple[bool, ...], FlatReduction] = {}

    def reduction(self) -> FlatReduction:
        """Return the reduction for the currently trained parameters of the group."""
        # Layers may be frozen and thawed during training.
        key = tuple(parameter.requires_grad for parameter in self.parameters)
        if key not in self._reductions:
            self._reductions[key] = FlatReduction(self.parameters, self.device, self.all_reduce)
        return self._reductions[key]


def call_after_gradient(parameter: torch.nn.Parameter, function: Any) -> Any:
    """Register a function after each gradient of a parameter, even if currently frozen.

    Returns:
        The hook, to be removed; None if the parameter can have no gradient.
    """
    is_trained = parameter.requires_grad
    if not is_trained and not parameter.is_floating_point():
        return None
    # Trained for a moment: torch refuses gradient hooks on frozen parameters.
    parameter.requires_grad_(True)
    hook: Any = parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(is_trained)
    return hook


def scale_sharded(groups: Iterable[GradientGroup], factor: float) -> None:
    """Multiply the gradients of sharded parameters."""
    sharded = [group for group in groups if group.is_sharded]
    gradients = [p.grad for group in sharded for p in group.parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


class GradientSync:
    """Prepared models and optimizers of a rank, with the current weight of their gradients.

    Args:
        world_size: The number of ranks.
        device: The rank's device.
        all_reduce: What sums gradients over the ranks; the default process group by default.
    """

    def __init__(
        self, world_size: int, device: torch.device, all_reduce: AllReduce | None = None
    ) -> None:
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        # Called in each backward pass before gradients are summed.
        self.before_sums: Callable[[], None] | None = None
        self.num_backwards = 0
        self.has_sharded = self.has_overlapped = False
        self.frequency = 1
        self.is_boundary = True
        self.has_open_gradients = False
        self.has_optimizer = False
        # Set once a loader has given a batch.
        self.has_been_fed = False
        # Set by a loop over a loader without a backward pass, over batches of unequal weights.
        self.has_collected = False
        self.changes = ChangedGradients()
        self._world_size = world_size
        self._device = device
        self._all_reduce = all_reduce
        self._groups: list[GradientGroup] = []
        self.watched: set[int] = set()
        self._is_queued = False
        self._is_fed = False
        self._is_paused = False
        self._gathered: ExitStack | None = None
        self._weight = 1 / world_size
        self._mesh: Any = None
        self._shard_size: int | None = None
        self._window = AccumulatedWindow()

    def sum_by(self, all_reduce: AllReduce | None) -> None:
        """Have gradients summed by something else than the process group; before any model."""
        self._all_reduce = all_reduce

    def add_model(self, model: torch.nn.Module) -> None:
        """Make a model the same on all ranks and have its gradients summed."""
        self._broadcast(model)
        self.models.append(model)
        self.watch(model.parameters())

    def shard(
        self,
        model: torch.nn.Module,
        units: ShardUnits = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        precision: "MixedPrecisionPolicy | None" = None,
        shard_size: int | None = None,
    ) -> None:
        """Divide a model among the ranks, and have optimizers of its parameters step the pieces.

        Args:
            model: The model, on its device.
            units: Which modules are gathered as a whole, see `shard_model`.
            optimizers: Optimizers that were made of the parameters before.
            precision: The types of gathered parameters and of sums of gradients.
            shard_size: The number of ranks that hold one copy of a model; None for all.

        Raises:
            ValueError: A parameter is in several units, an optimizer has a state already, or
                `shard_size` does not divide the number of ranks or is another one than before.
        """
        if self._world_size > 1:
            self._broadcast(model)
            whole = dict(model.named_parameters(remove_duplicate=False))
            if self._mesh is None:
                self._mesh, self._shard_size = make_mesh(self._device, shard_size), shard_size
            if self._shard_size != shard_size:
                # Groups of ranks cost connections.
                raise ValueError(
                    "All models must have the same `shard_size`, but one has"
                    f" {self._shard_size} and another {shard_size}."
                )
            weight = self._piece_weight
            shard_model(model, self._device, units, weight, precision=precision, mesh=self._mesh)
            pieces = dict(model.named_parameters(remove_duplicate=False))
            for optimizer in optimizers:
                replace_parameters(optimizer, {id(whole[name]): pieces[name] for name in whole})
            accept_whole_tensors(model)
            self.has_sharded = True
        self.models.append(model)
        self.watch(model.parameters())

    def gather_models(self, num_present: int, num_shards: int) -> None:
        """Have sharded models whole until the loop's end if a rank has no part of a batch.

        All ranks call it with each batch of a loop without backward passes.

        Args:
            num_present: The shards of the batch.
            num_shards: The shards of other batches.
        """
        last = worker_shards(num_shards, self._world_size - 1, self._world_size)
        if self.has_sharded and not self._gathered and num_present <= last.start:
            self._gathered = ExitStack()
            self._gathered.enter_context(unsharded(self.models))

    def release_models(self) -> None:
        """Shard the models again after `gather_models`."""
        if self._gathered:
            self._gathered.close()
            self._gathered = None

    def _piece_weight(self) -> float:
        if self._is_paused:
            raise RuntimeError(
                'A validation must not run backward passes with `data_parallel="fsdp"`, as workers'
                ' may have unequally many batches. Hint: data_parallel="flat".'
            )
        return self._weight

    def _broadcast(self, model: torch.nn.Module) -> None:
        if self._world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def overlap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a wrapper that sums gradients in backward passes; of thawed layers too, later."""
        if self._world_size == 1 or not any(p.requires_grad for p in model.parameters()):
            self.add_model(model)
            return model
        self.models.append(model)
        self.has_overlapped = True
        overlapped = OverlappedAllReduce(model, self._device, self._weight_in_backward)
        self.watched.update(map(id, overlapped.summed))
        self.watch(model.parameters())
        return overlapped

    def _check_not_collected(self) -> None:
        """Refuse a backward pass for a batch of unknown weight.

        Raises:
            RuntimeError: The last loop over a loader has collected its batches.
        """
        if self.has_collected and not self._is_fed:
            raise RuntimeError(
                "A backward pass must come within the loop over the prepared loader, which tells"
                " the weight of each batch, but this one follows a loop that has none, over batches"
                " of unequal sizes. Hint: `for batch in loader` in each epoch, no list(loader); or"
                " drop_last=True of the loader."
            )

    def _weight_in_backward(self) -> float:
        self._check_not_collected()
        self.num_backwards += 1
        if self.before_sums is not None:
            self.before_sums()
        return self._weight

    def watch(
        self, parameters: Iterable[torch.nn.Parameter], *, is_overlapped: bool = False
    ) -> None:
        """Add parameters to the sums of gradients, unless already included.

        Args:
            parameters: The parameters.
            is_overlapped: Whether their model itself can sum them while the backward pass runs.
        """
        new = [p for p in parameters if id(p) not in self.watched]
        self.watched.update(map(id, new))
        sharded = [p for p in new if is_sharded(p)]
        others = [p for p in new if not is_sharded(p)] if sharded else new
        for members in filter(None, (others, sharded)):
            group = GradientGroup(
                members, self._device, self._all_reduce, is_overlapped=is_overlapped
            )
            group.is_sharded = members is sharded
            self._groups.append(group)
            if self._world_size > 1 or self.frequency > 1:
                self._hook(group)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch an optimizer's parameters, and make its closure return the loss of all ranks.

        Raises:
            ValueError: It was made before its model was sharded, or cannot step pieces.
        """
        if self.has_sharded:
            check_sharded(optimizer)
            accept_whole_states(optimizer)
        self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            self.watch(group["params"])
        if self._world_size > 1:
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self.share_loss(args, kwargs))

    def release(self) -> None:
        """Watch no parameter any more."""
        for group in self._groups:
            for hook in group.hooks:
                hook.remove()
        self._groups.clear()
        self.watched.clear()

    def accumulate(self, frequency: int) -> None:
        """Complete gradients once in so many batches only."""
        self.frequency = frequency
        self._weight = 1 / (self._world_size * frequency)
        for group in self._groups:
            if not group.is_hooked:
                self._hook(group)

    def _hook(self, group: "GradientGroup") -> None:
        group.is_hooked = True
        for parameter in group.parameters:
            hook = call_after_gradient(parameter, lambda _: self._notice(group))
            if hook is not None:
                group.hooks.append(hook)

    # ---- called by loaders ---------------------------------------------------------------

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool) -> None:
        """Set how many samples the gradients of the next backward passes come from."""
        self._is_fed, self.has_been_fed, self.has_collected = True, True, False
        if self.frequency == 1:
            self._weight = num_own / num_all
            return
        window = self._window
        if self.is_boundary:
            window.clear()
            self.has_open_gradients = False
        elif window.num_own != num_own:
            # Gradients of another sample count: set aside, as they need another weight.
            window.carry(self._parameters(sharded=False))
        if window.num_batches and self.has_sharded:
            # Theirs are the mean of the window so far.
            scale_sharded(self._groups, window.num_all / (window.num_all + num_all))
        window.num_own = num_own
        window.num_all += num_all
        window.num_batches += 1
        self.is_boundary = is_last or window.num_batches == self.frequency
        self._weight = num_own / window.num_all
        for group in self._groups:
            group.is_complete = False

    def end_data(self) -> None:
        """Note the end of loader data: the next gradients come from no loader."""
        self.release_models()
        self._is_fed = False
        self._weight = 1 / (self._world_size * self.frequency)
        self._window.clear()
        self.is_boundary = True
        self.has_open_gradients = False

    # ---- accumulated steps in checkpoints ------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the gradients of an unfinished accumulated step; None outside of a step."""
        if not self.has_open_gradients or self.is_boundary:
            return None
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        return {"gradients": gradients, "window": self._window.state(parameters)}

    def shared_out(self, states: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
        """Return a rank's share of an accumulated step begun by another group of ranks.

        Args:
            states: What `state` returned on each rank.
            rank: This rank.
        """
        sharded = [is_sharded(parameter) for parameter in self._parameters()]
        return share_out_window(
            states, rank, self._world_size, is_sharded=sharded, frequency=self.frequency
        )

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore a state returned by `state`; None changes nothing."""
        if state is None:
            return
        parameters = self._parameters()
        for parameter, gradient in zip(parameters, state["gradients"], strict=True):
            parameter.grad = (
                None
                if gradient is None
                else fit_stored_tensor(gradient, parameter).to(parameter.device)
            )
        self._window.load_state(state["window"], parameters)
        self.is_boundary = False
        self.has_open_gradients = True
        self._is_fed = state["window"]["num_all"] > 0

    # ---- during the backward pass --------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the gradients of backward passes within this context to each rank."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self.release_models()

    def _notice(self, group: "GradientGroup") -> None:
        if self._is_paused:
            return
        group.is_fired = True
        if not self._is_queued:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            # Autograd's own callback: runs once, at the end of the whole backward pass.
            engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._is_queued = False
        self._check_not_collected()
        if self.before_sums is not None:
            self.before_sums()
        if self.frequency > 1 and not self.has_optimizer:
            raise RuntimeError(
                "With `gradient_accumulation` above 1 the optimizer must be prepared, as it has to"
                " wait. Hint: optimizer = train.prepare_optimizer(optimizer)."
            )
        self.num_backwards += 1
        self.has_open_gradients = True
        if self.frequency > 1 and not self._is_fed:
            self._count_backward()
        if self.is_boundary:
            for group in self._groups:
                if group.is_fired:
                    group.is_fired = False
                    self._complete(group)
        self.changes.note(self._parameters, is_complete=self.is_boundary)

    def _count_backward(self) -> None:
        """Take a backward pass for a batch, as no loader announces such passes."""
        if self.is_boundary:
            self._window.clear()
        self._window.num_batches += 1
        self.is_boundary = self._window.num_batches == self.frequency
        self._weight = 1 / (self._world_size * self.frequency)
        for group in self._groups:
            group.is_complete = False

    def _complete(self, group: "GradientGroup") -> None:
        if self.frequency > 1 and group.is_complete:
            raise RuntimeError(
                "With `gradient_accumulation` above 1 each batch must have one backward pass, but"
                " this is the second one of this batch. Hint: add the losses up first."
            )
        group.is_complete = True
        if group.is_sharded:
            # FSDP has weighted and summed them.
            return
        gradients = [p.grad for p in group.parameters if p.grad is not None]
        if self._weight != 1.0 and gradients:
            torch._foreach_mul_(gradients, self._weight)
        self._window.give_back(group.parameters)
        if self._world_size > 1:
            group.reduction().reduce()

    def share_loss(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a step's arguments with the closure, if any, wrapped to return the mean loss.

        Args:
            args: The positional arguments, the optimizer first.
            kwargs: The others.
        """
        return with_mean_loss(args, kwargs, self._mean_loss)

    def _mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        mean = (loss.detach() * self._weight).double()
        dist.all_reduce(mean)
        return mean.to(loss.dtype)

    def _parameters(self, *, sharded: bool = True) -> list[torch.nn.Parameter]:
        groups = self._groups
        return [p for g in groups if sharded or not g.is_sharded for p in g.parameters]
