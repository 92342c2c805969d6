"""Location of the layer with the first non-finite value, by a rerun of the batch.

Also: the origin of a non-finite loss, and the callbacks of a training.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from paceline._training.engine.gradient_reduction import DataParallel, plain_model
from paceline._training.engine.model_preparation import compile_counts
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.profiling import StepThroughput, StepTimeline
from paceline._training.engine.schedules import Position, StopReason
from paceline._training.engine.weighted_means import WeightedMeans
from paceline.core._arguments import NonFiniteError
from paceline.core._attempt_journal import TimeAccount
from paceline.core._core_context import Context
from paceline.core._distributed_context import DistributedContext
from paceline.data._order_and_random_generators import isolated_randomness
from paceline.data._sharded_loader import ShardedData

# Trains on (a shard, the epoch, the global batch) and returns its metrics.
TrainsShard = Callable[[Any, int, int], Any]


class LoopHooks(Protocol):
    """Hooks of the training loop, implemented by a front door; called on all ranks.

    Attributes:
        has_schedulers: Whether `after_batch` has anything to do.
        to_device: Returns a shard on this rank's device.
    """

    has_schedulers: bool
    to_device: Callable[[Any], Any]

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on a shard and return its metrics."""

    def keep_for_replay(self) -> Callable[[], object]:
        """Note what `train_shard` changes besides models; return a function to put it back."""

    def plain_training(self) -> TrainsShard:
        """Return the function to train the next shards with; no epoch begins or ends in them."""

    def metrics_of(self, returned: Any) -> Mapping[str, Any]:
        """Return the metrics in a value returned by `plain_training`'s function."""

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""

    def after_batch(self, position: Position) -> None:
        """Step schedulers counted in batches or optimizer steps."""

    def epoch_started(self, epoch: int) -> None:
        """Report the beginning of an epoch."""

    def epoch_ended(self, epoch: int) -> None:
        """Step schedulers counted in epochs, and report the end of an epoch."""

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report averaged training metrics."""

    def report_timings(self, batches: int, timings: dict[str, float]) -> None:
        """Report throughput, or where the time of a batch went, after so many batches."""

    def validate(self, position: Position) -> bool:
        """Validate and report; return whether the result asks for a checkpoint."""

    def save(self) -> None:
        """Store a checkpoint, unless this position has one."""

    def tell_stored(self) -> None:
        """Send all ranks the names of the stored checkpoints; collective over all ranks."""

    def wants_save(self) -> bool:
        """Tell whether this rank wants a checkpoint now, where they follow each other."""

    def memory_wish(self) -> "RankWish":
        """Return this rank's wish for states in memory: NONE, KEEP or DROP."""

    def serve_memory(self, wish: "RankWish") -> None:
        """Save the state to memory (KEEP), or give the memory up (DROP); collective."""

    def look(self, position: Position) -> None:
        """Raise errors of background work, and show progress; called periodically."""


class RankWish(IntEnum):
    """Request of a rank to all ranks; the largest of several requests wins."""

    NONE = 0
    KEEP = 1
    DROP = 2
    SAVE = 3
    STOP = 4
    PREEMPT = 5
    INTERRUPT = 6

    @property
    def is_of_states(self) -> bool:
        """Whether the state is saved, or its memory given up, and training continues."""
        return RankWish.NONE < self < RankWish.STOP

    @property
    def stop_reason(self) -> StopReason | None:
        """The reason to end training by this request, or None to continue."""
        return _REASONS.get(self)


_REASONS = {
    RankWish.STOP: StopReason.REQUESTED,
    RankWish.PREEMPT: StopReason.PREEMPTED,
    RankWish.INTERRUPT: StopReason.INTERRUPTED,
}


