"""Check of steps: each n-th one is computed twice from the same state, and compared bit by bit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline._base.arguments_and_errors import check_count, one_of
from paceline._training.engine.gradient_reduction import OverlappedAllReduce, plain_model
from paceline._training.engine.own_loop_gradients import GradientSync
from paceline._training.engine.steps_by_user_code import calling_method
from paceline._training.engine.tensor_copies_and_digests import (
    TensorDigests,
    local_part,
    named_parameters,
    parameters_of,
)
from paceline._training.workers.worker_failures import StepsDifferError
from paceline.data._order_and_random_generators import capture_random_state, restore_random_state

T = TypeVar("T")
Keep = Callable[[], Callable[[], object]]
"""Notes further state, and returns a function to put it back."""
# A message names so many of the values that differ.
_NUM_NAMED = 4


class Trained(Protocol):
    """Models and optimizers, read at each use."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


class _StepReached(BaseException):
    """Ends the first computation of a step where the optimizers would change the models."""


class _Pass:
    """One computation of a step.

    Attributes:
        expected: The results of the computation before; None in the first one.
        results: The names and the values of its results.
        losses: The losses so far.
        gradients: The gradients that were noted before they were summed.
        reached: The optimizers that were to step.
    """

    def __init__(self, expected: dict[str, Any] | None = None) -> None:
        self.expected = expected
        self.results: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        self.gradients: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.reached: list[object] = []


