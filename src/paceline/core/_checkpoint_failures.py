"""Checkpoints that could not be stored while training went on."""

import logging

from paceline.storage import CheckpointWriteError

logger = logging.getLogger(__name__)

# With so many in a row, training would lose more and more if it were killed.
_MAX_IN_A_ROW = 3


class StoreFailures:
    """Say whether training goes on after a checkpoint that could not be stored.

    It does unless it is the third in a row. The newest checkpoint of a training must be there:
    `check_newest` raises its error.
    """

    def __init__(self) -> None:
        self._num_in_a_row = 0
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
        self._num_in_a_row, self._newest = self._num_in_a_row + 1, None
        if not isinstance(error, CheckpointWriteError) or self._num_in_a_row >= _MAX_IN_A_ROW:
            raise error
        self._newest = error
        logger.error(
            "A checkpoint could not be stored. Training goes on; the checkpoint before it stays the"
            " newest one. Training ends if %d in a row cannot be stored (this is number %d). %s",
            _MAX_IN_A_ROW,
            self._num_in_a_row,
            error,
        )

    def check_newest(self) -> None:
        """Raise the error of the newest checkpoint if that was not stored."""
        if self._newest is not None:
            error, self._newest = self._newest, None
            raise error
