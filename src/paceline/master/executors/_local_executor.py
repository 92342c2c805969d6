"""Run attempts on this machine."""

from pathlib import Path

import msgspec

from paceline.master.executors._executor_base import (
    AttemptStatus,
    Executor,
    ExecutorContext,
    Launch,
)
from paceline.runner import AttemptProcesses, note_attempt


class LocalExecutor(Executor):
    """Keep attempts in ``<root>/<attempt id>/``."""

    def __init__(self, root: Path, home: Path) -> None:
        self._root = root
        self._home = home
        self._processes = AttemptProcesses(root, home)

    @classmethod
    def make(cls, context: ExecutorContext) -> "LocalExecutor":
        """Return the executor of a master."""
        return cls(context.attempts, context.home)

    def start(self, launch: Launch) -> None:
        """Start an attempt's runner."""
        attempt_id = launch.spec.attempt_id
        if not self._processes.is_prepared(attempt_id):
            note_attempt(self._root, attempt_id)
            spec = msgspec.structs.replace(launch.spec, home=str(self._home))
            self._processes.prepare(spec, launch.info)
        self._processes.start(attempt_id)

    def status(self, attempt_id: int) -> AttemptStatus:
        """Tell whether an attempt's runner is at work."""
        if self._processes.is_alive(attempt_id):
            return AttemptStatus.ALIVE
        was_started = self._processes.was_started(attempt_id)
        return AttemptStatus.GONE if was_started else AttemptStatus.NOT_STARTED

    def ship(self, attempt_id: int) -> None:
        """Send what a dead or departed runner left behind."""
        self._processes.ship(attempt_id)

    def sign_of_life(self, attempt_id: int) -> object:
        """Return when a runner last gave a sign of life."""
        return self._processes.sign_of_life(attempt_id)

    def kill_runner(self, attempt_id: int) -> None:
        """Kill a runner; what is left of its processes is ended before the rest is shipped."""
        self._processes.kill_runner(attempt_id)

    def clean(self, keep: set[int]) -> None:
        """Remove the directories of ended attempts whose runner has left."""
        self._processes.clean(keep)

    def close(self) -> None:
        """End the process that forks runners; runners go on."""
        self._processes.close()
