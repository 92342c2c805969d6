"""Preemption of a run of a train function: by a signal to its driver, or by its master."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline import core
from paceline.journal import RunDirectory
from paceline.workers.processes._signals import noted_signals
from paceline.workers.processes._worker_exit import signal_name

logger = logging.getLogger(__name__)

# How long a signal lets a run go on to its next checkpoint, in seconds; what Slurm gives a job.
_GRACE_S = 30.0


class PreemptionWatch:
    """Tell when a run is to end for another one.

    A train function stores its state by itself, so the run ends with its next checkpoint. After a
    signal that may take 30 s; a run that has stored none and does not ask `should_preempt()` ends
    by the signal at once, and so does any run at the second one.

    Args:
        run: The run directory, in which a master says that the run is to make room.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._control = core.ControlFile(run)
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
        """Have a function that asks store a checkpoint now, from which other workers go on."""
        if self._is_moving or not _listener_path(self._run).exists():
            return
        with suppress(OSError):
            _move_path(self._run).touch()
            self._is_moving = True

    def end_move(self) -> None:
        """Note that other workers follow."""
        if self._is_moving:
            self._is_moving = False
            _move_path(self._run).unlink(missing_ok=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take over SIGTERM and SIGUSR1 for a while, if this is the main thread."""
        with noted_signals(("SIGTERM", "SIGUSR1"), self._note):
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

    def _note(self, signum: int) -> None:
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
    """Note that a function asks whether it is to make room, so that it is given the time to."""
    with suppress(OSError):
        # A node that does not see the run directory cannot be told, either.
        _listener_path(run).touch()


def is_to_move(run: RunDirectory) -> bool:
    """Tell whether a function is to store a checkpoint from which workers on other nodes go on."""
    return _move_path(run).exists()


def _listener_path(run: RunDirectory) -> Path:
    return run.path / "asks_should_preempt"


def _move_path(run: RunDirectory) -> Path:
    return run.path / "workers_move"


def _end_by(signum: int) -> None:
    """End this process by a signal, and the workers with it."""
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)
