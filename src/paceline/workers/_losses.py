"""How often workers may be lost until a run fails."""

import logging

from paceline.workers._errors import WorkersLostError, is_told

logger = logging.getLogger(__name__)


class LossCounter:
    """Count lost workers.

    Args:
        limit: How often workers may be lost.
        hint: What follows the message of the error, such as where the output is; may be empty.

    Attributes:
        num_losses: How often they were lost.
    """

    def __init__(self, limit: float, hint: str) -> None:
        self.num_losses = 0
        self._limit = limit
        self._hint = hint
        self._last_exit: tuple[int | None, int] = None, 0

    def add(self, error: Exception, num_commits: int) -> None:
        """Count a loss.

        Args:
            error: The loss.
            num_commits: How many checkpoints the run has committed by now.

        Raises:
            WorkersLostError: There were too many, or workers leave by the same code again and
                again.
            Exception: `error`, if no worker was lost.
        """
        exit_code = getattr(error, "exit_code", None)
        if exit_code == 0 or (exit_code is None and is_told(error)):
            # The user's own, or an end that was meant: neither is repeated.
            raise error
        self.num_losses += 1
        last = f"{error} {self._hint}".rstrip()
        this_exit = exit_code, num_commits
        if exit_code is not None and this_exit == self._last_exit:
            raise WorkersLostError(
                "Workers that leave by `sys.exit()` are started again once, but left by the same"
                f" code again with nothing stored in between: {last}",
                self.num_losses,
            ) from error
        self._last_exit = this_exit
        if self.num_losses > self._limit:
            raise WorkersLostError(
                f"Workers must not be lost more often than `max_retries` ({self._limit:g}) allows,"
                f" but were {self.num_losses} time(s). The last time: {last}",
                self.num_losses,
            ) from error

    def tell(self, error: Exception, start: str) -> None:
        """Log a loss, and from where workers start again."""
        logger.warning(
            "%s Starting the workers again (%d of %g), %s.",
            error,
            self.num_losses,
            self._limit,
            start,
        )
