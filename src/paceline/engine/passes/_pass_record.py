"""The record of a trainer's passes, in a run directory."""

import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline import core
from paceline.engine.passes._pass_statistics import PassSeconds
from paceline.journal import (
    RUN_DIRECTORY_VARIABLE,
    RunDirectory,
    encode_metrics,
)

logger = logging.getLogger(__name__)


class PassRecord:
    """Report what passes came to, as any run does: each trainer is a run, begun by its first pass.

    Steps are the batches that the trainer has trained on, whatever state it went on from. In a
    trial of a master, or once the program has called `core.init()`, the program reports what it
    likes by itself, and nothing is recorded besides.

    Args:
        directory: The run directory; by default one below ``./paceline_runs``.
        config: The hyperparameters.
        seed: The seed.
        trackers: What else shows the run.
    """

    def __init__(
        self,
        directory: Path | None,
        config: Mapping[str, Any],
        seed: int,
        trackers: Sequence[core.Tracker] = (),
    ) -> None:
        self._trackers = trackers
        self._directory = directory
        self._config = dict(config)
        self._seed = seed
        self._is_wanted = True
        self._run: _OpenRun | None = None
        self._last_step = 0
        # The names of what was validated at the last step.
        self._validated: set[str] = set()
        self._failure: tuple[core.Outcome, str] | None = None
        self._last_pass_s = self._data_wait_s = 0.0

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None before the first pass, and if nothing is recorded."""
        return None if self._run is None else self._run.path

    @contextmanager
    def begun(self, num_workers: int, what: str = core.TRAINING) -> Iterator[None]:
        """Begin the run, unless it is, and remember whether the pass in the block has failed.

        Args:
            num_workers: How many workers there are.
            what: What the time of the block is spent on.

        Raises:
            OSError: The run directory that was asked for cannot be written.
            RuntimeError: Another process records there.
        """
        if self._is_wanted and self._run is None:
            self._begin(num_workers)
        began = perf_counter()
        try:
            with self._spent_on(what):
                yield
        except BaseException as error:
            # Without its traceback, which would keep the trainer.
            self._failure = core.outcome_of(error), core.describe_error(error)
            if what == core.TRAINING and self._run is not None:
                self._run.times.move(core.LOST, perf_counter() - began)
            raise
        self._last_pass_s = perf_counter() - began
        self._failure = None

    def storing(self) -> AbstractContextManager[None]:
        """Count the time of a block, which stores a checkpoint, as time without training."""
        return self._spent_on(core.CHECKPOINT)

    def add_training(
        self,
        num_batches: int,
        statistics: Mapping[str, Any],
        seconds: PassSeconds,
        *,
        is_repeated: bool,
    ) -> None:
        """Report a pass; one without batches of the trainer's counts as one.

        Args:
            num_batches: Its batches.
            statistics: What came of it.
            seconds: What it has taken in the chief.
            is_repeated: Whether workers were lost in it, so that it ran once more.
        """
        self._last_step += max(1, num_batches)
        self._validated.clear()
        self._report("training", _reportable(statistics))
        if self._run is not None:
            times = self._run.times
            if is_repeated:
                times.move(core.LOST, max(0.0, self._last_pass_s - seconds.whole))
            times.move(core.CHECKPOINT, seconds.checkpoint)
            self._data_wait_s += seconds.data_wait
            times.report(self._last_step, self._data_wait_s)

    def add_validation(self, statistics: Mapping[str, Any]) -> None:
        """Report a validation; of several since the last pass the first to have a name stands.

        Args:
            statistics: What came of it.
        """
        metrics = _reportable(statistics)
        news = {name: value for name, value in metrics.items() if name not in self._validated}
        self._validated |= news.keys()
        self._report("validation", news)

    def close(self, error: BaseException | None = None) -> None:
        """End the run.

        Args:
            error: What has ended the program's use of the trainer; else the last pass tells.
        """
        self._is_wanted = False
        if self._run is not None and error is None and self._failure is None:
            self._run.times.end(self._last_step, self._data_wait_s)
        if self._run is not None and error is None and self._failure is not None:
            self._run.close(*self._failure)
        elif self._run is not None:
            self._run.close(core.outcome_of(error), error)

    def _begin(self, num_workers: int) -> None:
        if core.has_context() or RUN_DIRECTORY_VARIABLE in os.environ:
            logger.info("Passes are not recorded, as this program may report by `core.init()`.")
            self._is_wanted = False
            return
        try:
            self._run = _OpenRun(
                self._directory, self._config, self._seed, num_workers, self._trackers
            )
        except OSError as error:
            if self._directory is not None:
                raise
            logger.warning("Passes are not recorded, as no run directory can be made: %s", error)
            self._is_wanted = False
            return
        self._last_step = self._run.last_step
        # A program may end without `shutdown`, and drop a trainer that it has no use for any more.
        weakref.finalize(self, self._run.close_unasked)

    def _spent_on(self, what: str) -> AbstractContextManager[None]:
        if self._run is None:
            return nullcontext()
        return self._run.times.spent_on(what, self._last_step)

    def _report(self, group: str, metrics: dict[str, Any]) -> None:
        if self._run is not None and metrics:
            self._run.report(group, self._last_step, metrics)


class _OpenRun:
    """A run that is being recorded."""

    def __init__(
        self,
        directory: Path | None,
        config: Mapping[str, Any],
        seed: int,
        num_workers: int,
        trackers: Sequence[core.Tracker],
    ) -> None:
        self._is_closed = False
        self._pid = os.getpid()
        with ExitStack() as lock:
            opened = core.open_run(
                number=core.next_run_number(),
                directory=directory,
                seed=seed,
                hparams=config,
                is_resumable=False,
                lock=lock,
            )
            self.path = opened.path
            # What an earlier process has recorded here stands.
            self.last_step = core.summarize_run(self.path).last_step or 0
            opened = replace(opened, latest_checkpoint=None, steps_completed=self.last_step)
            run = RunDirectory(self.path)
            self._tracking = core.TrackingGroup(trackers, run, opened)
            self._journal = core.begin_journal(run, opened, world_size=num_workers)
            self.times = core.TimeAccount(self._record_times)
            self._lock = lock.pop_all()

    def report(self, group: str, step: int, metrics: dict[str, Any]) -> None:
        """Report metrics, unless the run was closed by another thread."""
        if not self._is_closed:
            core.record_metrics(self._journal, group, step, metrics)

    def _record_times(
        self, event: core.TimeEvent, steps_completed: int, seconds: dict[str, float]
    ) -> None:
        if not self._is_closed:
            core.record_time_spent(self._journal, event, steps_completed, seconds)

    def close(self, outcome: core.Outcome, error: BaseException | str | None) -> None:
        """Record how the run has ended; does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        core.end_journal(self._journal, outcome, error)
        text = core.describe_error(error) if isinstance(error, BaseException) else error
        self._tracking.finish(outcome, text)
        self._lock.close()

    def close_unasked(self) -> None:
        """Record the end of a trainer that nobody shut down, by how the program ends."""
        if os.getpid() != self._pid:
            return
        # In a notebook or a console an error ends a cell or a line, but not the program.
        is_interactive = hasattr(sys, "ps1")
        error = None if is_interactive else getattr(sys, "last_value", None)
        self.close(core.outcome_of(error), error)


def _reportable(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among statistics, also those in dictionaries."""
    metrics: dict[str, Any] = {}
    for name, value in statistics.items():
        if isinstance(value, Mapping):
            value = _reportable(value)
        elif not isinstance(value, (int, float)):
            continue
        try:
            metrics |= encode_metrics({name: value})
        except (TypeError, ValueError):
            # Such as an integer of more than 64 bits.
            continue
    return metrics
