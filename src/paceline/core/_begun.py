"""Which runs the processes of a launcher have begun, so that the next ones go on with them."""

import os
from collections.abc import Collection
from pathlib import Path

from paceline.core._placement import RESUME_VARIABLE
from paceline.core._runs import RUNS_DIRECTORY, RunState, run_state_at
from paceline.journal import AttemptStarted, CheckpointStored, JournalKey, RunDirectory

# Clocks of file systems and processes differ by less.
_SLACK_S = 2.0


class BegunRuns:
    """The runs that the processes of one start have begun, or have gone on with.

    Args:
        since: When the processes were started, in seconds since the epoch.
        pids: The processes; None for any of this machine.
    """

    def __init__(self, since: float, pids: Collection[int] | None) -> None:
        self._root = Path.cwd() / RUNS_DIRECTORY
        self._since = since - _SLACK_S
        self._pids = pids

    def paths(self) -> list[Path]:
        """Return their run directories, oldest first."""
        paths = sorted(self._root.iterdir()) if self._root.is_dir() else []
        return [path for path in paths if any(self._journals(path))]

    def num_checkpoints(self) -> int:
        """Return how many checkpoints these processes have committed."""
        return sum(
            isinstance(entry.decode(), CheckpointStored)
            for path in self.paths()
            for key in self._journals(path)
            for entry in RunDirectory(path).reader(key)
        )

    def are_completed(self) -> bool:
        """Tell whether there is a run, and all of them have come to their end."""
        states = {run_state_at(path) for path in self.paths()}
        return states == {RunState.COMPLETED}

    def variables(self) -> dict[str, str]:
        """Return the variables that have the next processes go on from the last checkpoints.

        A script with one run is told its directory, so that no other job's run of the same name
        can be meant. One with several finds each by its name.
        """
        paths = self.paths()
        if not paths:
            return {}
        return {RESUME_VARIABLE: str(paths[0]) if len(paths) == 1 else "auto"}

    def _journals(self, path: Path) -> list[JournalKey]:
        """Return the journals that these processes have written in a run directory."""
        folder = path / "journal"
        if not folder.is_dir() or folder.stat().st_mtime < self._since:
            return []
        run = RunDirectory(path)
        keys = run.journal_keys()
        return [key for key in keys if key.attempt == keys[-1].attempt and self._is_own(run, key)]

    def _is_own(self, run: RunDirectory, key: JournalKey) -> bool:
        entry = next(iter(run.reader(key)), None)
        record = None if entry is None else entry.decode()
        return (
            isinstance(record, AttemptStarted)
            and record.time >= self._since
            and record.host == os.uname().nodename
            and (self._pids is None or record.pid in self._pids)
        )
