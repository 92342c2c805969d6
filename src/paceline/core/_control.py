"""Reading what the runner last said."""

import os

from paceline.journal import Control, RunDirectory


class ControlFile:
    """Follow a run directory's `control.json`; a call costs one `stat` while it is unchanged."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._path = os.fspath(run.control_path)
        self._identity: tuple[int, int] | None = None
        self._control = Control()
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """How often `read` has found a file that was not there before."""
        return self._num_changes

    def read(self) -> Control:
        """Return the runner's last word, or the defaults if it has said nothing."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return self._control
        identity = (status.st_ino, status.st_mtime_ns)
        if identity != self._identity:
            self._control = self._run.read_control()
            self._identity = identity
            self._num_changes += 1
        return self._control
