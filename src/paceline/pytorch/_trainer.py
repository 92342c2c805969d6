"""Trainer of a trial: `fit`, its result, and actions between batches."""

import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline._base.arguments_and_errors import check_count, one_of
from paceline._base.imports import html_table, required_library
from paceline._base.run_directory import RunDirectory
from paceline._training.engine.checkpoints.checkpoint_saver import BestValidation
from paceline._training.engine.profiling import ProfilingWindow
from paceline._training.engine.schedules import Batch, Schedule, StopReason, TrainUnit, checked_unit
from paceline._training.engine.verify_steps import StepReplay
from paceline.core._read_runs import MetricsRow, read_metrics
from paceline.pytorch._fit_arguments import (
    FitDefaults,
    checked_budget,
    checked_period,
    checked_policy,
    checked_rules,
    first_argument,
    is_test_mode,
    searcher_of,
    training_length,
)
from paceline.pytorch._memory_checkpoints import checked_memory
from paceline.pytorch._training_checkpoints import CONTINUOUS, ContinuousPeriod
from paceline.pytorch._training_state import EarlierState, asked_state
from paceline.pytorch._trial_and_context import PyTorchTrial, PyTorchTrialContext
from paceline.pytorch._trial_training import TrialTraining, Validator
from paceline.storage._storage_from_url import checkpoint_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a training.

    Attributes:
        metrics: The last validation's metrics, or the last training report's without one.
        best_metrics: The metrics of the best validation, None without a metric to judge by.
        checkpoints: UUIDs of the checkpoints stored by this call that are kept, oldest first.
        stop_reason: Why training ended.
        steps_completed: Global batches trained since the start of training.
        run_dir: The run directory that holds the history.
        checkpoint_storage: The directory or URL that holds the checkpoints.
    """

    metrics: dict[str, Any]
    best_metrics: dict[str, Any] | None
    checkpoints: list[str]
    stop_reason: str
    steps_completed: int
    run_dir: Path
    checkpoint_storage: str = ""

    def _repr_html_(self) -> str:
        facts = [
            ("steps completed", self.steps_completed),
            ("run directory", self.run_dir),
            ("checkpoints", len(self.checkpoints)),
            *(("newest checkpoint", url) for url in self.checkpoint_urls[-1:]),
        ]
        best = self.best_metrics or {}
        rows = [(name, value, best.get(name, "")) for name, value in self.metrics.items()]
        return "\n".join(
            (
                html_table(f"Result: {self.stop_reason}", (), facts),
                html_table("Metrics", ("metric", "last", "best"), rows),
            )
        )

    @property
    def checkpoint_urls(self) -> list[str]:
        """The checkpoints as paths, or as URLs of an object store, as `Trainer.restore` takes."""
        return [f"{self.checkpoint_storage}/{uuid}" for uuid in self.checkpoints]

    def history(self, group: str = "validation") -> Iterator[MetricsRow]:
        """Yield a group's rows in reported order, read from disk, without superseded rows."""
        for row in read_metrics(RunDirectory(self.run_dir), group):
            if not row.is_superseded:
                yield row

    def to_pandas(self, group: str = "validation") -> Any:
        """Return the history as a pandas data frame, a row per step.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        pandas = required_library("pandas", "to_pandas", "pandas")
        rows: dict[int, dict[str, Any]] = {}
        for row in self.history(group):
            rows.setdefault(row.steps_completed, {}).update(row.metrics)
        frame = pandas.DataFrame.from_dict(rows, orient="index")
        frame.index.name = "steps_completed"
        return frame


def last_validation(run_dir: Path) -> dict[str, Any]:
    """Return the metrics of a run's last validation, possibly by an earlier process."""
    metrics: dict[str, Any] = {}
    for row in read_metrics(RunDirectory(run_dir), "validation"):
        metrics = metrics if row.is_superseded else row.metrics
    return metrics


