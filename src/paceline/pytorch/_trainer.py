"""The trainer: runs a trial on the engine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.core import Context
from paceline.engine import (
    Batch,
    CheckpointSaver,
    Epoch,
    Position,
    Record,
    Schedule,
    ShardedData,
    StopReason,
    TrainingLoop,
    TrainUnit,
    checked_unit,
    mix_seed,
    seed_everything,
    shards_of_worker,
)
from paceline.pytorch import _state
from paceline.pytorch._callbacks import PyTorchCallback
from paceline.pytorch._context import PyTorchTrialContext
from paceline.pytorch._result import Result
from paceline.pytorch._trial import PyTorchTrial
from paceline.pytorch._validation import Validator

logger = logging.getLogger(__name__)

_POLICIES = ("best", "all", "none")
_UNITS: dict[str, type[TrainUnit]] = {"batches": Batch, "epochs": Epoch, "records": Record}


class Trainer:
    """Train a `PyTorchTrial`.

    Args:
        trial: The trial.
        context: The context that the trial was made with.

    Raises:
        TypeError: `trial` is no `PyTorchTrial`.
        ValueError: No model or optimizer is wrapped, or not exactly one evaluate method is
            overridden.
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        if not isinstance(trial, PyTorchTrial):
            raise TypeError(f"`trial` must be a PyTorchTrial, but got {type(trial).__name__}.")
        for kind, wrapped in (("model", context.models), ("optimizer", context.optimizers)):
            if not wrapped:
                raise ValueError(
                    f"A trial must wrap at least one {kind}. Hint: self.{kind} ="
                    f" context.wrap_{kind}(...) in its `__init__`."
                )
        self._trial = trial
        self._context = context
        self._validator = Validator(trial, context)

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        average_aggregated_gradients: bool = True,
        aggregation_frequency: int = 1,
        checkpoint_policy: str = "best",
        test_mode: bool = False,
        *,
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        metric: str | None = None,
        smaller_is_better: bool = True,
    ) -> Result:
        """Train to a length; periods count from the start of training.

        One validation and one checkpoint follow at the end, unless that step has them already.

        Args:
            checkpoint_period: When to store a checkpoint; never by default.
            validation_period: When to validate; never by default.
            max_length: How long to train in all; the searcher's length wins on a cluster.
            reporting_period: When to report training metrics; `Batch(100)` by default.
            average_aggregated_gradients: Whether a window's gradient is the mean, not the sum.
            aggregation_frequency: Global batches per optimizer step.
            checkpoint_policy: Which validations ask for a checkpoint: "best", "all" or "none".
            test_mode: Train one batch, validate one, store a checkpoint, and end.
            latest_checkpoint: UUID to begin from; what the run goes on from by default.
            step_zero_validation: Whether to validate before the first batch.
            metric: The metric of "best"; the searcher's on a cluster.
            smaller_is_better: Whether smaller values of `metric` are better.

        Raises:
            TypeError: A length or period is no train unit.
            ValueError: `max_length` is missing, or an argument is out of range.
        """
        if checkpoint_policy not in _POLICIES:
            raise ValueError(
                f"`checkpoint_policy` must be one of {', '.join(_POLICIES)}, but got"
                f" {checkpoint_policy!r}."
            )
        if not isinstance(aggregation_frequency, int) or aggregation_frequency < 1:
            raise ValueError(
                "`aggregation_frequency` must be an integer of at least 1, but got"
                f" {aggregation_frequency!r}."
            )
        length = self._length(checked_unit("max_length", max_length))
        if test_mode:
            length = Batch(1)
        self._context.accumulation.frequency = aggregation_frequency
        self._context.accumulation.average = average_aggregated_gradients
        searcher = _searcher_of(self._context.core)
        judge = Judge(
            checkpoint_policy,
            searcher.get("metric", metric),
            bool(searcher.get("smaller_is_better", smaller_is_better)),
        )
        schedule = Schedule(
            max_length=length,
            reporting=checked_unit("reporting_period", reporting_period) or Batch(100),
            validation=checked_unit("validation_period", validation_period),
            checkpoint=checked_unit("checkpoint_period", checkpoint_period),
        )
        training = _Training(self._trial, self._context, self._validator, judge, test_mode)
        return training.run(
            schedule,
            latest_checkpoint or self._context.core.latest_checkpoint,
            step_zero_validation=step_zero_validation,
        )

    def _length(self, given: TrainUnit | None) -> TrainUnit:
        searcher = _searcher_of(self._context.core)
        searched = _searched_length(searcher)
        if searched is not None:
            if given is not None and given != searched:
                logger.info("The searcher's length %r is used instead of %r.", searched, given)
            return searched
        if given is None:
            raise ValueError(
                "`max_length` must be given without a searcher's length. Hint:"
                " fit(max_length=pytorch.Epoch(1))."
            )
        given.length  # noqa: B018  # raises for a schedule
        return given


