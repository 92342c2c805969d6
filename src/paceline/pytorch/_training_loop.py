"""The training loop: batches, and the reports, validations and checkpoints between them."""

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from paceline import faults
from paceline._training.engine.model_preparation import FollowingModels
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.profiling import MOVE, REDUCE, WAIT, WHOLE, TraceProfiler
from paceline._training.engine.schedules import Position, Schedule, StopReason
from paceline._training.engine.verify_steps import StepReplay
from paceline._training.engine.weighted_means import WeightedMeans
from paceline.core._attempt_journal import CHECKPOINT, TRAINING, VALIDATION
from paceline.core._core_context import Context
from paceline.data._order_and_random_generators import EpochOrder, worker_shards
from paceline.data._sharded_loader import ShardedData, worker_stream_batches
from paceline.data._sharded_streams import sum_over_ranks
from paceline.pytorch._loop_agreement import LoopHooks, LoopReports, RankAgreement, RankWish
from paceline.pytorch._memory_checkpoints import BoundaryStates
from paceline.pytorch._non_finite_losses import check_losses

faults.register("engine.batch", "engine.validation")


class TrainingLoop:
    """Train to a length; can be continued, by a longer length or from a restored position.

    Args:
        core: The core context.
        hooks: Methods for a batch and for boundaries; the caller of `run` keeps them alive.
        data: The training data.
        stepper: Shared with the code that scales losses and steps optimizers.
        position: Where to begin.
    """

    def __init__(
        self,
        core: Context,
        hooks: LoopHooks,
        data: ShardedData,
        stepper: Stepper,
        position: Position,
    ) -> None:
        self.data = data
        self.position = position
        self.means = WeightedMeans(core.distributed, "training")
        self.last_validation = -1
        self.last_checkpoint = position if position.batches else None
        self.tracer: TraceProfiler | None = None
        self.replay: StepReplay | None = None
        self.boundaries: BoundaryStates | None = None
        # Position of the batch being trained, or of the last trained batch.
        self.present: Position | None = None
        self._core = core
        # Weak, as the hooks hold the loop: with references both ways, models of a finished
        # training would keep their memory until Python looks for cycles, which device memory
        # does not make it do.
        self._loop_hooks: LoopHooks = weakref.proxy(hooks)
        self._stepper = stepper
        self._reports = LoopReports(core, self._loop_hooks, stepper)
        self.timeline, self._account = self._reports.timeline, self._reports.account
        self._accumulation = stepper.accumulation
        self._iterator: Iterator[Any] | None = None
        self._order: EpochOrder | None = None
        self._agreement = RankAgreement(core, stepper, self._loop_hooks)
        self._throughput = self._reports.throughput
        self._wait_before_s = 0.0
        size = core.distributed.size
        self._is_alone = size == 1
        self._num_epoch_batches = 0
        self._shards_of_last_rank = worker_shards(data.num_shards, size - 1, size)
        self._reach_fault = faults.reach if faults.is_active() else None

    def num_epoch_batches(self, epoch: int) -> int | None:
        """Return the number of global batches of an epoch, or None if unknown."""
        order = self.data.known_order(epoch)
        return None if order is None else order.num_batches

    def open_epoch(self) -> None:
        """Make the data iterator at the present position; may draw random numbers."""
        epoch, batch = self.position.epochs, self.position.batch_in_epoch
        self._order = self.data.order(epoch)
        if self._order is None:
            if self._stepper.is_divided:
                sized = self.data.iterate_sized_stream(epoch, batch)
                self._iterator = worker_stream_batches(sized, self.data.own_shards)
            else:
                self._iterator = self.data.iterate_stream(epoch, batch)
        else:
            self._num_epoch_batches = self._order.num_batches
            self._iterator = self.data.iterate(epoch, batch)

    def run(self, schedule: Schedule) -> StopReason:
        """Train until the length is reached or something asks to stop earlier."""
        with self._running(saves_continuously=schedule.saves_continuously):
            reason = self._run(schedule)
            self.timeline.flush()
        return reason

    @contextmanager
    def _running(self, *, saves_continuously: bool = False) -> Iterator[None]:
        """Notice calls of the user's code within the block, and count its time as training."""
        self._stepper.calls.begin(self.data.num_shards)
        num_batches = self.position.batches
        try:
            tracing = self.tracer.running(num_batches) if self.tracer else nullcontext()
            with self._account.spent_on(TRAINING, num_batches), tracing:
                self._stepper.timer = None
                self.timeline.begin()
                self._agreement.begin(saves_continuously=saves_continuously)
                self._throughput.start(self.position)
                yield
        except BaseException:
            # Iterator is ahead of the position after an error, and the checkpoint may be lost.
            self._iterator = self.last_checkpoint = self._agreement.compared_at = None
            raise
        finally:
            self._stepper.calls.end()
            self._stepper.is_stop_requested = False

    def _run(self, schedule: Schedule) -> StopReason:
        next_look = schedule.next_look(self.position)
        is_reached = schedule.is_reached(self.position)
        if not is_reached:
            self._agreement.compare_start(self.position, is_idle=not self.data.own_shards)
            if reason := self._agreement.agree_now().stop_reason:
                return reason
        while not is_reached:
            before = self.position
            if self._is_plain() and (next_look is None or before.batches + 1 < next_look):
                self._train_plain_batches(next_look)
            elif not self._train_batch():
                return StopReason.DATA
            after = self.position
            is_look_due = next_look is not None and after.batches >= next_look
            if is_look_due or after.epochs != before.epochs:
                self._serve_boundaries(schedule, before)
                next_look = schedule.next_look(after)
                is_reached = schedule.is_reached(after)
            self._note_boundary()
            reason = self._listen(is_at_end=is_reached)
            if reason is not None and not is_reached:
                return reason
        return StopReason.LENGTH

    # ---- batches between which nothing is due --------------------------------------------

    def _is_plain(self) -> bool:
        """Return whether the next batch is plain: 1 shard, 1 optimizer step, no epoch edge."""
        return (
            self._is_alone
            and self.data.num_shards == 1
            and self._accumulation.frequency == 1
            and not self.timeline.window.enabled
            and self.tracer is None
            and (self.replay is None or not self.replay.is_due(self.position.batches))
            and self._order is not None
            and self._iterator is not None
            and 0 < self.position.batch_in_epoch < self._num_epoch_batches - 1
        )

    def _train_plain_batches(self, next_look: int | None) -> None:
        """Train plain batches with the effect of `_train_batch`, at the least cost.

        It stops before the batch with which something is due and before the last one of the epoch,
        and when it is time to listen.
        """
        assert self._order is not None
        assert self._iterator is not None
        hooks, stepper, add = self._loop_hooks, self._stepper, self.means.add
        stepper.is_plain = not stepper.is_scaling_automatic
        stepper.calls.is_in_batch = True
        shards, shard_size = self._order.shards, self._order.shard_size
        iterator, position = self._iterator, self.position
        num_left = self._num_epoch_batches - 1 - position.batch_in_epoch
        if next_look is not None:
            num_left = min(num_left, next_look - 1 - position.batches)
        if self.replay is not None:
            num_left = min(num_left, self.replay.num_until_due(position.batches))
        self._accumulation.weight, self._accumulation.is_boundary = 1.0, True
        train, to_device = hooks.plain_training(), hooks.to_device
        # A named tuple's own constructor is a function in Python.
        clock, new_position, data_wait_s = time.perf_counter, tuple.__new__, 0.0
        now = clock()
        end = now + self._agreement.look_interval_s
        while num_left and now < end and not stepper.is_stop_requested:
            if self._reach_fault is not None:
                self._reach_fault("engine.batch")
            data = next(iterator)
            data_wait_s += clock() - now
            self.present = position
            batches, epochs, records, batch = position
            size = shard_size or len(shards[batch])
            metrics = train(to_device(data), epochs, batches)
            add(metrics if type(metrics) is dict else hooks.metrics_of(metrics), size, batches)
            position = new_position(Position, (batches + 1, epochs, records + size, batch + 1))
            self.position = position
            stepper.finish_batch()
            if hooks.has_schedulers:
                hooks.after_batch(position)
            num_left -= 1
            now = clock()
        stepper.calls.is_in_batch = False
        self._throughput.data_wait_s += data_wait_s

    def _train_batch(self) -> bool:
        """Train on a global batch; return False when the data are empty."""
        before, hooks, measured = self.position, self._loop_hooks, self._stepper.measured
        train: Callable[[Any, Position], Mapping[str, Any]] = hooks.train_shard
        if self.replay is not None and self.replay.is_due(before.batches):
            train = partial(self._train_twice, self.replay)
        for data, size in self.batch_shards():
            with measured(MOVE):
                data = hooks.to_device(data)
            with measured(WHOLE):
                metrics = train(data, before)
            self.means.add(metrics, size, before.batches)
        return self.position is not before

    def _train_twice(self, replay: StepReplay, data: Any, before: Position) -> Mapping[str, Any]:
        """Train on a shard as `train_shard` does, after a computation for comparison."""
        hooks = self._loop_hooks
        self._stepper.replay = replay
        try:
            return replay.run(
                lambda: hooks.train_shard(data, before), before.batches, hooks.keep_for_replay
            )
        finally:
            self._stepper.replay = None

    def batch_shards(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's shards of the next global batch with their sizes, then advance.

        Each is trained on before the next one is asked for. Without any data there is no batch.
        """
        if self._reach_fault is not None:
            self._reach_fault("engine.batch")
        self._stepper.is_plain = False
        self._wait_before_s = self._throughput.data_wait_s
        if self._iterator is None:
            self.open_epoch()
        position = self.position
        if position.batch_in_epoch == 0:
            self._loop_hooks.epoch_started(position.epochs)
        order = self._order
        if order is None:
            yield from self._stream_batch_shards()
            return
        assert self._iterator is not None
        batch = position.batch_in_epoch
        sizes = order.sizes(batch, self.data.own_shards)
        num_records = sum(sizes) if self._is_alone else order.num_records(batch)
        accumulation = self._accumulation
        if accumulation.frequency == 1:
            is_window_end, num_window = True, num_records
        else:
            is_window_end = accumulation.is_window_end(position.batches)
            num_window = accumulation.num_window_records(position, self.data.order)
        if self._stepper.is_divided:
            # Shards as one batch: all ranks call the model equally often, even without samples.
            sizes = [sum(sizes)]
        elif not self._is_alone:
            accumulation.is_even = bool(order.sizes(batch, self._shards_of_last_rank))
        yield from self._weighted(self._iterator, sizes, num_window, is_window_end)
        self._advance(num_records, is_epoch_end=batch + 1 == self._num_epoch_batches)

    def _weighted(
        self, shards: Iterator[Any], sizes: list[int], num_window: int, is_window_end: bool
    ) -> Iterator[tuple[Any, int]]:
        """Yield shards, each with its weight set for the duration of its backward pass."""
        accumulation, position = self._accumulation, self.position
        self.present = position
        self._stepper.calls.enter_batch()
        timer = None
        if self.timeline.window.enabled:
            timer = self._stepper.timer = self.timeline.timer_of(position.batches)
        has_others, stepper, following = bool(self._shards_of_last_rank), self._stepper, None
        if has_others and not accumulation.is_even:
            following = FollowingModels(stepper.models, stepper.optimizers)
        if is_window_end and not accumulation.is_even:
            stepper.idle_ranks.begin_batch(stepper, is_idle=not sizes, has_others=has_others)
        accumulation.is_idle, last = not sizes, len(sizes) - 1
        for index, size in enumerate(sizes):
            # Exactly 1 for all of the window, which then costs no multiplication.
            accumulation.weight = 1.0 if size == num_window else size / num_window
            accumulation.is_boundary = is_window_end and index == last
            if not self._is_alone:
                self._stepper.begin_shard()
            yield self._throughput.wait_for(shards), size
        if is_window_end and not accumulation.is_even:
            with self._stepper.measured(REDUCE):
                if sizes:
                    self._stepper.idle_ranks.announce_end()
                else:
                    self._stepper.step_without_data()
        if following is not None:
            following.share(is_idle=not sizes)
        self._stepper.calls.is_in_batch = False
        if timer is not None:
            timer.add(WAIT, self._throughput.data_wait_s - self._wait_before_s)
            self.timeline.note_batch(position.batches + 1, timer)

    def _stream_batch_shards(self) -> Iterator[tuple[Any, int]]:
        """Yield shards of data without a length; the epoch ends when every rank's data end.

        Only these data cost an exchange per batch. Over a window of several batches, each batch
        counts alike, as the number of samples to come is not known.
        """
        next_part = self._next_joined if self._stepper.is_divided else self._next_shards
        shards, sizes, num_records = next_part()
        if not num_records:
            if self.position.batch_in_epoch:
                self._end_epoch()
            return
        accumulation = self._accumulation
        is_window_end = accumulation.is_window_end(self.position.batches)
        num_window = num_records * (accumulation.frequency if accumulation.average else 1)
        yield from self._weighted(iter(shards), sizes, num_window, is_window_end)
        self._advance(num_records, is_epoch_end=False)

    def _next_shards(self) -> tuple[list[Any], list[int], int]:
        """Return this rank's shards of a stream, their sizes, and the global batch's size."""
        assert self._iterator is not None
        shards: list[Any] = self._throughput.wait_for(self._iterator, [])
        sizes = [self._loop_hooks.num_samples(shard) for shard in shards]
        num_records, num_ranks = sum(sizes), int(bool(sizes))
        world_size = self._core.distributed.size
        if world_size > 1:
            # Exact: float64 holds all counts up to 2**53.
            counts = torch.tensor([num_records, num_ranks], dtype=torch.float64)
            num_records, num_ranks = map(int, sum_over_ranks(counts).tolist())
        self._accumulation.is_even = num_ranks == world_size
        return shards, sizes, num_records

    def _next_joined(self) -> tuple[list[Any], list[int], int]:
        """Return a stream's next shards as `_next_shards` does, joined to a single shard."""
        assert self._iterator is not None
        batch = self._throughput.wait_for(self._iterator)
        return ([], [], 0) if batch is None else ([batch.data], [batch.num_own], batch.num_all)

    def _advance(self, num_records: int, *, is_epoch_end: bool) -> None:
        batches, epochs, records, batch_in_epoch = self.position
        self.position = Position(batches + 1, epochs, records + num_records, batch_in_epoch + 1)
        self._stepper.finish_batch()
        if self.tracer is not None:
            self.tracer.step(batches + 1)
        if self._loop_hooks.has_schedulers:
            self._loop_hooks.after_batch(self.position)
        if is_epoch_end:
            self._end_epoch()

    def _end_epoch(self) -> None:
        epoch = self.position.epochs
        self._loop_hooks.epoch_ended(epoch)
        self.position = self.position._replace(epochs=epoch + 1, batch_in_epoch=0)
        self._iterator = None

    # ---- between batches -----------------------------------------------------------------

    def _serve_boundaries(self, schedule: Schedule, before: Position) -> None:
        after = self.position
        if schedule.reporting is not None and schedule.reporting.is_due(before, after):
            self.report()
        wants_checkpoint = False
        if schedule.validation is not None and schedule.validation.is_due(before, after):
            wants_checkpoint = self.validate()
        if schedule.checkpoint is not None and schedule.checkpoint.is_due(before, after):
            wants_checkpoint = True
        if wants_checkpoint:
            self._note_boundary()
            self._loop_hooks.save()

    def _note_boundary(self) -> None:
        if self.boundaries is not None:
            self.boundaries.note(self.position.batches)

    def report(self) -> None:
        """Report the training metrics since the last report, if a batch was trained since then."""
        metrics = self.means.reduce()
        if metrics is not None:
            self._check_finite(metrics)
            self._reports.report(self.position, metrics)

    def validate(self) -> bool:
        """Validate unless already done at this step; return whether to store a checkpoint."""
        if self.last_validation == self.position.batches:
            return False
        with self._account.spent_on(VALIDATION, self.position.batches):
            wants_checkpoint = self._loop_hooks.validate(self.position)
        self.last_validation = self.position.batches
        self._agreement.is_decision_due = self._core.preempt.follows_search
        return wants_checkpoint

    @contextmanager
    def saving(self, *, in_memory: bool = False) -> Iterator[None]:
        """Check losses and ranks before a block that saves this position; account its time.

        Args:
            in_memory: Whether it is saved in memory only, so that it must still be stored.

        Raises:
            NonFiniteError: The loss was not finite and training is to stop then.
            RanksDifferError: Ranks differ where they must agree.
        """
        self._check_finite()
        self._agreement.compare_ranks(self.position, is_idle=not self.data.own_shards)
        began = time.perf_counter()
        with self.storing():
            yield
        if not in_memory:
            self.last_checkpoint = self.position
            self._agreement.note_saved(self.position)
        self._account.stored(self.position.batches, self._throughput.all_data_wait_s)
        if self.timeline.window.enabled:
            self.timeline.note_stall(self.position.batches, time.perf_counter() - began)

    def _check_finite(self, means: Mapping[str, float] | None = None) -> None:
        parts = self._loop_hooks, self.data, self._stepper
        check_losses(self.means, means, self._core.distributed, *parts, self.position)

    def storing(self) -> AbstractContextManager[None]:
        """Return a context to account its time as checkpoint time."""
        return self._account.spent_on(CHECKPOINT, self.position.batches)

    def end(self) -> None:
        """Record that training has ended, after all that belongs to it; all ranks call it."""
        self._agreement.compare_end(self.position, is_idle=not self.data.own_shards)
        self._account.end(self.position.batches, self._throughput.all_data_wait_s)

    def _listen(self, *, is_at_end: bool) -> StopReason | None:
        """Act on the ranks' agreement; return the reason to leave, or None.

        At the end, the checkpoint comes after the last report and validation.
        """
        wish = self._agreement.after_batch(self.position)
        if wish is RankWish.SAVE and not is_at_end:
            self._loop_hooks.save()
        elif wish.is_of_states and not is_at_end:
            self._loop_hooks.serve_memory(wish)
        return wish.stop_reason


class DrivenLoop(TrainingLoop):
    """Training loop with a generator of an epoch's batches, for a loop in user code.

    Attributes:
        is_left: Whether the user's loop has ended before the epoch; the batch that it had is done.
    """

    is_left = False

    def shards(self) -> Generator[Any, None, StopReason]:
        """Yield this rank's shards to the end of the epoch; each is trained on before the next.

        The work of `run` between two batches happens when the next shard is asked for.

        Returns:
            Why it ended; `StopReason.LENGTH` at the end of the epoch and where `is_left` is set.

        Raises:
            RuntimeError: The user's loop has left within a batch of several shards.
        """
        epoch, is_over = self.position.epochs, False
        self.is_left = False
        with self._running():
            self._agreement.compare_start(self.position, is_idle=not self.data.own_shards)
            reason = self._agreement.agree_now().stop_reason
            while reason is None and not is_over:
                before = self.position
                for data, _ in self.batch_shards():
                    self._check_not_left()
                    with self._stepper.autocast():
                        yield self._loop_hooks.to_device(data)
                if self.position is before:
                    return StopReason.DATA
                is_over = self.is_left or self.position.epochs != epoch
                reason = self._listen(is_at_end=is_over)
            self.timeline.flush()
        return StopReason.LENGTH if is_over or reason is None else reason

    def num_shards_left(self) -> int:
        """Return how many shards `shards` yields.

        Raises:
            TypeError: The data have no length.
        """
        order = self.data.order(self.position.epochs)
        if order is None:
            raise TypeError("Iterable data have no length.")
        batches = range(self.position.batch_in_epoch, order.num_batches)
        if self._stepper.is_divided:
            return len(batches)
        return sum(len(order.sizes(batch, self.data.own_shards)) for batch in batches)

    def _check_not_left(self) -> None:
        if self.is_left:
            raise RuntimeError(
                "A loop over the training data must train on whole batches, but it was left within"
                f" one of the {self.data.num_shards} shards that the ranks have together. Hint: go"
                " on with as many ranks as the training began with, or do not leave the loop."
            )

    def end_epoch(self) -> None:
        """Skip the rest of an epoch already begun."""
        if self.position.batch_in_epoch:
            self._end_epoch()
