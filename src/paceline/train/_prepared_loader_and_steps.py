"""Data loader as iterated over by a rank of a user's own loop.

Also: steps (torch).
"""

import gc
import logging
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline._training.engine.checkpoints.resume_differences import check_identity
from paceline._training.engine.own_loop_gradients import GradientSync
from paceline._training.engine.precision import Precision
from paceline._training.engine.steps_by_user_code import calling_method
from paceline._training.workers.processes.rank_environment import RankInfo
from paceline.data._order_and_random_generators import worker_shards
from paceline.data._sharded_loader import ShardedData, num_samples_of, worker_batches
from paceline.data._torch_loaders import to_device

logger = logging.getLogger(__name__)


class PreparedLoader:
    """Wrapper of a data loader yielding this worker's part; other attributes are the loader's.

    The k-th iteration is epoch k of the data: with `shuffle=True` its order depends on the seed of
    the run and on k alone. A checkpoint holds the place, also within an epoch.

    Args:
        loader: The user's loader.
        make_data: Returns its samples in shards, in an order that depends on the seed given to it.
        seed: The seed, unless a checkpoint has another one.
        own_loop: The loop that iterates over it.
        is_moved: Whether batches are moved to the worker's device.
    """

    def __init__(
        self,
        loader: Any,
        make_data: Callable[[int], ShardedData],
        seed: int,
        own_loop: "UserLoop",
        *,
        is_moved: bool,
    ) -> None:
        self._loader = loader
        self._make_data = make_data
        self._seed = seed
        self._data = make_data(seed)
        self._own_loop = own_loop
        self._is_moved = is_moved
        self._epoch = 0
        self._next_batch = 0
        self._was_open = False
        # Weak, so that leaving the loop ends the iteration.
        self._current: weakref.ref[Generator[Any, None, None]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same for all workers.

        Raises:
            TypeError: The data have no length.
        """
        order = self._data.order(self._epoch)
        if order is None:
            raise TypeError("A prepared loader of an iterable data set has no length.")
        return order.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or continue the epoch of a loaded checkpoint."""
        # Earlier iteration ends first: only a single iteration has a place that can be saved.
        self.end_iteration()
        iteration = self._run()
        # Weak, so that an iteration ends as soon as the function drops it.
        self._current = weakref.ref(iteration)
        return iteration

    @property
    def is_read_whole(self) -> bool:
        """Whether each worker reads all samples and keeps its own."""
        return self._data.is_read_whole

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration; needed only to leave the natural order."""
        if epoch != self._epoch:
            self._epoch, self._next_batch, self._was_open = epoch, 0, False

    def end_iteration(self) -> None:
        """End the current iteration, if any, like leaving its loop.

        It is for loops that count batches in place of waiting for the end of the data.
        """
        running = self._current() if self._current is not None else None
        if running is not None:
            running.close()

    # ---- checkpoints ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the place in the data, counting the last batch handed out as done."""
        return {
            "epoch": self._epoch,
            "batch": self._next_batch,
            "is_open": self._next_batch > 0,
            "seed": self._seed,
            "facts": self._facts(),
            "stream": self._data.stream_state(),
            "data": self._data.identity,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a state returned by `state`.

        Raises:
            CheckpointMismatchError: The checkpoint lies within an epoch of other data.
        """
        if state["seed"] != self._seed:
            self._seed, self._data = state["seed"], self._make_data(state["seed"])
        check_identity(
            state["data"], self._data.identity, is_within_epoch=state["is_open"], warn=self._warn
        )
        if state["facts"] != self._facts():
            self._warn(
                f"A loader goes on from a checkpoint in which it had {state['facts']}, and now has"
                f" {self._facts()}: its epoch begins anew."
            )
            self._epoch = state["epoch"]
            return
        self._epoch, self._next_batch = state["epoch"], state["batch"]
        self._was_open = state["is_open"]
        self._data.load_stream_state(state["stream"])

    def _warn(self, text: str) -> None:
        if self._own_loop.rank_info.rank == 0:
            logger.warning("%s", text)

    def _facts(self) -> dict[str, Any]:
        num_samples = None if self._data.is_iterable else len(self._loader.dataset)
        return {
            "samples": num_samples,
            "batch_size": self._loader.batch_size,
            "shards": self._data.num_shards,
        }

    # ---- one epoch -----------------------------------------------------------------------

    def _run(self) -> Generator[Any, None, None]:
        # Start of the data only at the first batch: some libraries begin iterations as a mere test,
        # and a test must draw no random numbers.
        start = self._next_batch
        batches = self._own_loop.open_data(
            lambda: worker_batches(self._data, self._epoch, start), was_open=self._was_open
        )
        self._was_open = False
        own_loop, order = self._own_loop, self._data.order(self._epoch)
        last = -1 if order is None else order.num_batches - 1
        num_backwards, is_uneven = own_loop.num_backwards, False
        try:
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                wait_s = time.perf_counter() - began
                if batch.num_own * own_loop.rank_info.world_size != batch.num_all:
                    is_uneven = is_uneven or own_loop.is_to_train()
                is_first = self._next_batch == start
                is_asked = not batch.num_own or own_loop.gradients.has_sharded
                if is_asked and not own_loop.is_training(num_backwards, is_first=is_first):
                    own_loop.gradients.gather_models(batch.num_shards, own_loop.num_shards)
                    if not batch.num_own:
                        # The others have samples left, but do nothing that needs all ranks. They
                        # may yet ask whether this rank has more of a stream.
                        continue
                data = batch.data
                if self._is_moved:
                    data = to_device(data, own_loop.device, own_loop.warned_types)
                is_last = self._next_batch == last
                # Counted before the yield: a checkpoint in the loop body counts this batch as done.
                self._next_batch += 1
                own_loop.begin_batch(batch.num_own, batch.num_all, is_last=is_last, wait_s=wait_s)
                began = time.perf_counter()
                yield data
                own_loop.end_batch(time.perf_counter() - began)
        finally:
            self._epoch += 1
            self._next_batch = 0
            self._current = None
            own_loop.end_data()
            if is_uneven and own_loop.num_backwards == num_backwards:
                own_loop.gradients.has_collected = True


class PreparedSteps:
    """Optimizer steps of a loop with prepared optimizers, with accumulation and loss scaling.

    Args:
        gradients: The reduction of gradients over the ranks.
        device: Where the models are.

    Attributes:
        precision: The number format of the forward pass.
        is_used: Whether a prepared optimizer was asked to step.
        gradients: As given.
        scaler: The scaler of losses, if the precision needs one.
        has_scaled: Whether a loss was scaled since the last update of the scale.
        is_update_due: Whether an optimizer has stepped since then.
    """

    def __init__(self, gradients: GradientSync, device: torch.device) -> None:
        self.precision = Precision.FP32
        self.is_used = False
        self.gradients = gradients
        self._device = device
        self.scaler: torch.amp.GradScaler | None = None
        self.has_scaled = False
        self.is_update_due = False

    def use_precision(self, precision: Precision) -> None:
        """Set the number format, with a loss scaler if needed."""
        self.precision = precision
        self.scaler = precision.make_scaler(self._device)
        self.gradients.changes.is_scaled = self.scaler is not None

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace an optimizer's methods in place, so its steps wait for complete gradients."""
        self.gradients.watch_optimizer(optimizer)
        self.gradients.has_optimizer = True
        _PreparedOptimizer(self, optimizer).install()

    def backward(self, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Run the backward pass of a loss, scaled if the precision needs a scaler.

        Args:
            loss: The loss.
            options: Of `torch.Tensor.backward`.

        Raises:
            RuntimeError: The loss must be scaled, but no optimizer was prepared.
        """
        self.update_scale()
        if self.scaler is not None:
            if not self.gradients.has_optimizer:
                raise RuntimeError(
                    "With the precision fp16 the optimizer must be prepared, as losses are scaled."
                    " Hint: optimizer = train.prepare_optimizer(optimizer)."
                )
            self.has_scaled = True
            loss = self.scaler.scale(loss)
        with self.precision.outside_autocast(self._device):
            loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's

    def update_scale(self) -> None:
        """Adapt the loss scale after the last steps, once all optimizers have stepped.

        The next backward pass shows that they have.
        """
        if self.is_update_due:
            self.is_update_due = self.has_scaled = False
            assert self.scaler is not None
            self.scaler.update()

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scaler; None without a scaler."""
        self.update_scale()
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore the scaler from a state returned by `state`."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


class _PreparedOptimizer:
    """Replacement methods for an optimizer in a loop calling `step` after each batch."""

    def __init__(self, steps: PreparedSteps, optimizer: torch.optim.Optimizer) -> None:
        self._steps = steps
        self._optimizer = optimizer
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._add_param_group = optimizer.add_param_group
        self._is_stepping = False

    def install(self) -> None:
        """Put these methods in place of the optimizer's."""
        optimizer = self._optimizer
        for own in (self.step, self.zero_grad, self.add_param_group):
            setattr(optimizer, own.__name__, MethodType(_without_self(own), optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_stepping:
            # The scaler calls this in its turn.
            return self._step(*args, **kwargs)
        steps = self._steps
        steps.is_used = True
        self._look_for_changes()
        if not steps.gradients.is_boundary:
            return None
        steps.gradients.has_open_gradients = False
        if steps.scaler is None:
            return self._step(*args, **kwargs)
        if not steps.has_scaled:
            raise RuntimeError(
                "With the precision fp16 losses are scaled, but none was. Hint: call"
                " train.backward(loss) in place of loss.backward()."
            )
        steps.is_update_due = True
        self._is_stepping = True
        try:
            return steps.scaler.step(self._optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False

    def _look_for_changes(self) -> None:
        """Warn, once, if the gradients of the next step were changed before they are complete."""
        gradients = self._steps.gradients
        if gradients.changes.find(self._optimizer):
            is_open = gradients.frequency > 1
            logger.warning(
                "%s must not change gradients before they are complete, as %s. Clipping of a part"
                " of them gives other results. Hint: clip in a function that returns nothing,"
                " def clip(*_): ..., and call it with each step by"
                " optimizer.register_step_pre_hook(clip).",
                calling_method(),
                f"a step has {gradients.frequency} batches" if is_open else "fp16 scales losses",
            )

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._add_param_group(group)
        self._steps.gradients.watch(self._optimizer.param_groups[-1]["params"])

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        gradients = self._steps.gradients
        if gradients.frequency == 1 or not gradients.has_open_gradients:
            self._zero_grad(*args, **kwargs)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to make a method of, as schedulers wrap methods and bind them anew."""

    def call(_: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


T = TypeVar("T")

# Checkpoints hold integers below it.
_SEED_LIMIT = 2**63


class UserLoop:
    """Parts of a user's own training loop on a rank: data, gradients and steps.

    Args:
        rank_info: The rank.
        device: Where it computes.
        seed: The seed of the data order.

    Attributes:
        rank_info: As given.
        device: As given.
        gradients: The reduction of gradients of prepared models.
        steps: The steps of prepared optimizers.
        seed: As given.
        is_seed_given: Whether the user has asked for this seed.
        seeded_as: The seed of torch's generator before the user's code; another one is the user's.
        num_shards: The shards of a global batch.
        warned_types: Types of batches that could not be moved, as was said.
    """

    def __init__(self, rank_info: RankInfo, device: torch.device, seed: int) -> None:
        self.rank_info = rank_info
        self.device = device
        self.seed = seed
        self.is_seed_given = False
        self.seeded_as = torch.initial_seed()
        self.num_shards = rank_info.world_size
        self.gradients = GradientSync(rank_info.world_size, device)
        self.steps = PreparedSteps(self.gradients, device)
        self._has_begun = False
        self.warned_types: set[type] = set()

    @property
    def is_used(self) -> bool:
        """Whether a training has begun."""
        return self._has_begun or self.steps.is_used

    @property
    def num_busy_ranks(self) -> int:
        """How many ranks have shards of their own; the others stay idle."""
        return min(self.num_shards, self.rank_info.world_size)

    @property
    def num_backwards(self) -> int:
        """How many backward passes of prepared models have ended."""
        return self.gradients.num_backwards

    def prepare_loader(self, loader: Any, *, is_moved: bool = True) -> PreparedLoader:
        """Return this worker's part of a loader."""
        rank_info = self.rank_info

        def make_data(seed: int) -> ShardedData:
            return ShardedData(
                loader,
                num_shards=self.num_shards,
                own_shards=worker_shards(self.num_shards, rank_info.rank, rank_info.world_size),
                seed=seed,
                joins_shards=True,
                has_own_seed=not self.is_seed_given,
            )

        seed = self.agreed_seed(self._seed_of(loader), loader)
        return PreparedLoader(loader, make_data, seed, self, is_moved=is_moved)

    def agreed_seed(self, seed: int, loader: Any) -> int:
        """Return the seed of a loader as agreed on by all ranks."""
        return seed

    def _seed_of(self, loader: Any) -> int:
        """Return the seed given by the user, else the loader's or the process's generator seed.

        If nobody has seeded that, it is the seed of the run.
        """
        if self.is_seed_given:
            return self.seed
        generator = getattr(loader, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % _SEED_LIMIT
        seed = torch.initial_seed()
        return self.seed if seed == self.seeded_as else seed % _SEED_LIMIT

    # ---- called by loaders ---------------------------------------------------------------

    def open_data(self, make: Callable[[], T], *, was_open: bool) -> T:
        """Return a new iterator made by `make`, a function able to draw random numbers."""
        return make()

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool, wait_s: float) -> None:
        """Note the start of a batch."""
        self._has_begun = True
        self.gradients.begin_batch(num_own, num_all, is_last=is_last)

    def end_batch(self, seconds: float) -> None:
        """Note for how long the function has used a batch."""

    def end_data(self) -> None:
        """Note the end of an iteration."""
        self.gradients.end_data()

    def is_training(self, num_backwards_before: int, *, is_first: bool) -> bool:
        """Return whether the current loop takes part in the ranks' joint training work.

        Args:
            num_backwards_before: The backward passes before the loop.
            is_first: Whether the loop has had no batch yet.
        """
        gradients = self.gradients
        if (gradients.models or gradients.optimizers) and not is_first:
            return self.num_backwards > num_backwards_before
        return self.is_to_train(gradients.models or models_wrapped_by_the_user())

    def is_to_train(self, models: Sequence[torch.nn.Module] | None = None) -> bool:
        """Return whether gradients are enabled, and some model is in the mode for training.

        Args:
            models: The models; the prepared ones by default.
        """
        models = self.gradients.models if models is None else models
        # Of an optimizer alone the model is not known.
        is_training = (
            any(model.training for model in models) if models else self.gradients.optimizers
        )
        return torch.is_grad_enabled() and bool(is_training)


def models_wrapped_by_the_user() -> list[torch.nn.Module]:
    """Return models wrapped in DDP, FSDP or DeepSpeed by the user; rarely needed and slow."""
    kinds: tuple[type, ...] = (DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    if (deepspeed := sys.modules.get("deepspeed")) is not None:
        kinds += (deepspeed.DeepSpeedEngine,)
    # Subclass test of the type: isinstance() would trigger the loading of lazy objects.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def check_loader(loader: Any) -> None:
    """Refuse anything but a torch `DataLoader`.

    Raises:
        TypeError: `loader` is no torch `DataLoader`.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "`prepare_data_loader` must be given a torch.utils.data.DataLoader, but got"
            f" {type(loader).__name__}."
        )


def warn_of_whole_reads(loader: PreparedLoader, rank_info: "RankInfo") -> None:
    """Warn about a stream read whole by every worker because of its indivisible source."""
    if loader.is_read_whole and rank_info.world_size > 1 and rank_info.rank == 0:
        logger.warning(
            "This stream cannot be split before it is read: each of the %d workers reads all of it"
            " and keeps its own batches. A resume reads it again. Hint: use paceline.data.read()"
            " for files, or a stream with at least one shard for each worker (`num_shards` and"
            " `shard()`, as those of Hugging Face have).",
            rank_info.world_size,
        )


def check_enough_samples(loader: Any, num_workers: int) -> None:
    """Refuse a data set with fewer samples than workers.

    Raises:
        TypeError: The data set has no length, and is no stream.
        ValueError: There are fewer samples than workers.
    """
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return
    num_samples = num_samples_of(loader.dataset)
    if num_samples < num_workers:
        hint = "use fewer workers."
        if not num_samples:
            hint = "are the files empty, or did a filter keep none?"
        raise ValueError(
            f"The data set must have at least one sample for each of the {num_workers} workers,"
            f" but has {num_samples}. Hint: {hint}"
        )
