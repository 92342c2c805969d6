"""Reports of training: metrics, media, progress, status and alerts.

Feedback of a run to the person who started it: beginning, progress of reports, end.
"""

import logging
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec

from paceline import faults
from paceline._base import journal_records as records
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.progress_display import (
    COMPLETED,
    TrainingProgress,
    format_duration,
    locations_of,
    shortest_path,
)
from paceline._base.progress_regions import is_notebook, show_lines
from paceline._base.run_directory import RunDirectory, RunInfo
from paceline.core._arguments import (
    MAX_STEPS,
    EarlyExitReason,
    Outcome,
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
    outcome_of,
    record_metrics,
    record_time_spent,
)
from paceline.core._launcher_place import launched_place
from paceline.core._media import MediaReports
from paceline.core._preemption_and_search import ControlFile, SearchDecision
from paceline.core._read_runs import RUNS_DIRECTORY, last_steps, read_history, standing_metrics
from paceline.core._run_opening import RESUME_VARIABLE, OpenedRun, run_name
from paceline.core._tensorboard_files import PathMangler, PathSelector, TensorboardFiles

logger = logging.getLogger(__name__)

# Reports may follow each other in microseconds, and a person reads a few in a second.
_INTERVAL_S = 0.1
_TRAINING, _VALIDATION = "training", "validation"
_MAX_METADATA_BYTES = 64 * 1024


def ending_of(error: BaseException | None) -> str:
    """Return the word for an end by an exception, or by none."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    outcome = outcome_of(error)
    if outcome is Outcome.PREEMPTED:
        return "preempted"
    return COMPLETED if outcome is Outcome.COMPLETED else f"failed ({type(error).__name__})"


def is_unfinished(ending: str) -> bool:
    """Return whether a run with such an ending is there to be resumed."""
    return ending in ("interrupted", "preempted") or ending.startswith("failed")


def resumed_from(opened: OpenedRun) -> str:
    """Return where a run resumes, in words; nothing for a new one."""
    if opened.memory_state is not None:
        return f"resumes at step {opened.steps_completed} from memory"
    if opened.latest_checkpoint is not None:
        return f"resumes at step {opened.steps_completed} from {opened.latest_checkpoint}"
    return "resumes without a checkpoint" if opened.attempt else ""


class RunFeedback:
    """Lines for the person who started a run.

    A trial of a master shows nothing, as its reports are shown by the master.

    Args:
        path: The run directory.
        info: What is recorded about the run.
        num_workers: How many workers there are.
        is_quiet: Whether to show nothing, as on ranks other than the chief.
        resuming: Code that resumes the run where there is no command, as a format of the
            directory.
        trials: The directory with the runs of a search's trials.

    Attributes:
        is_quiet: Whether nothing is shown.
    """

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        *,
        num_workers: int = 1,
        is_quiet: bool = False,
        resuming: str = "init(resume={!r})",
        trials: Path | None = None,
    ) -> None:
        self._path, self._name = path, info.name
        self._num_workers = num_workers
        self._resuming, self._trials = resuming, trials
        self.is_quiet = is_quiet or bool(info.cluster_id)
        # `paceline experiment create --local` has lines of its own around its trial.
        self._is_framed = not self.is_quiet and info.trial is None
        self._progress = TrainingProgress(None, "batches", is_quiet=self.is_quiet, is_terse=True)
        self._began = time.monotonic()
        self._next = {"training": 0.0, "validation": 0.0}
        self._newest: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._is_handed_over = self.is_quiet
        self._is_started = False
        self._shown: str | None = None
        self._lock = threading.Lock()

    def begin(self, what: str = "", more: str = "") -> None:
        """Show what runs, and where.

        Args:
            what: What runs; the script by default.
            more: More to say, such as where it resumes.
        """
        if not self._is_framed:
            return
        script = Path(sys.argv[0]).name if sys.argv else ""
        is_script = script.endswith(".py") and not is_notebook()
        workers = f" on {self._num_workers} workers" if self._num_workers > 1 else ""
        run = f"run {shortest_path(str(self._path))}"
        name = what or (script if is_script else self._name)
        show_lines("  ".join(filter(None, (f"{name}{workers}", run, more))))

    def report(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Show a report of a script that has no trainer; the newest ten times a second at most."""
        if self._is_handed_over or group not in self._next:
            return
        now = time.monotonic()
        self._newest[group] = (steps_completed, metrics)
        if now >= self._next[group]:
            self._next[group] = now + _INTERVAL_S
            self._show(group)

    def note_progress(self, fraction: float) -> None:
        """Derive the length of the training from its completed fraction."""
        if self._newest and fraction > 0:
            self._progress.expect(round(self._num_steps / fraction))

    def hand_over(self) -> None:
        """Show no progress any more, as a trainer shows its own."""
        if not self._is_handed_over:
            self._is_handed_over = True
            self._progress.close()

    def end(
        self,
        ending: str,
        storage: str | None = None,
        checkpoint: str | None = None,
        resume: str | None = None,
    ) -> None:
        """Show how the run has ended, unless a trainer has shown that.

        Args:
            ending: Such as "completed", "interrupted" or "failed (ValueError)".
            storage: Where checkpoints are stored.
            checkpoint: The UUID of the newest.
            resume: See `details`.
        """
        is_failure = ending not in (COMPLETED, "preempted")
        if self._shown is not None and not (is_failure and self._shown != ending):
            return
        details = self.details(ending, storage, checkpoint, resume)
        if not self._is_handed_over and self._newest:
            metrics = {group: metrics for group, (_, metrics) in self._newest.items()}
            self._progress.update(
                self._num_steps, 0, metrics.get("training"), validation=metrics.get("validation")
            )
            self._progress.end(ending, *details)
        elif self._is_framed:
            word = "in" if ending == COMPLETED else "after"
            seconds = format_duration(time.monotonic() - self._began)
            show_lines(f"{ending} {word} {seconds}", *details)

    def details(
        self, ending: str, storage: str | None, checkpoint: str | None, resume: str | None = None
    ) -> tuple[str, ...]:
        """Return the lines below an end: where the run is, how to look, how to resume.

        Args:
            ending: See `end`.
            storage: Where checkpoints are stored.
            checkpoint: The UUID of the newest.
            resume: How to resume a run that is not resumed by its directory.
        """
        self._shown = ending
        places = locations_of(self._path, storage, checkpoint)
        if not self._is_framed:
            return places
        path = shortest_path(str(self._path))
        is_here = path == f"{RUNS_DIRECTORY}/{self._path.name}"
        look = f"look: paceline runs show {shlex.quote(self._path.name if is_here else path)}"
        if self._trials is not None:
            look = f"look: paceline runs list {shlex.quote(shortest_path(str(self._trials)))}"
        if not is_unfinished(ending):
            return *places, look
        if resume is not None:
            return *places, look, f"resume: {resume}"
        if checkpoint is None:
            return *places, look, "no checkpoint: the next start begins anew"
        return *places, look, f"resume: {self._resume_command()}"

    @property
    def _num_steps(self) -> int:
        return max(steps for steps, _ in self._newest.values())

    def _show(self, group: str) -> None:
        # Reports come from any thread, and from handlers of signals.
        if not self._lock.acquire(blocking=False):
            return
        try:
            steps_completed, metrics = self._newest[group]
            if not self._is_started:
                self._is_started = True
                self._progress.start(steps_completed, began=self._began)
            self._progress.report(metrics, group, steps_completed=steps_completed)
        finally:
            self._lock.release()

    def _resume_command(self) -> str:
        """Return the command that resumes the run, or the code in a notebook."""
        path = shortest_path(str(self._path))
        if is_notebook() or hasattr(sys, "ps1"):
            return self._resuming.format(path)
        # A later run of a process has a number in its name, and finds itself by that.
        is_first = not self._name.startswith(f"{run_name()}-")
        variable = f"{RESUME_VARIABLE}={shlex.quote(path) if is_first else 'auto'}"
        with suppress(ValueError):
            command = sys.orig_argv if launched_place() is None else _launch_command()
            if (
                sys.argv
                and "-c" not in command
                and (sys.argv[0] in command or "-m" in command and launched_place() is None)
            ):
                return f"{variable} {shlex.join(command)}"
        return f"{variable} before the same command"