class Judge:
    """Decide which validations ask for a checkpoint."""

    def __init__(self, policy: str, metric: str | None, is_smaller_better: bool) -> None:
        self.policy = policy
        self.metric = metric
        self._is_smaller_better = is_smaller_better
        self.best: float | None = None
        self.best_metrics: dict[str, Any] | None = None

    def wants_checkpoint(self, metrics: Mapping[str, Any]) -> bool:
        """Take a validation's metrics in and tell whether they deserve a checkpoint.

        Raises:
            ValueError: The policy is "best" and the metric was not returned.
        """
        is_best = self.metric is not None and self._is_new_best(metrics)
        if self.policy == "best" and self.metric is not None:
            return is_best
        return self.policy != "none"

    def _is_new_best(self, metrics: Mapping[str, Any]) -> bool:
        assert self.metric is not None
        if self.metric not in metrics:
            if self.policy != "best":
                return False
            raise ValueError(
                f"The policy 'best' needs the metric {self.metric!r}, but the validation returned"
                f" {sorted(metrics)}."
            )
        value = float(metrics[self.metric])
        if value != value:
            return False
        is_better = self.best is None or (
            value < self.best if self._is_smaller_better else value > self.best
        )
        if is_better:
            self.best, self.best_metrics = value, dict(metrics)
        return is_better


