"""Reports of training: metrics, media, progress, status and alerts."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec

from paceline import faults
from paceline._base.journal_files import JournalWriter
from paceline._base.journal_records import (
    ALERT_LEVELS,
    MAX_STATUS,
    AlertRaised,
    EarlyExitReported,
    ProgressReported,
    RunMetadataSet,
    StatusReported,
    decode_value,
    encode_metrics,
)
from paceline._base.run_directory import RunDirectory
from paceline.core._arguments import (
    MAX_STEPS,
    EarlyExitReason,
    TensorboardMode,
    check_group,
    check_judged,
    checked_steps,
    new_metrics,
    plain_json,
    rank_group,
    searched_metrics,
)
from paceline.core._attempt_journal import (
    CHECKPOINT,
    OTHER,
    VALIDATION,
    ScriptTimes,
    TimeEvent,
    record_metrics,
    record_time_spent,
)
from paceline.core._media_reports import MediaReports
from paceline.core._preemption_and_search import ControlFile, SearchDecision
from paceline.core._read_runs import last_steps, read_history, standing_metrics
from paceline.core._run_feedback import RunFeedback
from paceline.core._tensorboard_files import PathMangler, PathSelector, TensorboardFiles

logger = logging.getLogger(__name__)

faults.register("core.report")

_TRAINING, _VALIDATION = "training", "validation"
_MAX_METADATA_BYTES = 64 * 1024


class TrainContext(MediaReports):
    """Report metrics, media, progress and status: each call appends to this process's journal.

    Every rank may report metrics, from any thread. Those of another rank than the chief (rank 0)
    are in a group of its own, such as "training_rank_2"; a search looks at the chief's. All else
    is for the chief to report. A step of a group may be reported again: values that are the same
    pass, new names are added, and a different value is an error.
    """

    def __init__(
        self,
        *,
        run: RunDirectory,
        journal: JournalWriter,
        control: ControlFile,
        decision: SearchDecision,
        rank: int,
        last_steps: dict[str, int],
        searcher: dict[str, Any],
        tensorboard: TensorboardFiles,
        times: ScriptTimes,
        feedback: RunFeedback,
    ) -> None:
        super().__init__(run=run, journal=journal, rank=rank)
        self._control = control
        self._decision = decision
        self._lock = threading.Lock()
        # Steps of earlier attempts have no remembered metrics: they are read back when needed.
        self._last: dict[str, tuple[int, dict[str, Any] | None]] = {
            group: (step, None) for group, step in last_steps.items()
        }
        self._checked_groups = {_TRAINING, _VALIDATION}
        self._is_history_read = rank == 0
        self._searched_metric = searcher.get("metric")
        self._judged = searched_metrics(searcher, decision.metrics)
        self._is_smaller_better = bool(searcher.get("smaller_is_better", True))
        self._best_here: float | None = None
        self._has_reported_exit = False
        self._metadata: dict[str, Any] | None = None
        self._steps_completed = 0
        self._is_fault_wanted = faults.is_active()
        self._tensorboard = tensorboard
        self._times = times
        self._feedback = feedback
        self._writes_tensorboard = tensorboard.mode is TensorboardMode.AUTO

    @property
    def steps_completed(self) -> int:
        """The largest step reported by this process; 0 before the first report."""
        return self._steps_completed

    def report_training_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics of training.

        Args:
            steps_completed: The number of batches that training has completed.
            metrics: Names to numbers, strings, booleans, lists, nested dictionaries, NumPy
                scalars or 0-d tensors; NaN and infinities are kept.

        Raises:
            TypeError: A value, or `steps_completed`, has another type.
            ValueError: The step was reported with another value, or is not from 0 to 2**63 - 1.
        """
        self._report(_TRAINING, steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics of validation; see `report_training_metrics`.

        Raises:
            TypeError: A value, or `steps_completed`, has another type, or a metric that a search
                needs is no number.
            ValueError: The step was reported with another value, or is not from 0 to 2**63 - 1.
        """
        encoded = self._report(_VALIDATION, steps_completed, metrics)
        if self._rank == 0 and self._searched_metric in encoded:
            self._note_best(decode_value(encoded[self._searched_metric]))

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics of a group of your own; see `report_training_metrics`.

        Args:
            group: A name without dots.
            steps_completed: The number of batches that training has completed.
            metrics: Names to values.

        Raises:
            TypeError: A value, or `steps_completed`, has another type.
            ValueError: The step was reported with another value, or is not from 0 to 2**63 - 1; or
                the group's name is empty, reserved or has a dot.
        """
        if group == _VALIDATION:
            self.report_validation_metrics(steps_completed, metrics)
            return
        if group not in self._checked_groups:
            check_group(group)
            self._checked_groups.add(group)
        self._report(group, steps_completed, metrics)

    def report_progress(self, progress: float) -> None:
        """Report the completed fraction of the whole training.

        Args:
            progress: From 0 to 1 inclusive.

        Raises:
            RuntimeError: This process is not the chief.
            ValueError: `progress` is out of range.
        """
        self._check_chief()
        if not 0 <= progress <= 1:
            raise ValueError(f"`progress` must be from 0 to 1 inclusive, but got {progress}.")
        self._journal.append(ProgressReported(time=time.time(), progress=float(progress)))
        self._feedback.note_progress(progress)

    def report_early_exit(self, reason: EarlyExitReason | str) -> None:
        """Report a reason against further attempts of this trial.

        Args:
            reason: Why.

        Raises:
            RuntimeError: This process is not the chief.
            ValueError: `reason` is no `EarlyExitReason`.
        """
        self._check_chief()
        value = EarlyExitReason(reason).value
        with self._lock:
            if not self._has_reported_exit:
                self._has_reported_exit = True
                self._journal.append(EarlyExitReported(time=time.time(), reason=value))

    def set_status(self, status: str) -> None:
        """Report the current activity of the process, as a few words for people.

        A text of more than 65,536 characters is cut there.

        Raises:
            RuntimeError: This process is not the chief.
            TypeError: `status` is no string.
        """
        self._check_chief()
        if not isinstance(status, str):
            raise TypeError(f"`status` must be a string, but got {status!r}.")
        self._journal.append(StatusReported(time=time.time(), status=status[:MAX_STATUS]))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of the whole run, replacing earlier metadata.

        Later attempts read it by `get_metadata`; a trial shows it.

        Args:
            metadata: JSON-able values, 64 KiB at most.

        Raises:
            RuntimeError: This process is not the chief.
            TypeError: `metadata` is not JSON-able.
            ValueError: It is too large.
        """
        self._check_chief()
        plain = plain_json(metadata)
        size = len(msgspec.json.encode(plain))
        if size > _MAX_METADATA_BYTES:
            raise ValueError(
                f"`metadata` must have {_MAX_METADATA_BYTES} bytes as JSON at most, but has {size}."
                " Hint: keep large things in a checkpoint."
            )
        with self._lock:
            self._metadata = plain
            self._journal.append(RunMetadataSet(time=time.time(), metadata=plain))

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata last set by `set_metadata`, in this attempt or an earlier attempt.

        On another node than the chief's without a shared run directory, only earlier attempts
        count.
        """
        metadata = self._metadata
        if metadata is None:
            metadata = read_history(self._run).metadata or self._run.read_info().metadata or {}
        return deepcopy(metadata)

    def time_spent_on(self, what: str) -> AbstractContextManager[None]:
        """Count the time of a `with` block as no training, for the goodput of a loop of your own.

        On other ranks than the chief, in other threads and under a trainer it does nothing.

        Args:
            what: "validation", "checkpoint" or "other". `store_path` and `upload` count as
                "checkpoint" without it.

        Raises:
            ValueError: `what` is something else.
        """
        if what not in (VALIDATION, CHECKPOINT, OTHER):
            raise ValueError(
                f"`what` must be {VALIDATION!r}, {CHECKPOINT!r} or {OTHER!r}, but got {what!r}."
            )
        return self._times.spent_on(what)

    def note_time_spent(
        self, event: TimeEvent, steps_completed: int, seconds: dict[str, float]
    ) -> None:
        """Record the seconds spent so far on training and other activities; called by trainers.

        Args:
            event: The event, as `journal.TimeSpent` says.
            steps_completed: The number of batches that training has completed.
            seconds: Sums since the start, by activity.

        Raises:
            RuntimeError: This process is not the chief.
        """
        self._check_chief()
        self._times.stop()
        record_time_spent(self._journal, event, steps_completed, seconds)

    def get_experiment_best_validation(self) -> float | None:
        """Return the best known value of the searched metric in the whole experiment.

        It is the better of the runner's newest value and this process's own reports. Without a
        searcher config there is no searched metric, hence None.
        """
        told = self._control.read().best_validation
        if told is None:
            return self._best_here
        best = float(decode_value(told))
        if self._best_here is None:
            return best
        return self._better(best, self._best_here)

    def get_tensorboard_path(self) -> Path | None:
        """Return this rank's directory of TensorBoard files, or None in `TensorboardMode.OFF`.

        Files written there show in TensorBoard, for example of a `SummaryWriter` or profiler.
        """
        return self._tensorboard.make_path()

    def upload_tensorboard_files(
        self, selector: PathSelector | None = None, mangler: PathMangler | None = None
    ) -> None:
        """Upload this rank's changed TensorBoard files, in `TensorboardMode.MANUAL`.

        Any rank may call. Files that are in a directory which stays are not copied.

        Args:
            selector: Called with the path of each file, relative to the directory; tells whether
                to upload it.
            mangler: Called with that path and the rank; returns the path to upload it to.

        Raises:
            RuntimeError: The mode is another one.
            OSError: The storage does not take the files.
            NotImplementedError: The storage keeps checkpoints alone.
        """
        if self._tensorboard.mode is not TensorboardMode.MANUAL:
            raise RuntimeError(
                "`upload_tensorboard_files()` needs `TensorboardMode.MANUAL`, but the mode is"
                f" {self._tensorboard.mode.name}. Hint: AUTO uploads files by itself."
            )
        self._tensorboard.upload(selector, mangler)

    def keep_trace(self, name: str, write: Callable[[Path], object]) -> Path:
        """Write a profiler trace among this rank's TensorBoard files; called by trainers.

        It is uploaded if the storage is no directory. Failures are logged.

        Args:
            name: The name of the file; if there is one already, a number is added.
            write: Writes the trace to a path.

        Returns:
            Where it is.
        """
        return self._tensorboard.add_trace(name, write)

    def standing(self, group: str, steps_completed: int) -> dict[str, Any]:
        """Return the metrics already reported for a step, by this or an earlier attempt."""
        with self._lock:
            return self._standing(rank_group(group, self._rank), steps_completed)

    def _standing(self, group: str, steps_completed: int) -> dict[str, Any]:
        if not self._is_history_read:
            self._read_history()
        last_step, known = self._last.get(group, (-1, None))
        if steps_completed > last_step:
            return {}
        if known is None or steps_completed < last_step:
            known = standing_metrics(self._run, group, steps_completed, self._rank)
        return known

    def _report(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> dict[str, Any]:
        # Fast path for plain integers: reports are frequent.
        if type(steps_completed) is not int or not 0 <= steps_completed <= MAX_STEPS:
            steps_completed = checked_steps(steps_completed)
        encoded = encode_metrics(metrics)
        if self._judged and group == _VALIDATION:
            check_judged(encoded, self._judged)
        if self._rank:
            group = rank_group(group, self._rank)
        with self._lock:
            if steps_completed > self._steps_completed:
                self._steps_completed = steps_completed
            if not self._is_history_read:
                self._read_history()
            last_step = self._last.get(group, (-1, None))[0]
            if steps_completed > last_step:
                news, merged = encoded, encoded
            else:
                known = self._standing(group, steps_completed)
                news = new_metrics(group, steps_completed, known, encoded)
                merged = {**known, **news}
            if news or steps_completed > last_step:
                sequence = record_metrics(self._journal, group, steps_completed, news)
                if self._writes_tensorboard:
                    self._tensorboard.write(group, steps_completed, news)
                if group == _VALIDATION:
                    self._decision.reported(sequence, steps_completed, merged)
                if self._is_fault_wanted:
                    faults.reach("core.report")
            if steps_completed >= last_step:
                self._last[group] = (steps_completed, merged)
        self._times.reported(steps_completed)
        self._feedback.report(group, steps_completed, encoded)
        return encoded

    def _read_history(self) -> None:
        """Load this rank's last steps from earlier attempts; the chief received its own."""
        self._is_history_read = True
        found = last_steps(self._run, self._rank)
        self._last = {group: (step, None) for group, step in found.items()}

    def _note_best(self, value: Any) -> None:
        if isinstance(value, (int, float)) and math.isfinite(value):
            with self._lock:
                best = self._best_here
                self._best_here = float(value) if best is None else self._better(best, float(value))

    def _better(self, left: float, right: float) -> float:
        return min(left, right) if self._is_smaller_better else max(left, right)

    def _check_chief(self) -> None:
        if self._rank != 0:
            raise RuntimeError(
                f"Only the chief may report this, but rank {self._rank} did."
                " Hint: guard the call by `if context.distributed.rank == 0:`."
            )


_LONGEST = {"title": 200, "description": 4000}
_LOGGED_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


def alert_of(title: str, description: str, level: str) -> AlertRaised:
    """Return the record of an alert.

    Raises:
        TypeError: A text is no string.
        ValueError: `level` is unknown, or there is no text, or a text is too long.
    """
    for name, text in (("title", title), ("description", description)):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must be a string, but got {text!r}.")
        if len(text) > _LONGEST[name]:
            raise ValueError(
                f"`{name}` must have {_LONGEST[name]} characters at most, but has {len(text)}."
            )
    if not title and not description:
        raise ValueError("An alert must have a `title` or a `description`, but has neither.")
    if level not in ALERT_LEVELS:
        raise ValueError(f"`level` must be one of {', '.join(ALERT_LEVELS)}, but got {level!r}.")
    return AlertRaised(time=time.time(), title=title, description=description, level=level)


def log_alert(alert: AlertRaised, rank: int) -> None:
    """Log an alert of a run without a trial log."""
    text = ": ".join(filter(None, (alert.title, alert.description)))
    logger.log(_LOGGED_LEVELS[alert.level], "Alert of rank %d: %s", rank, text)