def _launch_command() -> list[str]:
    """Return the command that has started the launcher of this process, as far as it is known.

    The launcher is an ancestor whose arguments name the script; the first such process counts, as
    of `paceline run`, which starts a launcher itself.
    """
    # Imported late, as most runs have no launcher.
    import psutil

    command: list[str] = []
    # Processes of other users may not be looked at, and may end meanwhile.
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            if sys.argv[0] not in (arguments := process.cmdline()):
                break
            command = arguments
    return command


faults.register("core.report")


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
            self._note_best(records.decode_value(encoded[self._searched_metric]))

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
        self._journal.append(records.ProgressReported(time=time.time(), progress=float(progress)))
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
                self._journal.append(records.EarlyExitReported(time=time.time(), reason=value))

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
        self._journal.append(
            records.StatusReported(time=time.time(), status=status[: records.MAX_STATUS])
        )

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
            self._journal.append(records.RunMetadataSet(time=time.time(), metadata=plain))

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
        best = float(records.decode_value(told))
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
        encoded = records.encode_metrics(metrics)
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


def alert_of(title: str, description: str, level: str) -> records.AlertRaised:
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
    if level not in records.ALERT_LEVELS:
        raise ValueError(
            f"`level` must be one of {', '.join(records.ALERT_LEVELS)}, but got {level!r}."
        )
    return records.AlertRaised(time=time.time(), title=title, description=description, level=level)


def log_alert(alert: records.AlertRaised, rank: int) -> None:
    """Log an alert of a run without a trial log."""
    text = ": ".join(filter(None, (alert.title, alert.description)))
    logger.log(_LOGGED_LEVELS[alert.level], "Alert of rank %d: %s", rank, text)