class _Training:
    """One call of `fit`: the engine's door for a trial."""

    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        validator: Validator,
        judge: Judge,
        test_mode: bool,
    ) -> None:
        self._trial = trial
        self._context = context
        self._core = context.core
        self._validator = validator
        self._judge = judge
        self._test_mode = test_mode
        self._callbacks = trial.build_callbacks()
        self._saver = CheckpointSaver(self._core, self._checkpoint_stored)
        self._stored: list[str] = []
        self._metrics: dict[str, Any] = {}
        self._batch_metrics: list[dict[str, Any]] = []
        self._keeps_batches = any(
            type(callback).on_training_workload_end is not PyTorchCallback.on_training_workload_end
            for callback in self._callbacks.values()
        )
        self._num_shards = self._core.distributed.size
        self._loop: TrainingLoop

    def run(
        self, schedule: Schedule, checkpoint: str | None, *, step_zero_validation: bool
    ) -> Result:
        """Train, and run the shutdown hooks whatever happens."""
        self._core.preempt.watch_signals()
        parts = self._read(checkpoint)
        position = Position() if parts is None else _state.position_of(parts)
        entered: list[PyTorchCallback] = []
        try:
            for callback in self._callbacks.values():
                entered.append(callback)
                callback.on_trial_startup(position.batches, checkpoint)
            self._build(parts, position)
            for callback in self._callbacks.values():
                callback.on_training_start()
            if step_zero_validation and position.batches == 0:
                self._loop.validate()
            reason = self._train(schedule)
        finally:
            for callback in reversed(entered):
                callback.on_trial_shutdown()
        return Result(
            metrics=self._metrics,
            best_metrics=self._judge.best_metrics,
            checkpoints=self._stored,
            stop_reason=StopReason.TEST.value if self._test_mode else reason.value,
            steps_completed=self._loop.position.batches,
            run_dir=self._core.run_dir,
        )

    def _train(self, schedule: Schedule) -> StopReason:
        loop = self._loop
        self._set_training_mode()
        reason = loop.run(schedule)
        if reason is not StopReason.PREEMPTED:
            # A preempted training keeps its open sums in the checkpoint and reports when it would
            # have without the interruption.
            loop.report()
        if reason in (StopReason.LENGTH, StopReason.DATA):
            loop.validate()
        loop.save()
        self._saver.finish()
        if reason is StopReason.PREEMPTED:
            self._core.preempt.settle()
        return reason

    # ---- building and restoring ----------------------------------------------------------

    def _read(self, checkpoint: str | None) -> dict[str, Any] | None:
        if checkpoint is None:
            return None
        with self._core.checkpoint.restore_path(checkpoint) as path:
            parts = _state.read_state(Path(path), self._core.distributed.rank)
        self._num_shards = parts["training"]["num_shards"]
        return parts

    def _build(self, parts: dict[str, Any] | None, position: Position) -> None:
        context, distributed = self._context, self._core.distributed
        own = shards_of_worker(self._num_shards, distributed.rank, distributed.size)
        seed = context.get_trial_seed() if parts is None else parts["training"]["seed"]
        self._seed = seed
        data = ShardedData(
            self._trial.build_training_data_loader(),
            num_shards=self._num_shards,
            own_shards=own,
            seed=seed,
        )
        self._validation_loader = self._trial.build_validation_data_loader()
        self._validation_data = None
        if self._validator.is_by_batch:
            self._validation_data = ShardedData(
                self._validation_loader,
                num_shards=self._num_shards,
                own_shards=own,
                seed=mix_seed(seed, 1),
            )
        self._loop = TrainingLoop(self._core, self, data, context.accumulation, position)
        if parts is None:
            if distributed.rank:
                # Models are alike by now; from here on ranks draw numbers of their own.
                seed_everything(seed, distributed.rank)
            return
        for callback in self._callbacks.values():
            callback.on_checkpoint_load_start(parts)
        _state.restore_shared(parts, context, self._callbacks)
        training = parts["training"]
        context.accumulation.num_steps = training["num_optimizer_steps"]
        self._loop.last_validation = training["last_validation"]
        self._judge.best = training["best"]
        if position.batch_in_epoch:
            self._loop.open_epoch()
        _state.restore_rank(
            parts, context, self._loop, is_same_size=training["world_size"] == distributed.size
        )

    # ---- the door ------------------------------------------------------------------------

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on one shard and return its metrics."""
        context = self._context
        context.current_batch, context.current_epoch = position.batches, position.epochs
        returned = self._trial.train_batch(
            context.to_device(data), position.epochs, position.batches
        )
        metrics: Mapping[str, Any] = (
            {"loss": returned} if isinstance(returned, torch.Tensor) else returned
        )
        if not isinstance(metrics, Mapping):
            raise TypeError(
                "`train_batch` must return a dictionary of metrics or a tensor, but returned a"
                f" {type(metrics).__name__}."
            )
        if self._keeps_batches:
            self._batch_metrics.append(
                {k: v.detach() if hasattr(v, "detach") else v for k, v in metrics.items()}
            )
        return metrics

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""
        return self._trial.get_batch_length(data)

    def step_without_data(self) -> None:
        """Take part in the other ranks' optimizer steps."""
        self._context.step_without_data()

    def after_batch(self, position: Position, is_epoch_end: bool) -> None:
        """Step the schedulers."""
        has_stepped = self._context.finish_batch()
        for entry in self._context.lr_schedulers:
            entry.after_batch(
                position,
                has_stepped=has_stepped,
                num_steps=self._context.accumulation.num_steps,
                is_epoch_end=is_epoch_end,
            )

    def epoch_started(self, epoch: int) -> None:
        """Tell the callbacks."""
        for callback in self._callbacks.values():
            callback.on_training_epoch_start(epoch)

    def epoch_ended(self, epoch: int) -> None:
        """Tell the callbacks."""
        for callback in self._callbacks.values():
            callback.on_training_epoch_end(epoch)

    def report(self, position: Position, metrics: dict[str, float]) -> None:
        """Report training metrics and progress."""
        reported: dict[str, Any] = {
            **metrics,
            **self._context.reducers.reduce(self._core.distributed, for_training=True),
        }
        self._context.reducers.reset()
        _add_counts(reported, position)
        if self._core.distributed.rank == 0:
            self._core.train.report_training_metrics(position.batches, reported)
        if not self._metrics:
            self._metrics = reported
        batches, self._batch_metrics = self._batch_metrics, []
        for callback in self._callbacks.values():
            callback.on_training_workload_end(reported, batches)

    def validate(self, position: Position) -> bool:
        """Validate, report, and judge."""
        context = self._context
        callbacks = self._callbacks.values()
        context.reducers.reset()
        for model in context.models:
            model.eval()
        for callback in callbacks:
            callback.on_validation_start()
            if self._validator.is_by_batch:
                callback.on_validation_epoch_start()
        limit = 1 if self._test_mode else None
        outcome = self._validator.run(self._validation_data, self._validation_loader, limit)
        if self._validator.is_by_batch:
            for callback in callbacks:
                callback.on_validation_epoch_end(outcome.outputs)
        metrics = outcome.metrics
        for callback in callbacks:
            callback.on_validation_end(metrics)
        context.reducers.reset()
        self._set_training_mode()
        _add_counts(metrics, position)
        if self._core.distributed.rank == 0:
            self._core.train.report_validation_metrics(position.batches, metrics)
        self._metrics = metrics
        return self._judge.wants_checkpoint(metrics)

    def save(self, position: Position) -> None:
        """Store a checkpoint in the background."""
        context, distributed = self._context, self._core.distributed
        own = _state.rank_state(context, self._loop)
        by_rank = distributed.gather(own) if distributed.size > 1 else [own]
        if distributed.rank != 0:
            return
        facts = {
            "seed": self._seed,
            "num_shards": self._num_shards,
            "world_size": distributed.size,
            "best": self._judge.best,
            "torch": torch.__version__,
        }
        parts = _state.shared_state(context, self._loop, self._callbacks, facts)
        assert by_rank is not None
        parts |= {f"rank_{rank}": state for rank, state in enumerate(by_rank)}
        for callback in self._callbacks.values():
            callback.on_checkpoint_save_start(parts)
        self._saver.save(parts, {"steps_completed": position.batches}, self._checkpoint_written)

    def at_edge(self) -> None:
        """Raise the error of a checkpoint that could not be stored."""
        self._saver.check()

    @property
    def is_stop_requested(self) -> bool:
        """Whether this rank's trial or callbacks asked for a stop."""
        return self._context.get_stop_requested()

    # ---- small parts ---------------------------------------------------------------------

    def _set_training_mode(self) -> None:
        for model in self._context.models:
            model.train()

    def _checkpoint_written(self, path: Path) -> None:
        for callback in self._callbacks.values():
            callback.on_checkpoint_end(str(path))
            callback.on_checkpoint_write_end(str(path))

    def _checkpoint_stored(self, uuid: str) -> None:
        self._stored.append(uuid)
        for callback in self._callbacks.values():
            callback.on_checkpoint_upload_end(uuid)


def _add_counts(metrics: dict[str, Any], position: Position) -> None:
    metrics.setdefault("batches", position.batches)
    metrics.setdefault("epochs", position.epochs)


def _searcher_of(core: Context) -> Mapping[str, Any]:
    if core.info is None:
        return {}
    searcher: Mapping[str, Any] = core.info.trial.config.get("searcher") or {}
    return searcher


def _searched_length(searcher: Mapping[str, Any]) -> TrainUnit | None:
    length = searcher.get("max_length")
    if isinstance(length, Mapping):
        [(unit, count)] = length.items()
        return _UNITS[unit](count)
    if isinstance(length, int):
        return Batch(length)
    if searcher.get("time_metric") in _UNITS:
        return _UNITS[searcher["time_metric"]](searcher["max_time"])
    return None
