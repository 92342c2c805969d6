"""Watch over backward passes and optimizer steps taken by user code without the context."""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline._training.engine.gradient_reduction import FlatReduction, OverlappedAllReduce
from paceline._training.engine.own_loop_gradients import GradientSync
from paceline._training.engine.profiling import REDUCE
from paceline._training.engine.tensor_copies_and_digests import parameters_of

if TYPE_CHECKING:
    from paceline._training.engine.optimizer_stepper import Stepper

logger = logging.getLogger(__name__)


_SCALERS = "torch.amp.grad_scaler"


def calling_method() -> str:
    """Return the name of the innermost stack function outside of torch and paceline."""
    for frame in _frames():
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "paceline"):
            owner = frame.f_locals.get("self")
            prefix = "" if owner is None else f"{type(owner).__name__}."
            return f"`{prefix}{frame.f_code.co_name}`"
    return "A training"


def is_called_by_scaler() -> bool:
    """Tell whether a gradient scaler of torch is on the stack."""
    return any(frame.f_globals.get("__name__") == _SCALERS for frame in _frames())


def is_within_step_of(optimizers: Iterable[object]) -> bool:
    """Tell whether any of the optimizers is stepping, perhaps with another optimizer inside."""
    known = {id(optimizer) for optimizer in optimizers}
    return any(id(frame.f_locals.get("self")) in known for frame in _frames())


