"""Feedback of a run to the person who started it: beginning, progress of reports, end."""

import shlex
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline._base.progress_display import (
    COMPLETED,
    TrainingProgress,
    format_duration,
    locations_of,
    shortest_path,
)
from paceline._base.progress_regions import is_notebook, show_lines
from paceline._base.run_directory import RunInfo
from paceline.core._arguments import Outcome
from paceline.core._attempt_journal import outcome_of
from paceline.core._launcher_place import launched_place
from paceline.core._read_runs import RUNS_DIRECTORY
from paceline.core._run_directories import RESUME_VARIABLE, OpenedRun, run_name

# Reports may follow each other in microseconds, and a person reads a few in a second.
_INTERVAL_S = 0.1


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
        self,
        ending: str,
        storage: str | None,
        checkpoint: str | None,
        resume: str | None = None,
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