# No Exception, so that no `except Exception` around a user's loop keeps training alive.
class Preempted(BaseException):
    """Raised by `train_for` when training was asked to leave; ends the block of `pytorch.init`.

    It is no `Exception`, so that code that handles errors does not catch it by accident.
    """


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
        self._context = context
        self._training = self._make_training(trial)
        self._profiling: ProfilingWindow | None = None

    def _make_training(self, trial: PyTorchTrial) -> TrialTraining:
        """Check the trial's wrapped parts, and return the training of the trial."""
        context = self._context
        for kind, wrapped in (("model", context.models), ("optimizer", context.optimizers)):
            if not wrapped:
                raise ValueError(
                    f"A trial must wrap at least one {kind}. Hint: self.{kind} ="
                    f" context.wrap_{kind}(...) in its `__init__`."
                )
        return TrialTraining(trial, context, Validator(trial, context))

    @property
    def steps_completed(self) -> int:
        """Global batches trained since the start of training, restored ones included."""
        self._open()
        return self._training.loop.position.batches

    def configure_profiler(
        self,
        sync_timings: bool = True,
        enabled: bool = False,
        begin_on_batch: int = 0,
        end_after_batch: int | None = None,
    ) -> None:
        """Time the parts of each batch in a window; a later call replaces an earlier window.

        Each batch adds a row to the metric group "profiling", on another rank than the chief to
        one such as "profiling_rank_2": `data_wait_s`, `to_device_s`, `train_batch_s` and, within
        it, `forward_s`, `backward_s`, `reduce_s` and `optimizer_step_s`, all in seconds. A
        checkpoint adds `checkpoint_stall_s`. With several ranks each report compares them and
        names the `slowest_rank`. `fit` also samples system metrics of each node, for its length.

        Args:
            sync_timings: Whether times on a GPU measure its work, as events in its stream
                mark them; without it they measure the launch of the work.
            enabled: Whether to time at all.
            begin_on_batch: The first batch, from 0.
            end_after_batch: The last batch, inclusive; None for all that follow.

        Raises:
            ValueError: The window is empty or begins before 0.
        """
        self._profiling = ProfilingWindow(
            sync_timings=sync_timings,
            enabled=enabled,
            begin_on_batch=begin_on_batch,
            end_after_batch=end_after_batch,
        )

    def fit(
        self,
        checkpoint_period: TrainUnit | ContinuousPeriod | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        average_aggregated_gradients: bool | None = None,
        aggregation_frequency: int | None = None,
        checkpoint_policy: str | None = None,
        test_mode: bool = False,
        *,
        latest_checkpoint: str | None = None,
        resume: str | os.PathLike[str] | None = None,
        step_zero_validation: bool | None = None,
        profiling_enabled: bool | None = None,
        metric: str | None = None,
        smaller_is_better: bool = True,
        keep_latest: int | None = None,
        keep_best: int | None = None,
        keep_age: float | str | None = None,
        keep_bytes: int | str | None = None,
        checkpoint_bytes_per_hour: int | str | None = None,
        memory_checkpoints: bool | float | None = None,
        stop_on_nan: bool = True,
        verify_steps: int | None = None,
        on_mismatch: str = "stop",
    ) -> Result:
        """Train to a length; periods count from the start of training.

        One validation and one checkpoint follow at the end, unless that step has them already.
        Arguments left out come from the experiment's config, if there is one. A second call
        continues where the first one ended.

        Args:
            checkpoint_period: When to store a checkpoint; never by default. "continuous" begins
                the next one when the last one is stored; without `keep_latest`, `keep_best` and
                `keep_age`, the two newest are kept, and the best one by `metric`.
            validation_period: When to validate; never by default.
            max_length: How long to train in all; the searcher's length wins on a cluster.
            reporting_period: When to report training metrics; `Batch(100)` by default.
            average_aggregated_gradients: Whether a window's gradient is the mean (the default),
                not the sum.
            aggregation_frequency: Global batches per optimizer step; 1 by default.
            checkpoint_policy: Which validations ask for a checkpoint: "best" (the default; all of
                them without a metric to judge by), "all" or "none".
            test_mode: Train one batch with an optimizer step, validate one, store a checkpoint,
                and end; `max_length` is not needed then.
            latest_checkpoint: UUID to begin from, or the path or URL of a checkpoint of another
                storage; by default the run's last checkpoint.
            resume: "auto" or the directory of an earlier run, or the URL of a checkpoint, to take
                the state from, if this run is a new one; `pytorch.init(resume=...)` continues in
                the earlier run itself.
            step_zero_validation: Whether to validate before the first batch.
            profiling_enabled: Whether to time every batch, see `configure_profiler`, and to sample
                system metrics, see `core.ProfilerContext`.
            metric: The metric to judge validations by; the searcher's on a cluster.
            smaller_is_better: Whether smaller values of `metric` are better.
            keep_latest: Keep so many of the newest checkpoints. One that neither this nor
                `keep_best` nor `keep_age` keeps is deleted; without these, all are kept. A master
                has its own rules.
            keep_best: Keep so many of the best checkpoints by `metric`.
            keep_age: Keep checkpoints that are younger: seconds, or text such as "7d" or "12h".
            keep_bytes: Keep at most so many bytes of checkpoints: an integer, or text such as
                "20GB". The oldest are deleted first, the ones of `keep_best` last, and the newest
                one never.
            checkpoint_bytes_per_hour: How many bytes of "continuous" checkpoints to store in an
                hour at most, as with `keep_bytes`; no limit by default.
            memory_checkpoints: Whether to copy the state to shared memory between checkpoints, for
                workers that are lost and started again: True for at most 2 % of the time, a number
                below 1 for another share of it, or seconds. See docs/checkpoints.md.
            stop_on_nan: Whether to stop when the training loss is NaN or infinite, as found when
                metrics are reported and before a checkpoint is stored. Losses are the metrics of
                `train_batch` with "loss" in their names, or all of them if none does. With a
                gradient scaler, which leaves such steps out, ten in a row count.
            verify_steps: Compute the first batch and each batch with a multiple of this number
                twice, from the same state, before its optimizer step, and compare gradients,
                buffers and random states of each rank bit by bit. See docs/exactness.md.
            on_mismatch: Whether to "stop" at a difference, or to "warn".

        Raises:
            TypeError: A length or period is no train unit.
            ValueError: `max_length` is missing, or an argument is out of range.
            RuntimeError: `verify_steps` is given, but `train_batch` cannot be called twice.
            NonFiniteError: The training loss was not finite and `stop_on_nan` is set.
            StepsDifferError: A batch computed twice gave two results.
        """
        defaults = self._defaults()
        policy = checked_policy(
            first_argument(checkpoint_policy, defaults.checkpoint_policy, "best")
        )
        frequency = first_argument(aggregation_frequency, defaults.aggregation_frequency, 1)
        check_count("aggregation_frequency", frequency)
        period = first_argument(checked_period(checkpoint_period), defaults.checkpoint_period)
        is_continuous = period == CONTINUOUS
        budget = checked_budget(
            checkpoint_bytes_per_hour, defaults.checkpoint_bytes_per_hour, period
        )
        every = checked_memory(first_argument(memory_checkpoints, defaults.memory_checkpoints))
        is_test = test_mode or is_test_mode()
        searcher = searcher_of(self._context.get_experiment_config())
        given_length = checked_unit("max_length", max_length)
        schedule = Schedule(
            max_length=Batch(1) if is_test else training_length(searcher, given_length),
            reporting=first_argument(
                checked_unit("reporting_period", reporting_period),
                defaults.reporting_period,
                Batch(100),
            ),
            validation=first_argument(
                checked_unit("validation_period", validation_period), defaults.validation_period
            ),
            checkpoint=None if is_continuous else period,
            saves_continuously=is_continuous,
        )
        best_validation = BestValidation(
            policy,
            searcher.get("metric", metric),
            bool(searcher.get("smaller_is_better", smaller_is_better)),
        )
        rules = checked_rules(
            keep_latest=keep_latest,
            keep_best=keep_best,
            keep_age=keep_age,
            keep_bytes=keep_bytes,
            metric=best_validation.metric,
            is_continuous=is_continuous,
        )
        accumulation = self._context.accumulation
        accumulation.frequency = 1 if is_test else frequency
        accumulation.average = first_argument(
            average_aggregated_gradients, defaults.average_aggregated_gradients, True
        )
        self._open(
            asked_state(
                self._context.core, latest_checkpoint, None if self._training.is_built else resume
            )
        )
        training = self._training
        best_validation.carry_on(training.best_validation)
        training.best_validation = best_validation
        training.checkpoints.keep(best_validation, rules)
        training.checkpoints.pace(budget)
        training.keep_in_memory(None if is_test else every)
        training.loop.means.stop_on_nan = stop_on_nan
        training.loop.timeline.window = self._window(defaults, profiling_enabled)
        training.loop.replay = self._replay(verify_steps, on_mismatch)
        if is_test:
            # A resumed training may be far along: test one batch more.
            position = training.loop.position
            schedule = Schedule(max_length=Batch(position.batches + 1), reporting=Batch(1))
        is_validated_first = first_argument(
            step_zero_validation, defaults.step_zero_validation, False
        )
        reason = training.fit(
            schedule, is_test=is_test, is_validated_first=is_validated_first and not is_test
        )
        return self._result(reason.value)

    def train_for(
        self,
        unit: TrainUnit,
        *,
        of: TrainUnit | None = None,
        stop_on_nan: bool = True,
        verify_steps: int | None = None,
        on_mismatch: str = "stop",
    ) -> dict[str, Any]:
        """Train the next batches, epochs or records, and return their metrics.

        A stored training resumes from there, so ask `steps_completed` how far it is.
        Nothing is validated or stored by itself, but for a stop that the trial asks for; see
        `validate` and `save_checkpoint`.

        Args:
            unit: How much to train; an epoch that was begun is counted as one.
            of: How long training is in all, if that is known; for the progress that is shown and
                reported.
            stop_on_nan: Whether to stop when the training loss is NaN or infinite, see `fit`.
            verify_steps: Compute each batch with a multiple of this number twice, see `fit`.
            on_mismatch: Whether to "stop" at a difference, or to "warn".

        Returns:
            The means of the training metrics, as `on_training_workload_end` gets them. Empty if
            the data ended before.

        Raises:
            Preempted: Training was asked to leave. The state is stored; the block of
                `pytorch.init` ends quietly.
        """
        checked = checked_unit("unit", unit)
        if checked is None:
            raise TypeError("`unit` must be a train unit such as pytorch.Batch(100), but got None.")
        whole = checked_unit("of", of)
        self._open()
        training = self._training
        training.loop.timeline.window = self._window(self._defaults())
        training.loop.replay = self._replay(verify_steps, on_mismatch)
        reason = training.train_piece(checked, whole, stop_on_nan=stop_on_nan)
        if reason.is_early:
            raise Preempted(reason.value)
        return training.metrics

    @contextmanager
    def own_epoch(self, *, of: TrainUnit | None = None) -> Iterator[Iterator[Any]]:
        """Yield the batches of the rest of an epoch, to be trained on by a loop in the block.

        `context.backward` and `context.step_optimizer`, or plain PyTorch, train on a batch as
        within `train_batch`. Leaving the loop early ends the epoch. Nothing is reported.

        Args:
            of: How long training is in all, if that is known; for the progress that is shown.

        Raises:
            Preempted: Training was asked to leave, where the next batch is asked for. The state is
                stored.
        """
        self._open()
        training = self._training
        training.loop.timeline.window = self._window(self._defaults())
        calls = self._context.stepper.calls
        with training.own_epoch(checked_unit("of", of)) as shards:
            calls.refuses_outside = True
            try:
                yield _until_preempted(shards)
            finally:
                calls.refuses_outside = False

    def validate(self) -> dict[str, Any]:
        """Validate the present state unless already done, and return the metrics.

        When asked to leave, it comes to its end; the next `train_for` stores the state and leaves.
        """
        self._open()
        with self._training.interrupt_watched():
            self._training.loop.validate()
        return self._training.validation_metrics

    def evaluate(self, data_loader: Any) -> dict[str, Any]:
        """Return the metrics of other data, for example a test set, without reporting them.

        When asked to leave, it comes to its end, as `validate` does.

        Args:
            data_loader: A data loader as for validation; every rank must call this.

        Raises:
            ValueError: The ranks have other data, of which each would take its part.
        """
        self._open()
        with self._training.interrupt_watched():
            return self._training.evaluate(data_loader)

    def restore(self, checkpoint: str | os.PathLike[str]) -> None:
        """Begin with a checkpoint of another run; for use before training.

        It has no effect in a run that resumes from a checkpoint of its own.

        Args:
            checkpoint: The checkpoint's directory, which every rank must see, or its URL in an
                object store, such as ``s3://bucket/prefix/UUID``.

        Raises:
            RuntimeError: Training has begun.
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointCorruptError: Files are missing or altered.
            CheckpointMismatchError: It does not fit the trial.
        """
        if self._training.is_built:
            raise RuntimeError("`restore` must come before training, but training has begun.")
        storage, uuid = checkpoint_at(checkpoint)
        own = self._context.distributed.broadcast(self._context.core.latest_checkpoint)
        state = EarlierState(uuid, storage) if own is None else None
        self._open(state)

    def save_checkpoint(self) -> str:
        """Store the present state unless already stored, and return the checkpoint's UUID."""
        self._open()
        self._training.store()
        return self._training.checkpoints.latest

    # ---- small parts ---------------------------------------------------------------------

    def _open(self, state: EarlierState | None = None) -> None:
        """Build the training at first, or anew from a checkpoint."""
        context, training = self._context, self._training
        if not training.is_built:
            if context.core.info is None and context.has_global_batch_size:
                # A wrong one is refused, also where the loaders do not read it.
                context.get_global_batch_size()
            # Exit stacks run in reverse order: `close` comes first, then the end of the display.
            context.exit_stack.push(training.progress)
            context.exit_stack.callback(training.close)
        training.open(state)

    def _replay(self, verify_steps: int | None, on_mismatch: str) -> StepReplay | None:
        if verify_steps is None:
            one_of("stop", "warn")("on_mismatch", on_mismatch)
            return None
        loop, context = self._training.loop, self._context
        if loop.replay is not None and loop.replay.settings == (verify_steps, on_mismatch):
            return loop.replay
        place, first = f"rank {context.distributed.rank} ({context.device})", loop.position.batches
        tell = context.core.alert
        return StepReplay(verify_steps, on_mismatch, context.stepper, place, tell, first)

    def _result(self, stop_reason: str) -> Result:
        training = self._training
        return Result(
            metrics=training.validation_metrics
            or last_validation(self._context.core.run_dir)
            or training.metrics,
            best_metrics=training.best_validation.best_metrics,
            checkpoints=training.checkpoints.kept_uuids(),
            stop_reason=stop_reason,
            steps_completed=training.loop.position.batches,
            run_dir=self._context.core.run_dir,
            checkpoint_storage=self._context.core.checkpoint.storage.url,
        )

    def _window(self, defaults: FitDefaults, enabled: bool | None = None) -> ProfilingWindow:
        """Return the window of batches to time; `enabled` turns all timing on or off."""
        window = self._profiling or defaults.profiling or ProfilingWindow()
        return window if enabled is None else replace(window, enabled=bool(enabled))

    def _defaults(self) -> FitDefaults:
        return FitDefaults.from_config(self._context.get_experiment_config())


def _until_preempted(shards: Generator[Any, None, StopReason]) -> Iterator[Any]:
    reason = yield from shards
    if reason.is_early:
        raise Preempted(reason.value)