def is_in_method(owner: object, name: str) -> bool:
    """Tell whether a method of an object is on the stack."""
    return any(
        frame.f_code.co_name == name and frame.f_locals.get("self") is owner for frame in _frames()
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# The attribute by which the hook of an optimizer is known again.
_MARK = "_paceline_watches_steps"
# Classes with a method `step`: an optimizer's own, and the one whose method is still to be written.
_NUM_STEPS_OF_AN_OPTIMIZER = 2
_INSTEAD = "Hint: context.backward(loss), then context.step_optimizer(optimizer)."


class _Source(Enum):
    """Source of the present gradients."""

    NOWHERE = 0
    CONTEXT = 1
    PLAIN = 2


class WatchedUserCalls(GradientSync):
    """Handler of calls bypassing the context, e.g. `loss.backward()`.

    Hooks on the parameters notice backward passes. If the first optimizer step is the context's,
    they are removed, as they would cost time with every step.

    Args:
        stepper: The stepper; whoever has this keeps it alive.
        world_size: The number of ranks.
    """

    def __init__(self, stepper: "Stepper", world_size: int) -> None:
        super().__init__(world_size, stepper.device, stepper.all_reduce)
        # Weak proxy: a reference cycle would keep the models' memory alive longer than needed.
        self._stepper: Stepper = weakref.proxy(stepper)
        self.is_context_calling = False
        self.is_in_batch = False
        self.has_begun = False
        # Whether a loop of the user's own has to take its batches from the trainer.
        self.refuses_outside = False
        self.has_window = False
        self._source = _Source.NOWHERE
        self._is_stepped = False
        self._is_settled = world_size == 1
        self._num_watched = 0
        self._has_warned = False
        # Optimizers whose steps were looked at once.
        self._known: set[int] = set()
        self._strangers: Any = None

    # ---- called by the loop and the stepper ----------------------------------------------

    def begin(self, num_shards: int) -> None:
        """Notice calls from now on."""
        self.has_begun = True
        self.changes.is_scaled = self._is_scaling()
        self.has_window = num_shards > self._world_size or self._stepper.accumulation.frequency > 1
        if self._world_size > 1:
            self._strangers = register_optimizer_step_pre_hook(self._before_strange_step)
        if not self._is_settled:
            self.watch_all()

    def enter_batch(self) -> None:
        """Treat calls from now on as the training of a batch."""
        self.is_in_batch = True
        if self.num_backwards:
            # A backward pass may have failed; and parameters may have been added.
            self._is_queued = False
            num_optimized = self._num_optimized()
            if num_optimized != self._num_watched:
                self.watch_all()

    def _num_optimized(self) -> int:
        optimizers = self._stepper.optimizers
        return sum(len(group["params"]) for o in optimizers for group in o.param_groups)

    def end(self) -> None:
        """Notice no more backward passes."""
        self.is_in_batch = False
        if self._strangers is not None:
            self._strangers.remove()
            self._strangers = None
        self.release()

    def watch_all(self) -> None:
        """Watch all parameters; overlapped models have a group of their own."""
        parameters, self._num_watched = self._stepper.parameters(), self._num_optimized()
        overlapped = {
            id(parameter)
            for model in self._stepper.models
            if isinstance(model, OverlappedAllReduce)
            for parameter in model.summed
        }
        self.watch(p for p in parameters if id(p) not in overlapped)
        self.watch((p for p in parameters if id(p) in overlapped), is_overlapped=True)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Notice the steps of an optimizer."""
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        if hooks is None or any(hasattr(hook, _MARK) for hook in hooks.values()):
            return
        optimizer.register_step_pre_hook(_hook_before_step(self, optimizer))

    @property
    def is_context_used(self) -> bool:
        """Whether the present gradients come from the context's backward passes."""
        return self._source is _Source.CONTEXT

    def note_backward(self) -> None:
        """Record a backward pass run by the context."""
        self._check_within_batch()
        if self._source is _Source.PLAIN and not self._is_stepped:
            self._refuse_mixture()
        self._source, self._is_stepped = _Source.CONTEXT, False

    def note_step(self) -> bool:
        """Record an optimizer step by the context; return whether gradients are already summed.

        Raises:
            RuntimeError: There are gradients that the context knows nothing of, but has to; or a
                loop of the user's own steps outside of the trainer's batches.
        """
        self._check_within_batch()
        if self._source is _Source.NOWHERE and (self.has_window or self._is_scaling()):
            raise RuntimeError(
                f"{calling_method()} must call `context.backward` before"
                f" `context.step_optimizer`, as {self._reason()}. Hint: context.backward(loss)"
                " in place of loss.backward()."
            )
        self._is_stepped = True
        return self._source is _Source.PLAIN and self._world_size > 1

    def warn_of_changes(self) -> None:
        """Warn about gradients changed between the context's backward pass and its step."""
        logger.warning(
            "%s must not change gradients before `context.step_optimizer` has completed them, as"
            " %s. Clipping of a part of them gives other results. Hint:"
            " context.step_optimizer(optimizer, clip_grads=lambda parameters:"
            " nn.utils.clip_grad_norm_(parameters, 1.0)) clips the whole ones, once in each step.",
            calling_method(),
            self._reason(),
        )

    def settle(self) -> None:
        """Remove the hooks once all steps of a batch were taken by the context."""
        if not self._is_settled and self._source is _Source.CONTEXT:
            self._is_settled = not self.num_backwards
            if self._is_settled:
                self.release()

    def join_sum(self) -> None:
        """Sum gradients, on a rank without samples, with the other ranks."""
        for parameter in self._parameters():
            parameter.grad = None
        self._sum()

    def shared_gradients(self) -> list[torch.Tensor | None] | None:
        """Return the remaining gradients for ranks without samples; None if not needed."""
        if self._source is not _Source.PLAIN:
            return None
        return [None if p.grad is None else p.grad.cpu() for p in self._parameters()]

    def take_gradients(self, gradients: list[torch.Tensor | None] | None) -> None:
        """Set, on a rank without samples, the chief's gradients at the end of a batch."""
        if gradients is not None:
            for parameter, gradient in zip(self._parameters(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)

    # ---- backward passes -----------------------------------------------------------------

    def _notice(self, group: Any) -> None:
        if self.is_in_batch and not self.is_context_calling:
            super()._notice(group)

    def _finish_backward(self) -> None:
        self._is_queued = False
        if self._stepper.is_divided:
            option = 'data_parallel="fsdp"' if self._stepper.is_sharded else "tensor_parallel_size"
            raise RuntimeError(
                f"{calling_method()} must not call `loss.backward()` with `{option}`,"
                f" as losses are weighted. {_INSTEAD}"
            )
        if self.has_window:
            self._refuse_window("loss.backward()")
        if self._source is _Source.CONTEXT and not self._is_stepped:
            self._refuse_mixture()
        models = self._stepper.models
        if len(models) > 1 and any(isinstance(model, OverlappedAllReduce) for model in models):
            # Untrained overlapped models would wait for gradients that never come.
            raise RuntimeError(
                f"{calling_method()} must not call `loss.backward()`, as there are several models"
                f" and their sums overlap with the backward pass. {_INSTEAD} Or use"
                ' `data_parallel="flat"`.'
            )
        self._source, self._is_stepped = _Source.PLAIN, False
        self.num_backwards += 1
        self._stepper.idle_ranks.announce_sum()
        with torch.no_grad(), self._stepper.measured(REDUCE):
            self._sum()

    def _sum(self) -> None:
        stepper = self._stepper
        self._weight = stepper.accumulation.weight
        is_overlapping = stepper.is_overlapping()
        groups = [g for g in self._groups if not (is_overlapping and g.is_overlapped)]
        for group in groups:
            gradients = [p.grad for p in group.parameters if p.grad is not None]
            if self._weight != 1.0 and gradients:
                torch._foreach_mul_(gradients, self._weight)
            stepper.sum_over_ranks(group.reduction())
        if not groups:
            # The ranks' words to each other travel all the same.
            stepper.sum_over_ranks(FlatReduction([], self._device, self._all_reduce))

    # ---- optimizer steps -----------------------------------------------------------------

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Count, share or refuse an optimizer step taken without the context.

        Returns:
            The arguments for the step, if others are to take the place of those given.
        """
        if not self.is_in_batch:
            self._check_outside(optimizer)
            return None
        if self.has_window:
            self._refuse_window("optimizer.step()")
        if self._source is _Source.CONTEXT and (self._world_size > 1 or self._is_scaling()):
            raise RuntimeError(
                f"{calling_method()} must step its optimizer by `context.step_optimizer`, as"
                " the gradients are those of `context.backward`. Hint:"
                " context.step_optimizer(optimizer) in place of optimizer.step(), and clipping by"
                " its `clip_grads`."
            )
        if self._is_scaling() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s calls `loss.backward()`, so that its losses are not scaled as the precision"
                " fp16 wants it. %s",
                calling_method(),
                _INSTEAD,
            )
        if self._world_size > 1:
            self._check_known(optimizer)
        self._stepper.count_step(optimizer)
        self.is_context_calling = False
        if self._world_size == 1:
            return None
        self._is_stepped = True
        self._stepper.idle_ranks.announce_step(optimizer)
        return self.share_loss(args, kwargs)

    def _mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        self._stepper.idle_ranks.announce_loss()
        self._weight = self._stepper.accumulation.weight
        return super()._mean_loss(loss)

    def _check_within_batch(self) -> None:
        if self.refuses_outside and not self.is_in_batch:
            raise RuntimeError(
                f"{calling_method()} must train on the batches of the trainer, but does so on"
                " others, of which no checkpoint and no rank would know. Hint: `for batch in"
                " self.training_dataloader` in `run_training_epoch`, once."
            )

    def _check_outside(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_within_batch()
        if self._world_size > 1 and self.has_begun and _has_gradients(optimizer):
            raise RuntimeError(
                f"{calling_method()} must not step a wrapped optimizer outside of the training of"
                f" a batch on {self._world_size} ranks, as each rank would train a model of its"
                " own. Hint: leave the loop over the data to the trainer, and override what"
                " happens on a batch."
            )

    def _check_known(self, optimizer: torch.optim.Optimizer) -> None:
        is_new = id(optimizer) not in self._known
        self._known.add(id(optimizer))
        if is_new and self._stepper.scaler is None and is_called_by_scaler():
            raise RuntimeError(
                f"{calling_method()} must not step by a gradient scaler of its own that is not"
                " wrapped, as all ranks must scale alike. Hint: scaler ="
                " context.wrap_scaler(scaler)."
            )
        if any(p.grad is not None and id(p) not in self.watched for p in parameters_of(optimizer)):
            raise RuntimeError(
                f"{calling_method()} must not step parameters that the optimizer got in this very"
                " batch, as their gradients are not summed over the ranks yet. Hint: add parameter"
                " groups between two batches."
            )

    def _before_strange_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Refuse steps of the models' parameters by an unwrapped optimizer."""
        if not self.is_in_batch or any(optimizer is o for o in self._stepper.optimizers):
            return
        own = {id(parameter) for parameter in self._stepper.parameters()}
        if is_within_step_of(self._stepper.optimizers):
            return
        if not own or any(id(parameter) in own for parameter in parameters_of(optimizer)):
            raise RuntimeError(
                f"The optimizer that {calling_method()} steps must be wrapped, but"
                f" {type(optimizer).__name__} is not, so that the {self._world_size} ranks would"
                " train apart. Hint: optimizer = context.wrap_optimizer(optimizer), and"
                " context.wrap_model(model)."
            )

    # ---- refusals ------------------------------------------------------------------------

    def _is_scaling(self) -> bool:
        return bool(self._stepper.is_scaling_automatic)

    def _reason(self) -> str:
        frequency = self._stepper.accumulation.frequency
        if self._is_scaling():
            return "the precision fp16 scales losses"
        if frequency > 1:
            return f"an optimizer step has {frequency} batches"
        if self.has_window:
            return f"a batch has more shards than the {self._world_size} rank(s)"
        return f"the {self._world_size} ranks' gradients are summed with the step"

    def _refuse_window(self, call: str) -> None:
        raise RuntimeError(
            f"{calling_method()} must not call `{call}`, as {self._reason()} and the optimizer"
            f" has to wait for all of them. {_INSTEAD}"
        )

    def _refuse_mixture(self) -> None:
        raise RuntimeError(
            f"{calling_method()} must run all backward passes of an optimizer step by"
            f" `context.backward`, or none, but does both. {_INSTEAD}"
        )


def _hook_before_step(
    calls: WatchedUserCalls, optimizer: torch.optim.Optimizer
) -> Callable[..., Any]:
    """Return the step hook of an optimizer, with only weak references to its target."""
    calls_of = weakref.ref(calls)
    num_steps = sum("step" in vars(each) for each in type(optimizer).mro())
    has_parents_step = num_steps > _NUM_STEPS_OF_AN_OPTIMIZER

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        calls = calls_of()
        if calls is None:
            return None
        # A class may inherit its parent's step, which calls the hooks once more.
        if calls.is_context_calling or (has_parents_step and is_in_method(optimizer, "step")):
            return None
        return calls.before_step(optimizer, args, kwargs)

    setattr(before_step, _MARK, True)
    return before_step


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))
