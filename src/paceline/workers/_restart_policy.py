"""The policy of a worker group after a failure: whether it starts again, and why.

Pure: it reads no clock and starts no process. A group asks `RestartPolicy.decide`.
"""

import logging
from collections.abc import Collection
from typing import NamedTuple

from paceline._errors import text_of
from paceline.workers._errors import (
    OUTPUT_IS,
    CollectiveMismatchError,
    RemoteTraceback,
    WorkerFailedError,
    WorkersLostError,
    is_told,
)
from paceline.workers.processes._worker_exit import signal_name

logger = logging.getLogger(__name__)

# From so many losses without a checkpoint in between on, restarts are said to make no progress.
_NO_PROGRESS = 3
# Further characters of what ended workers are not recorded.
_LONGEST_CAUSE = 500


class RestartDecision(NamedTuple):
    """RestartDecision to restart a group after a failure or not, and the reason.

    `text` is a phrase such as "restart 1 of 3", else a sentence; empty if nobody asked.
    """

    is_restart: bool
    text: str


class RestartPolicy:
    """Decides after each failure whether a group starts again, and counts the restarts.

    Workers that were lost are started again. An exit code or an exception is followed by a restart
    as well, if those are retried; but if the next start ends by the same one and has committed no
    checkpoint, the program is at fault, and another start would be of no use. What was asked to end
    is not started again.

    Args:
        limit: How often workers may be lost.
        option: The name of the argument that sets the limit.
        retries_errors: Whether exceptions of the user's function are followed by a restart.
        hint: What follows the message of `WorkersLostError`; may be empty.

    Attributes:
        num_losses: How often workers were lost.
    """

    def __init__(
        self,
        limit: float,
        *,
        option: str = "max_retries",
        retries_errors: bool = False,
        hint: str = "",
    ) -> None:
        self.num_losses = 0
        self._limit = limit
        self._option = option
        self._retries_errors = retries_errors
        self._hint = hint
        self._last: tuple[str, int] | None = None
        self._commits = 0
        self._num_in_vain = 0

    def decide(
        self, error: BaseException, num_commits: int, received: Collection[int] = ()
    ) -> RestartDecision:
        """Decide what follows a failure.

        Args:
            error: The error of the call that failed.
            num_commits: How many checkpoints were committed by now, since the first start.
            received: The signals that this process has received meanwhile.
        """
        exit_code = _exit_code(error)
        if exit_code == 0 or (_is_raised(error) and not self._retries_errors):
            # An end that was meant is never repeated.
            return RestartDecision(False, "")
        reason = _restart_reason(error)
        is_same = reason is not None and (reason, num_commits) == self._last
        self._last = None if reason is None else (reason, num_commits)
        self.num_losses += 1
        self._num_in_vain = self._num_in_vain + 1 if num_commits == self._commits else 1
        self._commits = num_commits
        if not self._limit:
            return RestartDecision(False, "")
        if received:
            names = " and ".join(sorted(signal_name(number) for number in received))
            return RestartDecision(False, f"No restart follows, as this process received {names}.")
        if is_same:
            return RestartDecision(
                False,
                "No restart follows, as the workers failed the same way twice with no checkpoint"
                " in between.",
            )
        if self.num_losses > self._limit:
            return RestartDecision(False, f"No restart is left of {self._limit:g}.")
        text = f"restart {self.num_losses} of {self._limit:g}"
        if self._num_in_vain >= _NO_PROGRESS:
            text += f", no progress in the last {self._num_in_vain} starts"
        return RestartDecision(True, text)

    def check(self, error: Exception, num_commits: int, start: str | None = None) -> None:
        """Decide what follows a failure; log a restart, and raise if there is none.

        Args:
            error: The error of the call that failed.
            num_commits: How many checkpoints were committed by now.
            start: From where the workers go on, for the log.

        Raises:
            WorkersLostError: Workers were lost too often, or fail the same way again.
            Exception: `error`, if it is an exception of the user's.
        """
        decision = self.decide(error, num_commits)
        if decision.is_restart:
            from_where = "" if start is None else f", {start}"
            logger.warning(
                "%s Starting the workers again, %s%s.",
                text_of(error),
                decision.text,
                from_where,
            )
            return
        if _exit_code(error) == 0 or _is_raised(error):
            raise error
        why = (
            f"Workers must not be lost more often than `{self._option}` ({self._limit:g}) allows,"
            f" but were {self.num_losses} time(s)."
        )
        if decision.text and self.num_losses <= self._limit:
            why = decision.text
        raise WorkersLostError(
            f"{why} The last time: {error} {self._hint}".rstrip(), self.num_losses
        ) from error


def describe_failure(error: BaseException) -> str:
    """Return what happened as a sentence, such as "Rank 1 raised ValueError: boom."."""
    cause = error.__cause__
    headline = cause.headline if isinstance(cause, RemoteTraceback) else ""
    return f"{headline}." if headline else text_of(error)


def restart_cause(error: BaseException) -> str:
    """Return what happened as a sentence to record, where no output is beside it."""
    text, found, _ = describe_failure(error).partition(OUTPUT_IS)
    if found:
        return f"{text}."
    return text if len(text) <= _LONGEST_CAUSE else f"{text[: _LONGEST_CAUSE - 3]}..."


def _exit_code(error: BaseException) -> int | None:
    """Return what a worker has left with; None for users' exceptions, which may have codes too."""
    return error.exit_code if isinstance(error, WorkerFailedError) else None


def _is_raised(error: BaseException) -> bool:
    """Tell whether an error is the program's own, and not the loss of a worker."""
    has_left = _exit_code(error) is not None
    is_mismatch = isinstance(error, CollectiveMismatchError)
    return is_mismatch or (is_told(error) and not has_left)


def _restart_reason(error: BaseException) -> str | None:
    """Return what tells a program's own failure from others; None for workers that were lost."""
    exit_code = _exit_code(error)
    if _is_raised(error):
        return f"{type(error).__name__}: {text_of(error)}"
    # Which rank is the first of several to fail is a matter of chance.
    return None if exit_code is None else str(exit_code)