class RankAgreement:
    """Agreement of the ranks on actions between two batches.

    Args:
        core: The core context.
        stepper: Its reductions carry the news that some rank wants something.
        hooks: Asked to look at the background now and then; the owner of this object keeps it
            alive.

    Attributes:
        is_decision_due: Whether the ranks have to agree before the next batch, as the search may
            have decided on the trial.
        compared_at: Where the ranks were compared last; None before training, and where one of them
            may have left since.
    """

    # How often a rank looks whether it shall leave and shows progress, in seconds.
    look_interval_s = 0.05

    def __init__(self, core: Context, stepper: Stepper, hooks: LoopHooks) -> None:
        self.is_decision_due = False
        self.compared_at: Position | None = None
        self._core = core
        self._stepper = stepper
        self._hooks = hooks
        self._is_alone = core.distributed.size == 1
        self._is_start_compared = False
        self._next_look_s = 0.0
        self._wish = RankWish.NONE
        self._saves_continuously = self._is_save_told = False
        # After how many batches the ranks exchange news of checkpoints; None for never.
        self._news_at: int | None = None

    def begin(self, *, saves_continuously: bool) -> None:
        """Begin a training.

        Args:
            saves_continuously: Whether checkpoints follow each other as fast as they are stored.
        """
        self._saves_continuously, self._is_save_told = saves_continuously, False

    def note_saved(self, position: Position) -> None:
        """Have all ranks hear of new checkpoints after the next batch; called by all of them.

        They wait for each other then. Now that they copy their states, they would for long.
        """
        if self._news_at is None and not self._is_alone:
            self._news_at = position.batches + 1

    def after_batch(self, position: Position) -> RankWish:
        """Return the action of all ranks after this batch; collective over all ranks."""
        if self._news_at is not None and position.batches >= self._news_at:
            self._news_at = None
            self._hooks.tell_stored()
        # Agreed at once: the next gradients, which carry such news, come a batch later.
        if self.is_decision_due and (wish := self.agree_now()):
            return wish
        stepper = self._stepper
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + self.look_interval_s
            self._hooks.look(position)
            self._wish = self._own_wish()
            if self._saves_continuously and not self._wish and self._hooks.wants_save():
                self._wish = RankWish.SAVE
            self._wish = self._wish or self._hooks.memory_wish()
        wish = max(self._wish, RankWish.STOP if stepper.is_stop_requested else RankWish.NONE)
        if not self._is_alone:
            is_told = wish.is_of_states and self._is_save_told
            self._is_save_told = wish.is_of_states
            if wish and not is_told:
                stepper.signal.tell(1.0)
            if not stepper.signal.hear():
                return RankWish.NONE
            # All ranks have heard that one of them wants something; now they learn the wish.
            wish = max(self._core.distributed.allgather(wish))
        if wish.is_of_states:
            self._wish, self._is_save_told = RankWish.NONE, False
        return wish

    def agree_now(self) -> RankWish:
        """Return the agreed request to leave, the same on all ranks; waits for all of them."""
        self.is_decision_due = False
        return max(self._core.distributed.allgather(self._own_wish()))

    def compare_start(self, position: Position, *, is_idle: bool) -> None:
        """Run `compare_ranks` once, at the first start."""
        if not self._is_start_compared:
            self._is_start_compared = True
            self.compare_ranks(position, is_idle=is_idle)

    def compare_end(self, position: Position, *, is_idle: bool) -> None:
        """Do what `compare_ranks` does, if training has advanced since then."""
        if self.compared_at not in (None, position):
            self.compare_ranks(position, is_idle=is_idle)

    def compare_ranks(self, position: Position, *, is_idle: bool) -> None:
        """Compare state required to be equal on all ranks, unless turned off; collective.

        Args:
            position: Where training is.
            is_idle: Whether this rank never has samples.

        Raises:
            RanksDifferError: They differ.
        """
        stepper, check = self._stepper, self._stepper.rank_check
        self.compared_at = None
        if check.is_on and not self._is_alone:
            digest = check.digest(stepper.models, stepper.optimizers, is_idle=is_idle)
            check.compare(digest, self._core.distributed.allgather)
        self.compared_at = position

    def _own_wish(self) -> RankWish:
        """Return this rank's request from signals, and on the chief from the runner too."""
        preempt = self._core.preempt
        is_chief = self._core.distributed.rank == 0
        if not (preempt.is_wanted() if is_chief else preempt.has_signal):
            return RankWish.NONE
        return RankWish.INTERRUPT if preempt.is_interrupted else RankWish.PREEMPT


