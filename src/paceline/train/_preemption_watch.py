"""Watch of a driver for requests to leave: signals, the runner, and moves to other nodes."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline._base.run_directory import RunDirectory
from paceline._training.workers.processes.process_facts_and_signals import noted_signals
from paceline._training.workers.worker_failures import signal_name
from paceline.core._exceptions import PreemptedError
from paceline.core._preemption_and_search import ControlFile

logger = logging.getLogger(__name__)


# How long a signal lets a run work until its next checkpoint, in seconds; as Slurm gives a job.
_GRACE_S = 30.0


class PreemptionWatch:
    """Watch for preemption of a run: by a signal, or by a message of a master.

    A train function stores its state by itself, so the run ends with its next checkpoint. After a
    signal that may take 30 s; a run that has stored none and does not ask `should_preempt()` ends
    by the signal at once, and so does any run at the second one.

    Args:
        run: The run directory, in which a master says that the run is to make room.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._control = ControlFile(run)
        self._signum: int | None = None
        self._deadline: float | None = None
        self._num_commits: int | None = None
        self._is_moving = False
        # A driver that was killed may have left it.
        _move_path(run).unlink(missing_ok=True)

    @property
    def is_moving(self) -> bool:
        """Whether the function is to make room for workers on other nodes, and nothing else."""
        return self._is_moving and self._signum is None and self._num_commits is None

    def ask_to_move(self) -> None:
        """Ask the function to store a checkpoint now, for continuing on other workers."""
        if self._is_moving or not _listener_path(self._run).exists():
            return
        # Without the file nothing is asked, and the next call tries again.
        with suppress(OSError):
            _move_path(self._run).touch()
            self._is_moving = True

    def end_move(self) -> None:
        """Mark the move to other workers as done."""
        if self._is_moving:
            self._is_moving = False
            _move_path(self._run).unlink(missing_ok=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take over SIGTERM and SIGUSR1 for a while, if this is the main thread."""
        with noted_signals(("SIGTERM", "SIGUSR1"), self._note_signal):
            yield

    def is_due(self, num_commits: int) -> bool:
        """Tell whether the run is to end now.

        Args:
            num_commits: How many checkpoints it has stored.
        """
        is_wanted = self._signum is not None or self._control.read().should_preempt
        if is_wanted and self._num_commits is None:
            self._begin(num_commits)
        if self._num_commits is None:
            return False
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        return is_over or num_commits > self._num_commits

    def _note_signal(self, signum: int) -> None:
        if self._signum is not None:
            _end_by(signum)
        self._signum = signum

    def _begin(self, num_commits: int) -> None:
        self._num_commits = num_commits
        if self._signum is None:
            logger.info("The master wants the run to make room: it ends with its next checkpoint.")
            return
        if not num_commits and not _listener_path(self._run).exists():
            _end_by(self._signum)
        # The function may ask whether it is to store a checkpoint now.
        self._run.write_control(msgspec.structs.replace(self._control.read(), should_preempt=True))
        self._deadline = time.monotonic() + _GRACE_S
        logger.warning(
            "%s: the run ends with its next checkpoint, after %g s at the latest; the same signal"
            " again ends it at once.",
            signal_name(self._signum),
            _GRACE_S,
        )


def note_listener(run: RunDirectory) -> None:
    """Mark the function as asking `should_preempt()`, so a signal leaves time for an answer."""
    with suppress(OSError):
        # A node that does not see the run directory cannot be asked, either.
        _listener_path(run).touch()


def is_to_move(run: RunDirectory) -> bool:
    """Return whether to store a checkpoint now, to continue on workers of other nodes."""
    return _move_path(run).exists()


def _listener_path(run: RunDirectory) -> Path:
    return run.path / "asks_should_preempt"


def _move_path(run: RunDirectory) -> Path:
    return run.path / "workers_move"


def _end_by(signum: int) -> None:
    """End this process, and so its workers, by the default action of a signal."""
    # Default action: the exit status then names the signal.
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)


class StoppedError(PreemptedError):
    """Raised by `report` when the driver of a stepwise run ends the run there."""
