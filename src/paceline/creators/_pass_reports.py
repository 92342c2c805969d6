"""Reports of passes: statistics, times, shown progress, the record in a run directory."""

import logging
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch

from paceline import core
from paceline._base.journal_records import AnyRecord, encode_metrics
from paceline._base.progress_display import COMPLETED, TrainingProgress
from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunDirectory
from paceline._training.engine.profiling import StepTimer
from paceline._training.engine.weighted_means import WeightedMeans
from paceline._training.workers.worker_failures import StepsDifferError
from paceline.core._arguments import Outcome
from paceline.core._attempt_journal import (
    CHECKPOINT,
    LOST,
    TRAINING,
    TimeAccount,
    TimeEvent,
    begin_journal,
    describe_error,
    end_journal,
    outcome_of,
    record_metrics,
    record_time_spent,
)
from paceline.core._core_context import has_context
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import NonFiniteError
from paceline.core._run_opening import RESUME_VARIABLE, next_run_number, open_run
from paceline.core._train_context import RunFeedback, alert_of, ending_of, log_alert

logger = logging.getLogger(__name__)

_COUNTS = ("epoch", "batch_count")
_UNSHOWN = ("batch_count", "num_samples")


class PassSeconds(NamedTuple):
    """Time spent on a pass by a rank, in seconds.

    Attributes:
        whole: The whole pass.
        data_wait: The wait for batches.
        checkpoint: The capture of the state.
    """

    whole: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0


class PassResult(NamedTuple):
    """Result of a pass on a rank.

    Attributes:
        statistics: The result of the function, and counts.
        num_samples: The samples of this rank, as the weight of its statistics.
        num_batches: The batches of the pass.
        last_own: Of a default function: which batch of the pass this rank's last one is, and its
            samples; its "last_" values are of these.
        state: The rank's part of the state, if it was wanted and is not in the file.
        seconds: The time it took.
        alerts: Title, text and level of what the user shall see.
    """

    statistics: dict[str, Any]
    num_samples: int
    num_batches: int
    last_own: tuple[int, int] | None = None
    state: dict[str, Any] | None = None
    seconds: PassSeconds = PassSeconds()
    alerts: Sequence[tuple[str, str, str]] = ()


class LocalMeans:
    """Means over this worker's own samples, and the values of the last batch.

    Args:
        stop_on_nan: Whether `statistics` looks for losses that are not finite.
        rank: The rank, for the message about such a loss.
        max_in_a_row: How many of them in a row are too many.
    """

    def __init__(self, *, stop_on_nan: bool = False, rank: int = 0, max_in_a_row: int = 1) -> None:
        single = DistributedContext.single()
        self._means = WeightedMeans(single, "pass", stop_on_nan=stop_on_nan, rank=rank)
        self._means.max_in_a_row = max_in_a_row
        self._last: dict[str, torch.Tensor] = {}

    def add(self, metrics: dict[str, torch.Tensor], num_samples: int, batch: int = 0) -> None:
        """Add the metrics of a batch.

        Without samples of its own a worker only takes part in exchanges of all workers.
        """
        if num_samples:
            self._means.add(metrics, num_samples, batch)
            self._last = metrics

    def statistics(self) -> dict[str, Any]:
        """Return the means, and the last values as "last_" and the name.

        Raises:
            NonFiniteError: A loss was not finite and training is to stop then.
        """
        means = self._means.reduce() or {}
        try:
            self._means.check_finite(means)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"{error} The pass has ended, so the batch is not known any more, and its layer is"
                " not either. Hint: load the state before the pass, with a smaller learning rate;"
                " stop_on_nan=False trains on.",
                rank=error.rank,
                batch=error.batch,
            ) from None
        statistics: dict[str, Any] = {}
        for name, last in self._last.items():
            statistics |= {name: means[name], f"last_{name}": last.item()}
        return statistics


def reduced_statistics(results: Sequence[PassResult]) -> dict[str, Any]:
    """Return the statistics of all ranks: numbers weighted by samples, ``num_samples`` summed.

    Other values are rank 0's; dictionaries within are reduced as well. A worker without
    samples of its own counts only if none has any, and in the last batch only if it has some there.
    """
    counting = [result for result in results if result.num_samples] or list(results)
    weights = [result.num_samples or 1 for result in counting]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    means = _pass_means([result.statistics for result in counting], shares)
    means |= _last_values(results)
    every = [result.statistics for result in results]
    for name in _COUNTS:
        if all(_is_number(statistics.get(name)) for statistics in every):
            means[name] = max(statistics[name] for statistics in every)
    if all(_is_number(statistics.get("num_samples")) for statistics in every):
        means["num_samples"] = sum(statistics["num_samples"] for statistics in every)
    return means


