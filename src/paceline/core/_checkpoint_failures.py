"""Checkpoints that could not be stored while training went on."""

import logging
import time

from paceline.storage import CheckpointWriteError, UploadLimits

logger = logging.getLogger(__name__)

# With so many in a row, over so long, training would lose more and more if it were killed. A store
# that is away for some minutes does not end it. The time is in times of what one try may take.
_MAX_IN_A_ROW = 3
_LEAST_TIME = 10


class StoreFailures:
    """Say whether training goes on after a checkpoint that could not be stored.

    It does unless it is the third or a later one in a row, and the first of them was at least ten
    times `PACELINE_STORE_PART_TIMEOUT_S` before: ten minutes by default. The newest checkpoint of a
    training must be there: `check_newest` raises its error.
    """

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._first_s = 0.0
        self._newest: BaseException | None = None

    @property
    def is_newest_lost(self) -> bool:
        """Whether the newest checkpoint could not be stored."""
        return self._newest is not None

    def note_stored(self) -> None:
        """Take in that a checkpoint was stored."""
        self._num_in_a_row, self._newest = 0, None

    def note_lost(self, error: BaseException) -> None:
        """Take in that a checkpoint could not be stored.

        Raises:
            BaseException: `error`, if training must not go on.
        """
        now, least_s = time.monotonic(), _LEAST_TIME * UploadLimits.from_environment().part_s
        if self._num_in_a_row == 0:
            self._first_s = now
        self._num_in_a_row, self._newest = self._num_in_a_row + 1, None
        is_last = self._num_in_a_row >= _MAX_IN_A_ROW and now - self._first_s >= least_s
        if is_last or not isinstance(error, CheckpointWriteError):
            raise error
        self._newest = error
        logger.error(
            "A checkpoint could not be stored. Training goes on; the checkpoint before it stays the"
            " newest one. Training ends if %d or more in a row cannot be stored for %g s (this is"
            " number %d). %s",
            _MAX_IN_A_ROW,
            least_s,
            self._num_in_a_row,
            error,
        )

    def check_newest(self) -> None:
        """Raise the error of the newest checkpoint if that was not stored."""
        if self._newest is not None:
            error, self._newest = self._newest, None
            raise error