class StepReplay:
    """Computes each n-th step twice before an optimizer changes anything, and compares both.

    Args:
        every: The steps from one such step to the next. The first one of a start is computed twice
            as well.
        on_mismatch: "stop" or "warn".
        trained: The models and optimizers. If it is a `GradientSync`, the optimizers step after the
            function that is computed twice; else within it, and they call `reach`.
        place: The rank and its device, for messages.
        tell: Called with the title, the text and the level of an alert.
        first: How many steps are completed at the start.

    Raises:
        ValueError: `every` is no integer of at least 1, `on_mismatch` is unknown, or there is
            nothing to compare.
    """

    def __init__(
        self,
        every: int,
        on_mismatch: str,
        trained: Trained,
        place: str,
        tell: Callable[[str, str, str], object],
        first: int = 0,
    ) -> None:
        check_replay(every, on_mismatch)
        self.settings = every, on_mismatch
        self._trained, self._place, self._tell, self._first = trained, place, tell, first
        self._sync = trained if isinstance(trained, GradientSync) else None
        self._step = 0
        self._pass = _Pass()
        if not (trained.models and (trained.optimizers or self._sync)):
            raise ValueError(
                "`verify_steps` needs models and optimizers that Paceline knows, but there are none"
                " of one kind. Hint: wrap or prepare them; engines that step by themselves, as"
                " DeepSpeed's, offer no such check."
            )
        if self._sums_within() and self._sync is not None and self._sync.frequency > 1:
            raise ValueError(
                "`verify_steps` must not be combined with `gradient_accumulation` above 1 with"
                ' `data_parallel="fsdp"`. Hint: data_parallel="flat".'
            )

    def is_due(self, num_steps: int) -> bool:
        """Tell whether the next step, after so many, is to be computed twice."""
        return not self.num_until_due(num_steps) or num_steps == self._first

    def num_until_due(self, num_steps: int) -> int:
        """Return how many steps come before one that is computed twice."""
        return (self.settings[0] - 1 - num_steps) % self.settings[0]

    def run(self, compute: Callable[[], T], num_steps: int, keep: Keep | None = None) -> T:
        """Compute a step twice, and return the second result.

        Args:
            compute: Runs forward and backward pass, and with `reach` the optimizers.
            num_steps: How many steps are completed.
            keep: Notes state other than parameters, buffers, gradients and generators.

        Raises:
            RuntimeError: The step cannot be computed twice.
            StepsDifferError: The results differ, and training is to stop then.
        """
        self._step, self._pass = num_steps + 1, _Pass()
        restores = [self._note_state(), *([keep()] if keep is not None else [])]
        hook = register_optimizer_step_pre_hook(_refuse_step)
        try:
            with suppress(_StepReached), self._own_gradients():
                self._finish(compute())
        finally:
            hook.remove()
        for restore in restores:
            restore()
        self._pass = _Pass(self._pass.results)
        with self._own_gradients():
            result = compute()
        if self._sync is not None:
            self._finish(result)
        # Results would keep the memory of gradients.
        self._pass = _Pass()
        return result

    def note_backward(self, loss: torch.Tensor) -> None:
        """Note a backward pass.

        Raises:
            RuntimeError: It comes after an optimizer step of the same batch.
        """
        if self._pass.reached:
            raise RuntimeError(
                f"With `verify_steps` {calling_method()} must run all backward passes of a batch"
                " before the first optimizer step, but runs one after it. Hint: leave"
                " `verify_steps` out for optimizers that take turns."
            )
        self._pass.losses.append(loss.detach().clone())

    def reach(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer is about to step; return whether it must not."""
        now = self._pass
        if all(optimizer is not other for other in now.reached):
            now.reached.append(optimizer)
            self._take(parameters_of(optimizer))
        if now.expected is None and len(now.reached) == len(self._trained.optimizers):
            raise _StepReached
        return now.expected is None

    # ---- results -------------------------------------------------------------------------

    def _finish(self, loss: Any) -> None:
        """Take the results of a computation that steps no optimizer."""
        now, optimizers = self._pass, self._trained.optimizers
        if self._sync is None:
            raise RuntimeError(
                "With `verify_steps` each optimizer must step in each batch, by"
                f" `context.step_optimizer`, but {len(now.reached)} of {len(optimizers)} did."
            )
        if isinstance(loss, torch.Tensor) and self._sums_within():
            now.losses.append(loss.detach().clone())
        self._take(self._names())

    def _take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take the gradients, at first all other results too, and compare them."""
        now, name_of, found = self._pass, self._names(), dict[str, Any]()
        if not now.results:
            found = {f"the loss {number}": loss for number, loss in enumerate(now.losses)}
        own = now.gradients
        found |= {f"the gradient of `{name_of[p]}`": own.get(p, p.grad) for p in parameters}
        if not now.results:
            buffers = _buffers(self._trained.models)
            found |= {f"the buffer `{name}`": buffer.clone() for name, *_, buffer in buffers}
            states = capture_random_state()
            found |= {f"the random state of {name}": state for name, state in states.items()}
        now.results |= found
        if (expected := now.expected) is not None:
            names = [name for name in found if not _same(expected.get(name), found[name])]
            if names:
                self._report(names)

    def _report(self, names: Sequence[str]) -> None:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        text = (
            f"Step {self._step} must give the same bits when it is computed twice from the same"
            f" state, but on {self._place} these differ: {', '.join(names[:_NUM_NAMED])}{more}."
            " Hint: look for an operation without a deterministic implementation"
            " (PACELINE_DETERMINISTIC=1 names it), for state outside of parameters, buffers and the"
            " generators of the process, such as a counter in a module, and for broken memory."
            " on_mismatch='warn' trains on."
        )
        stops = self.settings[1] == "stop"
        self._tell(f"Step {self._step} gave two results", text, "error" if stops else "warn")
        if stops:
            raise StepsDifferError(text)

    def _names(self) -> dict[torch.nn.Parameter, str]:
        """Return the names of all parameters."""
        names = {
            parameter: f"model_{index}.{name}"
            for index, model in enumerate(map(plain_model, self._trained.models))
            for name, parameter in named_parameters(model)
        }
        for index, optimizer in enumerate(self._trained.optimizers):
            for number, parameter in enumerate(parameters_of(optimizer)):
                names.setdefault(parameter, f"parameter {number} of optimizer {index}")
        return names

    # ---- state ---------------------------------------------------------------------------

    def _note_state(self) -> Callable[[], None]:
        """Return a function to put back the present state."""
        # The first computation adds to them in place.
        gradients = {p: None if p.grad is None else p.grad.clone() for p in self._names()}
        buffers = [(*each, each[-1].clone()) for each in _buffers(self._trained.models)]
        groups = [group for each in self._trained.optimizers for group in each.param_groups]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        generators, weights = capture_random_state(), self._weights()

        def restore() -> None:
            self._refuse_changes(weights)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            with torch.no_grad():
                for _, module, name, buffer, value in buffers:
                    # A module may have put another tensor in its place.
                    module._buffers[name] = buffer.copy_(value)
            for group, values in zip(groups, settings, strict=True):
                group.update(values)
            for model in self._trained.models:
                if isinstance(model, OverlappedAllReduce):
                    model.left.clear()
            restore_random_state(generators)

        return restore

    def _weights(self) -> dict[str, tuple[str, str]]:
        """Return shape and content of all parameters, trained or not, in short."""
        digests = TensorDigests()
        for parameter, name in self._names().items():
            digests.add(name, local_part(parameter))
        found = ((name, text.partition("]")) for name, text in digests.finish().items())
        return {name: (shape, content) for name, (shape, _, content) in found}

    def _refuse_changes(self, weights: dict[str, tuple[str, str]]) -> None:
        """Refuse a step that changes parameters by itself: to do so twice gives other ones.

        Shards that are gathered meanwhile have another shape.
        """
        for name, (shape, content) in self._weights().items():
            before = weights.get(name, (None, ""))
            if shape == before[0] and content != before[1]:
                raise RuntimeError(
                    f"With `verify_steps` {calling_method()} must change no parameter before the"
                    f" optimizers step, as it is called twice, but it changed `{name}`. Hint: move"
                    " that, such as the update of an average of the weights, behind the last"
                    " context.step_optimizer or into a callback, or leave `verify_steps` out."
                )

    def _sums_within(self) -> bool:
        """Tell whether gradients are sums over the ranks as soon as they are there."""
        sync = self._sync
        return sync is not None and (sync.has_sharded or sync.has_overlapped)

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Note gradients before a backward pass in the block sums them over the ranks."""
        sync = self._sync
        if sync is None or self._sums_within():
            yield
        elif self._pass.expected is None:
            with sync.paused():
                yield
        else:
            others, now = sync.before_sums, self._pass

            def note() -> None:
                if others is not None:
                    others()
                if now.gradients:
                    raise RuntimeError(
                        "With `verify_steps` a step must have one backward pass, but has another."
                        " Hint: add the losses up first."
                    )
                now.gradients = {p: p.grad.clone() for p in self._names() if p.grad is not None}

            sync.before_sums = note
            try:
                yield
            finally:
                sync.before_sums = others


def check_replay(verify_steps: object, on_mismatch: object) -> None:
    """Check the arguments of a replay check.

    Raises:
        ValueError: `verify_steps` is no integer of at least 1, or `on_mismatch` is unknown.
    """
    check_count("verify_steps", verify_steps)
    one_of("stop", "warn")("on_mismatch", on_mismatch)


def _refuse_step(*_: Any) -> None:
    raise RuntimeError(
        f"With `verify_steps` {calling_method()} must not step an optimizer by itself, as it is"
        " called twice. Hint: context.backward(loss), then context.step_optimizer(optimizer); in a"
        " train function the step comes after the function that is given."
    )


def _buffers(
    models: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    """Yield the name of each buffer, its module, its name there, and the buffer."""
    for index, model in enumerate(map(plain_model, models)):
        for path, module in model.named_modules(prefix=f"model_{index}"):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}", module, name, buffer


def _same(left: Any, right: Any) -> bool:
    """Compare results bit by bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        is_alike = left.shape == right.shape and left.dtype == right.dtype
        return is_alike and torch.equal(_bits(left), _bits(right))
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = local_part(tensor).detach()
    flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.contiguous().view(torch.uint8)