def _last_values(results: Sequence[PassResult]) -> dict[str, float]:
    """Return the last batch's values, averaged over the ranks with samples in this batch."""
    places = [result.last_own or (0, 0) for result in results]
    last = max(position for position, _ in places)
    if last == 0:
        return {}
    sizes = [size if position == last else 0 for position, size in places]
    ranks = [rank for rank, size in enumerate(sizes) if size]
    shares = [sizes[rank] / sum(sizes) for rank in ranks]
    first = results[ranks[0]].statistics
    return {
        name: _dot([results[rank].statistics[name] for rank in ranks], shares)
        for name in first
        if name.startswith("last_")
    }


def _pass_means(parts: Sequence[dict[str, Any]], shares: Sequence[float]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [part.get(name) for part in parts]
        if all(map(_is_number, values)):
            # Single worker: the value keeps its type.
            means[name] = first if len(values) == 1 else _dot(values, shares)
        elif all(isinstance(value, dict) for value in values):
            means[name] = _pass_means(
                [value for value in values if isinstance(value, dict)], shares
            )
        else:
            means[name] = first
    return means


def _dot(values: Sequence[Any], shares: Sequence[float]) -> float:
    return float(sum(value * share for value, share in zip(values, shares, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Measure = Callable[[str], AbstractContextManager[None]]


class StepTimes:
    """The seconds of the parts of each step, for `profile`."""

    def __init__(self, device: torch.device) -> None:
        self._timer = StepTimer(device)

    def measure(self, part: str) -> AbstractContextManager[None]:
        """Add the time of a block to a part."""
        return self._timer.measure(part)

    def means(self, whole: str, num_batches: int) -> dict[str, float]:
        """Return the time of the pass, and the mean of each part over its batches.

        Args:
            whole: The part that the pass as a whole is.
            num_batches: The batches of the pass.
        """
        parts = self._timer.take()
        times = {f"mean_{whole}_s": parts.pop(whole)}
        return times | {f"mean_{name}_s": time / num_batches for name, time in parts.items()}


@contextmanager
def measured_pass(times: StepTimes | None, whole: str) -> Iterator[Measure | None]:
    """Yield the function measuring parts of a pass, or None without timing."""
    if times is None:
        yield None
        return
    with times.measure(whole):
        yield times.measure


_INTERVAL_S = 0.1
# Batches so far, all batches (-1 if that is not known), and samples of all workers.
_LAYOUT = struct.Struct("<qqq")


class NotedProgress:
    """Writer of a pass's progress, used by the chief.

    Args:
        path: The file of the driver; on a node that does not see it nothing is noted.
        total: The batches of the pass, if they are known.
        then: Called with each batch too.
    """

    def __init__(
        self, path: str, total: int | None, then: Callable[[Any], None] | None = None
    ) -> None:
        self._file: int | None = None
        # Progress is for show: no pass fails for lack of it.
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY)
        self._total = -1 if total is None else total
        self._then = then
        self._batches = self._samples = 0
        self._next = 0.0

    def __call__(self, batch: Any) -> None:
        """Note a batch."""
        if self._then is not None:
            self._then(batch)
        self._batches += 1
        self._samples += batch.num_all
        if (now := time.monotonic()) >= self._next:
            self._next = now + _INTERVAL_S
            self._write()

    def close(self) -> None:
        """Note the end."""
        self._write()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, _LAYOUT.pack(self._batches, self._total, self._samples), 0)


@contextmanager
def shown_pass(*, is_shown: bool) -> Iterator[str | None]:
    """Show the progress of a pass within a block, on a terminal or in a notebook.

    Args:
        is_shown: Whether to show it.

    Yields:
        The file for `NotedProgress`; None if nothing is shown.
    """
    if not is_shown:
        yield None
        return
    with TemporaryDirectory(prefix="paceline-progress-") as directory:
        path = Path(directory) / "pass"
        path.touch()
        shown = _ShownPass(path)
        try:
            yield str(path)
        except BaseException as error:
            shown.end(ending_of(error))
            raise
        shown.end(ending_of(None))


class _ShownPass:
    """Thread reading and drawing the noted progress."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress: TrainingProgress | None = None
        self._has_ended = threading.Event()
        # A daemon: a display must not hold up the end of the process.
        self._thread = threading.Thread(target=self._draw, name="paceline-progress", daemon=True)
        self._thread.start()

    def end(self, how: str) -> None:
        """Draw the last state, and end the thread."""
        self._has_ended.set()
        self._thread.join()
        self._update()
        if self._progress is not None:
            self._progress.end(how)

    def _draw(self) -> None:
        while not self._has_ended.wait(_INTERVAL_S):
            self._update()

    def _update(self) -> None:
        noted = self._path.read_bytes()
        if len(noted) < _LAYOUT.size:
            return
        batches, total, samples = _LAYOUT.unpack(noted[: _LAYOUT.size])
        if self._progress is None:
            self._progress = TrainingProgress(None if total < 0 else total, "batches")
            self._progress.start(0)
        self._progress.update(batches, samples)


class PassRecord:
    """Run record of a trainer's passes; the first pass begins the run.

    Steps are the batches that the trainer has trained on, whatever state it resumed from. In a
    trial of a master, or once the program has called `core.init()`, the program reports the metrics
    that it likes by itself, and nothing is recorded besides.

    Args:
        directory: The run directory; by default one below ``./paceline_runs``.
        config: The hyperparameters.
        seed: The seed.
        trackers: Further displays of the run.
        shows_passes: Whether to show a line for each pass; else its progress is shown.
    """

    def __init__(
        self,
        directory: Path | None,
        config: Mapping[str, Any],
        seed: int,
        trackers: Sequence[core.Tracker] = (),
        *,
        shows_passes: bool = True,
    ) -> None:
        self._trackers = trackers
        self._shows_passes = shows_passes
        self._saved: str | None = None
        self._directory = directory
        self._config = dict(config)
        self._seed = seed
        self._is_wanted = True
        self._run: _OpenRun | None = None
        self._last_step = 0
        # The names of the metrics validated at the last step.
        self._validated: set[str] = set()
        self._failure: tuple[Outcome, str] | None = None
        self._last_pass_s = self._data_wait_s = 0.0

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None before the first pass, and if nothing is recorded."""
        return None if self._run is None else self._run.path

    @property
    def media(self) -> core.MediaReports | None:
        """The reports of media; None where `run_dir` is."""
        return None if self._run is None else self._run.media

    @contextmanager
    def begun(self, num_workers: int, what: str = TRAINING) -> Iterator[None]:
        """Begin the run unless begun, and remember a failure of the pass in the block.

        Args:
            num_workers: How many workers there are.
            what: The purpose of the block.

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
            if isinstance(error, StepsDifferError):
                self.add_alert("A step gave two results", str(error), "error")
            # Without its traceback, which would keep the trainer.
            self._failure = outcome_of(error), describe_error(error)
            if what == TRAINING and self._run is not None:
                self._run.times.move(LOST, perf_counter() - began)
            raise
        self._last_pass_s = perf_counter() - began
        self._failure = None

    @contextmanager
    def storing(self, place: str) -> Iterator[None]:
        """Count the time of a block for storing a state as time without training.

        Args:
            place: Where it is stored.
        """
        with self._spent_on(CHECKPOINT):
            yield
        self._saved = place

    def add_training(
        self,
        num_batches: int,
        statistics: Mapping[str, Any],
        seconds: PassSeconds,
        *,
        is_repeated: bool,
    ) -> None:
        """Report a training pass; without batches of the trainer's, the pass is a single step.

        Args:
            num_batches: Its batches.
            statistics: The results.
            seconds: The time it took in the chief.
            is_repeated: Whether workers were lost in it, so that it ran once more.
        """
        self._last_step += max(1, num_batches)
        self._validated.clear()
        self._report("training", _reportable(statistics))
        if self._run is not None:
            times = self._run.times
            if is_repeated:
                times.move(LOST, max(0.0, self._last_pass_s - seconds.whole))
            times.move(CHECKPOINT, seconds.checkpoint)
            self._data_wait_s += seconds.data_wait
            times.report(self._last_step, self._data_wait_s)

    def add_alert(self, title: str, text: str, level: str) -> None:
        """Log an alert, and record it if there is a run."""
        log_alert(alert := alert_of(title, text, level), 0)
        if self._run is not None:
            self._run.record(alert)

    def add_validation(self, statistics: Mapping[str, Any]) -> None:
        """Report a validation; of several since the last pass the first to have a name stands.

        Args:
            statistics: The results.
        """
        metrics = _reportable(statistics)
        news = {name: value for name, value in metrics.items() if name not in self._validated}
        self._validated |= news.keys()
        self._report("validation", news)

    def close(self, error: BaseException | None = None) -> None:
        """End the run.

        Args:
            error: The error that ended the program's use of the trainer; by default the last
                pass's.
        """
        self._is_wanted = False
        if self._run is not None and error is None and self._failure is None:
            self._run.times.end(self._last_step, self._data_wait_s)
        if self._run is None:
            return
        self._run.saved = self._saved
        if error is None and self._failure is not None:
            self._run.close(*self._failure)
        else:
            self._run.close(outcome_of(error), error)

    def _begin(self, num_workers: int) -> None:
        if has_context() or RUN_DIRECTORY_VARIABLE in os.environ:
            logger.info("Passes are not recorded, as this program may report by `core.init()`.")
            self._is_wanted = False
            return
        try:
            self._run = _OpenRun(
                self._directory, self._config, self._seed, num_workers, self._trackers
            )
            if not self._shows_passes:
                self._run.feedback.hand_over()
        except OSError as error:
            # A run directory is optional unless the user named one.
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
    """Run being recorded."""

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
            opened = open_run(
                number=next_run_number(),
                directory=directory,
                seed=seed,
                hparams=config,
                is_resumable=False,
                lock=lock,
            )
            self.path = opened.path
            # Steps recorded by an earlier process in this directory are kept.
            self.last_step = core.summarize_run(self.path).last_step or 0
            opened = replace(opened, latest_checkpoint=None, steps_completed=self.last_step)
            run = RunDirectory(self.path)
            self._tracking = core.TrackingGroup(trackers, run, opened)
            self._journal = begin_journal(run, opened, world_size=num_workers)
            self.media = core.MediaReports(run=run, journal=self._journal, rank=0)
            self.times = TimeAccount(self._record_times)
            self.saved: str | None = None
            self.feedback = RunFeedback(self.path, opened.info, num_workers=num_workers)
            is_resume_asked = directory is None and os.environ.get(RESUME_VARIABLE)
            self.feedback.begin(more="begins anew: `load` resumes" * bool(is_resume_asked))
            self._lock = lock.pop_all()

    def report(self, group: str, step: int, metrics: dict[str, Any]) -> None:
        """Report metrics, unless the run was closed by another thread."""
        if not self._is_closed:
            record_metrics(self._journal, group, step, metrics)
            shown = {name: value for name, value in metrics.items() if name not in _UNSHOWN}
            self.feedback.report(group, step, shown)

    def record(self, record: AnyRecord) -> None:
        """Record an event, unless the run was closed by another thread."""
        if not self._is_closed:
            self._journal.append(record)

    def _record_times(
        self, event: TimeEvent, steps_completed: int, seconds: dict[str, float]
    ) -> None:
        if not self._is_closed:
            record_time_spent(self._journal, event, steps_completed, seconds)

    def close(self, outcome: Outcome, error: BaseException | str | None) -> None:
        """Record how the run has ended; does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        end_journal(self._journal, outcome, error)
        text = describe_error(error) if isinstance(error, BaseException) else error
        self._tracking.finish(outcome, text)
        self._lock.close()
        name = (text or "").partition(":")[0]
        words = {Outcome.COMPLETED: COMPLETED, Outcome.PREEMPTED: "preempted"}
        is_interrupted = name == "KeyboardInterrupt"
        ending = "interrupted" if is_interrupted else words.get(outcome, f"failed ({name})")
        resume = None if self.saved is None else f"load({self.saved!r}) of a new trainer"
        self.feedback.end(ending, resume=resume)

    def close_unasked(self) -> None:
        """Record the end of a trainer without a `shutdown`, based on the end of the program."""
        # Forked children run the finalizer too, but the run belongs to the parent.
        if os.getpid() != self._pid:
            return
        # Interactive sessions: an error ends a cell or a line, but not the program.
        is_interactive = hasattr(sys, "ps1")
        error = None if is_interactive else getattr(sys, "last_value", None)
        self.close(outcome_of(error), error)


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
            # Values that JSON cannot hold, such as integers of more than 64 bits, are left out.
            continue
    return metrics