class LoopReports:
    """Report training metrics, and the times of steps with them.

    Args:
        core: The core context.
        hooks: The reporter; it may be a weak reference.
        stepper: The models and optimizers.

    Attributes:
        timeline: The step times of the ranks.
        account: The totals of training, validation and checkpoints.
        throughput: Batches and records a second.
    """

    def __init__(self, core: Context, hooks: LoopHooks, stepper: Stepper) -> None:
        self._hooks = hooks
        self._is_chief = core.distributed.rank == 0
        self.timeline = StepTimeline(
            core.distributed,
            stepper.device,
            # The ranks that divide a model wait for each other in its passes.
            DataParallel.FSDP if stepper.is_divided else stepper.data_parallel,
            partial(_report_timings, hooks),
        )
        self.account = TimeAccount(core.train.note_time_spent if self._is_chief else None)
        self.throughput = StepThroughput()

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report training metrics, and the rates since the last report.

        Args:
            position: The position of training.
            metrics: The means over all ranks.
        """
        self._hooks.report(position, metrics)
        self.account.report(position.batches, self.throughput.all_data_wait_s)
        rates = self.throughput.take(position)
        if self.timeline.window.enabled:
            compared = self.timeline.compare()
            rates |= compared if self._is_chief else {}
        if rates and (self._is_chief or self.timeline.window.enabled):
            self._hooks.report_timings(position.batches, rates | compile_counts())


def _report_timings(hooks: LoopHooks, batches: int, timings: dict[str, float]) -> None:
    """Report through a possibly weak reference; a bound method would be strong."""
    hooks.report_timings(batches, timings)


class _OriginFound(Exception):
    """Internal signal to end the rerun of a batch."""


def check_losses(
    means: WeightedMeans,
    reduced: Mapping[str, float] | None,
    distributed: DistributedContext,
    hooks: LoopHooks,
    data: ShardedData,
    stepper: Stepper,
    position: Position,
) -> None:
    """Check the training losses since the last check for non-finite values; collective.

    Args:
        means: The training metrics.
        reduced: Their reduced values, if they were reduced just now.
        distributed: Where the ranks meet.
        hooks: The trainer on a shard.
        data: The data of training.
        stepper: The models.
        position: The present position.

    Raises:
        NonFiniteError: One was not, in a step that no gradient scaler has left out, or ten in a row
            were not; the message names the rank, the batch, and the layer if that can be found.
    """
    try:
        means.check_finite(reduced)
    except NonFiniteError as error:
        origin = None
        if error.rank == distributed.rank:
            origin = describe_origin(hooks, data, stepper, position, error.batch)
        # Origin is shared, so that every rank raises the same message.
        origin = distributed.allgather(origin)[error.rank]
        text = (
            f"{error} {origin} Hint: go on from the last checkpoint with a smaller learning rate or"
            " gradient clipping; stop_on_nan=False trains on."
        )
        raise NonFiniteError(text, rank=error.rank, batch=error.batch) from None


def describe_origin(
    hooks: LoopHooks, data: ShardedData, stepper: Stepper, position: Position, batch: int
) -> str:
    """Return in a sentence where a loss of this rank stopped being finite.

    The batch is run once more, as far as to its backward pass.

    Args:
        hooks: The trainer on a shard.
        data: The data of training.
        stepper: The models.
        position: The present position.
        batch: The global batch, which lies before it.
    """
    if stepper.is_divided:
        return "Its layer is not looked for, as ranks divide the model."
    try:
        shards = _shards_again(data, position, batch)
        if shards is None:
            return "The batch is not known any more, so its layer is not either."
        with isolated_randomness(batch), _finite_weights(stepper.models) as are_new:
            weights = " with new weights in place of those that are not finite now" * are_new
            for shard in shards:
                moved = hooks.to_device(shard)
                if not _is_finite(moved):
                    return "Samples of this batch are not finite themselves."
                if layer := _first_layer(hooks, moved, position, stepper.models):
                    return f"Run again{weights}, the first layer to return such values is {layer}."
    except Exception as error:
        # A failed search for the layer must not hide the error that it explains.
        return f"Its layer is not known, as the batch cannot be run again ({error!r})."
    return (
        f"Run again{weights}, all layers return finite values: the loss makes others of them,"
        " or weights had grown too large before."
    )


def _first_layer(
    hooks: LoopHooks, data: Any, position: Position, models: list[torch.nn.Module]
) -> str | None:
    try:
        with _stopping_at_origin(models):
            hooks.train_shard(data, position)
    except _OriginFound as found:
        return str(found) or None
    return None


@contextmanager
def _finite_weights(models: list[torch.nn.Module]) -> Iterator[bool]:
    """Give layers new weights for the block if theirs are not finite; return whether some are.

    By now, the steps since the batch have made most of them so.
    """
    broken = [
        module
        for model in models
        for module in plain_model(model).modules()
        if hasattr(module, "reset_parameters")
        and not all(map(_is_finite, module.parameters(recurse=False)))
    ]
    # Buffers too, as drawing new weights may reset them.
    tensors = [t for m in broken for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    before = [tensor.detach().clone() for tensor in tensors]
    for module in broken:
        draw: Any = module.reset_parameters
        draw()
    try:
        yield bool(broken)
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)


def _shards_again(data: ShardedData, position: Position, batch: int) -> Iterator[Any] | None:
    """Return this rank's shards of an earlier batch, or None if its place is unknown."""
    epoch, index = position.epochs, position.batch_in_epoch - (position.batches - batch)
    order = data.order(epoch)
    while index < 0 and epoch and order is not None:
        epoch, order = epoch - 1, data.order(epoch - 1)
        index += 0 if order is None else order.num_batches
    if order is None or index < 0:
        return None
    return islice(data.iterate(epoch, index), len(order.sizes(index, data.own_shards)))


