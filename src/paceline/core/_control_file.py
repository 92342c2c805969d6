"""Reading what the runner last said."""

import logging
import os
import time

import msgspec

from paceline.journal import Control, RunDirectory

logger = logging.getLogger(__name__)

# A file that was written so short a time ago may be replaced by one with the same time and number.
_SETTLED_NS = 100_000_000


class ControlFile:
    """Follow a run directory's `control.json`; a call costs one `stat` while it is unchanged.

    A damaged file says nothing; the runner writes it anew.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._path = os.fspath(run.control_path)
        self._identity: tuple[int, int] | None = None
        self._is_settled = False
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
        if identity != self._identity or not self._is_settled:
            self._take(identity)
        return self._control

    def _take(self, identity: tuple[int, int]) -> None:
        is_settled = time.time_ns() - identity[1] > _SETTLED_NS
        try:
            control = self._run.read_control()
        except msgspec.DecodeError as error:
            control = self._control
            if identity != self._identity:
                logger.warning("%s is damaged (%s), and says nothing.", self._path, error)
        self._num_changes += identity != self._identity or control != self._control
        self._control, self._identity, self._is_settled = control, identity, is_settled
