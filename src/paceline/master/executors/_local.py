"""Run attempts on this machine: one runner process each, in a session of its own."""

import logging
import os
import shutil
import signal
from pathlib import Path

import msgspec

from paceline.journal import RunDirectory
from paceline.master.executors._base import (
    AttemptStatus,
    Executor,
    ExecutorContext,
    Launch,
)
from paceline.master.executors._runner_host import RunnerHost, StartedRunner
from paceline.messages.states import ExitReason
from paceline.runner import AttemptDirectory, note_attempt

logger = logging.getLogger(__name__)


class LocalExecutor(Executor):
    """Keep attempts in ``<root>/<attempt id>/``."""

    def __init__(self, root: Path, home: Path) -> None:
        self._root = root
        self._home = home
        self._host = RunnerHost(home)
        self._children: dict[int, StartedRunner] = {}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @classmethod
    def make(cls, context: ExecutorContext) -> "LocalExecutor":
        """Return the executor of a master."""
        return cls(context.attempts, context.home)

    def start(self, launch: Launch) -> None:
        """Start an attempt's runner."""
        directory = self._directory(launch.spec.attempt_id)
        if not directory.is_prepared:
            note_attempt(self._root, launch.spec.attempt_id)
            spec = msgspec.structs.replace(launch.spec, home=str(self._home))
            directory = AttemptDirectory.create(directory.path, spec)
            RunDirectory.create(directory.run.path, launch.info)
        self._start_runner(directory, is_shipping=False)

    def status(self, attempt_id: int) -> AttemptStatus:
        """Tell whether an attempt's runner is at work."""
        child = self._children.get(attempt_id)
        if child is not None:
            if child.is_alive():
                return AttemptStatus.ALIVE
            self._children.pop(attempt_id, None)
        directory = self._directory(attempt_id)
        if directory.runner_pid() is not None:
            return AttemptStatus.ALIVE
        return AttemptStatus.GONE if directory.was_started else AttemptStatus.NOT_STARTED

    def ship(self, attempt_id: int) -> None:
        """Send what a dead or departed runner left behind."""
        self._start_runner(self._directory(attempt_id), is_shipping=True)

    def sign_of_life(self, attempt_id: int) -> object:
        """Return when a runner last gave a sign of life."""
        return self._directory(attempt_id).sign_of_life()

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner; what is left of its processes is ended before the rest is shipped."""
        child = self._children.get(attempt_id)
        if child is not None and child.is_alive():
            # It may not have the lock yet.
            child.kill()
        elif pid := self._directory(attempt_id).runner_pid():
            os.kill(pid, signal.SIGKILL)

    def clean(self, keep: set[int]) -> None:
        """Remove the directories of ended attempts whose runner has left."""
        for attempt_id in list(self._children):
            if not self._children[attempt_id].is_alive():
                del self._children[attempt_id]
        for path in self._root.iterdir():
            if not path.name.isdecimal() or int(path.name) in keep | self._children.keys():
                continue
            directory = AttemptDirectory(path)
            if directory.runner_pid() is not None:
                continue
            if directory.was_started and not directory.has_end:
                # Its runner was lost after the attempt had ended for the master.
                self._end_leftovers(directory)
            if not _is_kept(directory):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """End the process that forks runners; runners go on."""
        self._host.close()

    @staticmethod
    def _end_leftovers(directory: AttemptDirectory) -> None:
        # Seldom needed, and it loads more of the runner than the master needs.
        from paceline.runner._end import end_leftovers, leave_word, make_end

        end_leftovers(directory)
        leave_word(directory, make_end(ExitReason.RUNNER_LOST))

    def _directory(self, attempt_id: int) -> AttemptDirectory:
        return AttemptDirectory(self._root / str(attempt_id))

    def _start_runner(self, directory: AttemptDirectory, *, is_shipping: bool) -> None:
        runner = self._host.start(directory, is_shipping=is_shipping)
        self._children[int(directory.path.name)] = runner


def _is_kept(directory: AttemptDirectory) -> bool:
    try:
        return directory.is_prepared and directory.read_spec().keep_directory
    except (OSError, msgspec.DecodeError):
        return False  # damaged: nobody can use it
