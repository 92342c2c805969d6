"""The attempts of one machine: a directory and a runner process for each."""

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.journal import RunDirectory, RunInfo
from paceline.messages.attempts import AttemptSpec
from paceline.messages.states import ExitReason
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._runner_processes import RunnerHost, StartedRunner

logger = logging.getLogger(__name__)

# How long an unwanted attempt may take to leave by itself: it has just ended, or hears of it.
_LEAVE_S = 10.0


class AttemptProcesses:
    """Start, find, kill and clean the attempts in ``<root>/<attempt id>/``; used by one thread.

    What was started goes on without this process, and is found again by the next one.

    Args:
        root: The directory of the attempts' directories.
        cwd: Where runners work.
    """

    def __init__(self, root: Path, cwd: Path) -> None:
        self._root = root
        self._host = RunnerHost(cwd)
        self._children: dict[int, StartedRunner] = {}
        self._unwanted_at: dict[int, float] = {}
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def prepare(
        self, spec: AttemptSpec, info: RunInfo, secrets: dict[str, str] | None = None
    ) -> None:
        """Write the directory of an attempt, unless it is there.

        Args:
            spec: All that the attempt's runner needs.
            info: All that the attempt's processes need.
            secrets: Values for a runner that does not see the home, which it removes.
        """
        path = self.directory(spec.attempt_id).path
        directory = AttemptDirectory.create(path, spec)
        if not directory.was_started:
            # A power cut may have left a part of what was prepared before.
            shutil.rmtree(directory.run.path, ignore_errors=True)
        if secrets:
            directory.write_secrets(secrets)
        RunDirectory.create(directory.run.path, info)

    def start(self, attempt_id: int) -> None:
        """Start the runner of a prepared attempt; one that was started before runs once."""
        self._start_runner(attempt_id, is_shipping=False)

    def ship(self, attempt_id: int) -> None:
        """Send what a dead or departed runner left behind."""
        self._start_runner(attempt_id, is_shipping=True)

    def is_prepared(self, attempt_id: int) -> bool:
        """Tell whether an attempt's directory holds all that a runner needs."""
        return self.directory(attempt_id).is_prepared

    def is_alive(self, attempt_id: int) -> bool:
        """Tell whether an attempt's runner is at work."""
        child = self._children.get(attempt_id)
        if child is not None:
            if child.is_alive():
                return True
            self._children.pop(attempt_id, None)
        return self.directory(attempt_id).runner_pid() is not None

    def was_started(self, attempt_id: int) -> bool:
        """Tell whether an attempt's entrypoint was ever started here."""
        return self.directory(attempt_id).was_started

    def sign_of_life(self, attempt_id: int) -> object:
        """Return when a runner last gave a sign of life."""
        return self.directory(attempt_id).sign_of_life()

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner; what is left of its processes is ended before the rest is shipped."""
        child = self._children.get(attempt_id)
        if child is not None and child.is_alive():
            # It may not have the lock yet.
            child.kill()
        else:
            self.signal_runner(attempt_id, signal.SIGKILL)

    def signal_runner(self, attempt_id: int, number: signal.Signals) -> None:
        """Send a signal to a runner that is at work; one that ends at this moment gets none."""
        if pid := self.directory(attempt_id).runner_pid():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def all(self) -> list[int]:
        """Return the ids of the attempts that have a directory, sorted."""
        return sorted(int(path.name) for path in self._paths())

    def clean(self, keep: set[int]) -> None:
        """Remove the directories of ended attempts whose runner has left, except those to keep.

        A runner that does not leave by itself is killed after a while.
        """
        self._end_unwanted(keep)
        for attempt_id in list(self._children):
            if not self._children[attempt_id].is_alive():
                del self._children[attempt_id]
        for path in self._paths():
            if int(path.name) in keep | self._children.keys():
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

    def directory(self, attempt_id: int) -> AttemptDirectory:
        """Return the directory of an attempt, which may not be there."""
        return AttemptDirectory(self._root / str(attempt_id))

    def _paths(self) -> Iterator[Path]:
        return (path for path in self._root.iterdir() if path.name.isdecimal())

    def _end_unwanted(self, wanted: set[int]) -> None:
        """Kill runners of attempts that ended for the master a while ago."""
        now = time.monotonic()
        here = {id_ for id_ in self.all() if id_ not in wanted}
        for attempt_id in self._unwanted_at.keys() - here:
            del self._unwanted_at[attempt_id]
        for attempt_id in here:
            since = self._unwanted_at.setdefault(attempt_id, now)
            if now > since + _LEAVE_S and self.is_alive(attempt_id):
                logger.warning("Attempt %d is not wanted any more and is killed.", attempt_id)
                self.kill_runner(attempt_id)

    @staticmethod
    def _end_leftovers(directory: AttemptDirectory) -> None:
        # Seldom needed, and it loads more of the runner than the master needs.
        from paceline.runner._attempt_end_report import make_attempt_end, write_attempt_end
        from paceline.runner._attempt_leftovers import end_leftovers

        end_leftovers(directory)
        write_attempt_end(directory, make_attempt_end(ExitReason.RUNNER_LOST))

    def _start_runner(self, attempt_id: int, *, is_shipping: bool) -> None:
        directory = self.directory(attempt_id)
        self._children[attempt_id] = self._host.start(directory, is_shipping=is_shipping)


def _is_kept(directory: AttemptDirectory) -> bool:
    try:
        return directory.is_prepared and directory.read_spec().keep_directory
    except (OSError, msgspec.DecodeError):
        return False  # damaged: nobody can use it