@contextmanager
def _stopping_at_origin(models: list[torch.nn.Module]) -> Iterator[None]:
    """Stop at the first layer with a non-finite output, or at the backward pass."""

    def stop(*_: Any, **__: Any) -> None:
        raise _OriginFound

    named = [
        (f"model_{index}.{name}" if name else f"model_{index}", module)
        for index, model in enumerate(models)
        for name, module in plain_model(model).named_modules()
    ]
    hooks = [module.register_forward_hook(_looking_at(name)) for name, module in named]
    autograd: Any = torch.autograd
    backward, grad = autograd.backward, autograd.grad
    # Backward passes are replaced: the rerun must not change gradients or step optimizers.
    autograd.backward = autograd.grad = stop
    try:
        yield
    finally:
        autograd.backward, autograd.grad = backward, grad
        for hook in hooks:
            hook.remove()


def _looking_at(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if _is_finite(output):
            return
        raise _OriginFound(f"{name!r} ({type(module).__name__})")

    return look


def _is_finite(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    )


class TrainingCallbacks:
    """Dispatcher of training events to the callbacks, in order.

    Args:
        callbacks: The callbacks by name; empty without any.
        base: The class whose methods are the hooks.

    Raises:
        TypeError: A hook cannot be called with the arguments that it gets; the message names it.
    """

    def __init__(self, callbacks: Mapping[str, Any], base: type) -> None:
        self._callbacks = callbacks
        self._base: Any = base
        for name, callback in callbacks.items():
            _check_hooks(name, callback, base)
        self._started: list[Any] = []

    @property
    def has_started(self) -> bool:
        """Whether `start` was called since the last `stop`; False without callbacks."""
        return bool(self._started)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each callback."""
        for callback in self._callbacks.values():
            getattr(callback, hook)(*arguments)

    def overrides(self, hook: str) -> bool:
        """Tell whether some callback overrides a hook."""
        default = getattr(self._base, hook)
        return any(getattr(type(each), hook) is not default for each in self._callbacks.values())

    def start(self, num_batches: int, checkpoint: str | None) -> None:
        """Call the startup hooks; a callback with a failing hook is also shut down.

        Args:
            num_batches: How many batches are trained already.
            checkpoint: The checkpoint to resume from.
        """
        for callback in self._callbacks.values():
            # Recorded before its hook: a callback that fails in startup is shut down as well.
            self._started.append(callback)
            callback.on_trial_startup(num_batches, checkpoint)

    def stop(self) -> ExitStack:
        """Return an exit stack to run the shutdown hooks of all started callbacks."""
        stack = ExitStack()
        for callback in self._started:
            stack.callback(callback.on_trial_shutdown)
        self._started = []
        return stack

    def state(self) -> dict[str, Any]:
        """Return the states of all callbacks."""
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def load_state(self, states: Mapping[str, dict[str, Any]], warn: Callable[[str], None]) -> None:
        """Restore the callbacks' states; report unknown or missing states to `warn`."""
        for name, callback in self._callbacks.items():
            if name in states:
                callback.load_state_dict(states[name])
            elif type(callback).load_state_dict is not self._base.load_state_dict:
                warn(f"The checkpoint has no state of the callback {name!r}: it begins anew.")
        for name in states.keys() - self._callbacks.keys():
            if states[name]:
                warn(f"The checkpoint has a state of {name!r}, which is no callback now.")


def _check_hooks(name: str, callback: Any, base: type) -> None:
    for hook, default in vars(base).items():
        own = getattr(type(callback), hook, None)
        if hook.startswith("_") or not inspect.isfunction(default) or not inspect.isfunction(own):
            continue
        wanted = [each for each in inspect.signature(default).parameters if each != "self"]
        # Bound, not compared: other names, defaults and `*args` fit as well.
        try:
            inspect.signature(getattr(callback, hook)).bind(*wanted)
        except TypeError as error:
            raise TypeError(
                f"`{hook}` of the callback {name!r} must take ({', '.join(wanted)}), but {error}."
                f" Hint: def {hook}({', '.join(['self', *wanted])})."
            ) from error
