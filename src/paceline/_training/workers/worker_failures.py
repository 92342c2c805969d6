"""Failures of workers: exits, errors raised by a driver, and the restart policy."""

import logging
import signal
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from paceline._base.exceptions import CollectiveMismatchError, PicklableError, text_of

logger = logging.getLogger(__name__)

_TEXT_CHARACTERS = 200


class WorkerStartError(RuntimeError):
    """Raised when a worker's process cannot be started."""


class PlacementError(WorkerStartError):
    """Raised when apparently free resources could not be had in time."""


class PlacementTimeoutError(PlacementError):
    """Raised when resources were not there in time, as others have them or no node came."""


# Ends messages about a worker, where its output is shown beside them.
OUTPUT_IS = "; its output is "


class WorkerFailedError(PicklableError, RuntimeError):
    """Raised when a worker ended without an exception for the driver to raise.

    `rank` is the first failed worker's, `exit_code` its exit code if it left by
    itself, also with 0 before its function had returned, and `signal` the number of the signal that
    ended it if one did. `is_consequence` says that the end only answers another worker's failure.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        exit_code: int | None = None,
        signal: int | None = None,
        *,
        is_consequence: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_consequence = is_consequence
        self.rank = rank
        self.exit_code = exit_code
        self.signal = signal


class RanksDifferError(RuntimeError):
    """Raised when parameters, rates or buffers differ between ranks, but must be the same."""


class StepsDifferError(RuntimeError):
    """Raised when a step gives other bits as it is computed again from the same state."""


class ResourcesError(ValueError):
    """Raised when the workers are to have more than there is."""


class NodesDifferError(RuntimeError):
    """Raised when a node cannot run workers as its versions or options are not the driver's."""


class TrainingFailedError(PicklableError, RuntimeError):
    """Base of a run's errors, apart from exceptions of the user's code."""


class RunDirectoryError(TrainingFailedError):
    """Raised when a node does not see the run directory of the driver."""


class WorkersLostError(TrainingFailedError):
    """Raised when workers were lost more often than `max_retries` allows.

    `num_losses` counts the losses.
    """

    def __init__(self, message: str, num_losses: int) -> None:
        super().__init__(message)
        self.num_losses = num_losses


class NotEnoughWorkersError(TrainingFailedError):
    """Raised when fewer workers than the least number could run for too long.

    `wanted` is that number, `available` how many could run at last.
    """

    def __init__(self, message: str, wanted: int, available: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.available = available


class RemoteTraceback(Exception):
    """Cause of a worker's error: its traceback text there, with the rank.

    `headline` is one phrase such as "Rank 1 raised ValueError: boom, the first of 2 to fail".
    """

    headline = ""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text.rstrip()}"


def is_told(error: BaseException) -> bool:
    """Return whether an error was raised by a rank's function, not by the loss of a worker.

    Args:
        error: The error of a pool's call, which may be a `WorkerFailedError` in both cases.
    """
    return isinstance(error.__cause__, RemoteTraceback)


def without_our_frames(error: BaseException) -> BaseException:
    """Return an error of the workers without the frames of the driver, which explain nothing."""
    if isinstance(error, (WorkerFailedError, WorkersLostError)) or is_told(error):
        error.__traceback__ = None
        if isinstance(error.__cause__, WorkerFailedError):
            error.__cause__.__traceback__ = None
    return error


class Told(NamedTuple):
    """Exception raised by a rank's function, as known to the driver.

    `error` is None if the exception could not travel. `description` is one phrase such as
    "rank 1 raised ValueError: ...".
    """

    rank: int
    error: BaseException | None
    traceback: str
    description: str


def told_error(first: Told, world_size: int, others: Iterable[str]) -> BaseException:
    """Return the error to raise for a rank's exception; its cause is the traceback there.

    Args:
        first: The exception of the rank that failed first.
        world_size: The number of workers.
        others: What became of the other ranks that failed, one phrase each.
    """
    error = first.error
    if error is None:
        what = first.description.removeprefix(f"rank {first.rank} raised ")
        error = WorkerFailedError(
            f"Rank {first.rank} raised an exception that cannot travel to the driver: {what}",
            first.rank,
        )
    count = f", the first of {world_size} to fail" if world_size > 1 else ""
    lines = [f"Rank {first.rank} raised{count}:", "", first.traceback.rstrip()]
    then = [f"Then {_in_short(other)}." for other in others]
    cause = RemoteTraceback("\n".join([*lines, *([""] if then else []), *then]))
    cause.headline = f"{_in_short(first.description).replace('rank', 'Rank', 1)}{count}"
    # Classes such as frozen dataclasses forbid it by a `__setattr__` of their own.
    BaseException.__setattr__(error, "__cause__", cause)
    return error


def _in_short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """Record of a worker's exit.

    Attributes:
        rank: The worker's rank.
        code: The verdict: 0 for success. The worker's own one if it sent one, else its
            exit code, or 128 + the number of the signal that ended it.
        signal: The number of the signal that ended the process, if one did.
        finished: The worker itself said that it had run to its end; what happened to the process
            after that is no failure.
        error: The type and text of the exception that ended it, if it said so.
        time: When it failed or ended, in seconds since the epoch.
        is_consequence: The error only answers the failure of another rank, or the group's own
            signal.
        lost_with: The part lost together with the worker, such as its node, if nothing else is
            known.
        silence: Why it was ended, if it had given no sign of life.
    """

    rank: int
    code: int
    signal: int | None = None
    finished: bool = False
    error: str | None = None
    time: float = 0.0
    is_consequence: bool = False
    lost_with: str | None = None
    silence: str | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the worker did not succeed."""
        return self.code != 0

    def describe(self) -> str:
        """Return a phrase, for example "rank 1 exited with code 3"."""
        if self.lost_with is not None:
            return f"rank {self.rank} was lost with {self.lost_with}"
        if self.silence is not None:
            return f"rank {self.rank} {self.silence}"
        if self.signal is not None and not self.finished:
            return f"rank {self.rank} was ended by {signal_name(self.signal)}"
        reason = f" ({self.error})" if self.error else ""
        return f"rank {self.rank} exited with code {self.code}{reason}"


def signal_name(signum: int) -> str:
    """Return the name of a signal, for example "SIGTERM"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


# Number of losses in a row without a checkpoint that is reported as no progress.
_NO_PROGRESS = 3
# Further characters of what ended workers are not recorded.
_LONGEST_CAUSE = 500


class RestartDecision(NamedTuple):
    """Decision whether to restart a group after a failure, and the reason.

    `text` is a phrase such as "restart 1 of 3", else a sentence; empty if nobody asked.
    """

    is_restart: bool
    text: str


@dataclass(eq=False, repr=False)
class RestartPolicy:
    """Decides after each failure whether a group starts again, and counts the restarts.

    Workers that were lost are started again. An exit code or an exception is followed by a restart
    as well, if those are retried; but if the next start ends by the same one and has committed no
    checkpoint, the program is at fault, and another start would be of no use. A worker asked to end
    is not started again.

    Args:
        limit: How often workers may be lost.
        option: The name of the argument that sets the limit.
        retries_errors: Whether exceptions of the user's function are followed by a restart.
        hint: What follows the message of `WorkersLostError`; may be empty.

    Attributes:
        num_losses: How often workers were lost.
    """

    limit: float
    _: KW_ONLY
    option: str = "max_retries"
    retries_errors: bool = False
    hint: str = ""

    def __post_init__(self) -> None:
        self.num_losses = 0
        self._last: tuple[str, int] | None = None
        self._commits = 0
        self._num_in_vain = 0

    def decide(
        self, error: BaseException, num_commits: int, received: Collection[int] = ()
    ) -> RestartDecision:
        """Return whether a restart follows a failure, and the reason.

        Args:
            error: The error of the call that failed.
            num_commits: How many checkpoints were committed by now, since the first start.
            received: The signals that this process has received meanwhile.
        """
        exit_code = _exit_code(error)
        if exit_code == 0 or (_is_raised(error) and not self.retries_errors):
            # An end that was meant is never repeated.
            return RestartDecision(False, "")
        reason = _restart_reason(error)
        is_same = reason is not None and (reason, num_commits) == self._last
        self._last = None if reason is None else (reason, num_commits)
        self.num_losses += 1
        self._num_in_vain = self._num_in_vain + 1 if num_commits == self._commits else 1
        self._commits = num_commits
        if not self.limit:
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
        if self.num_losses > self.limit:
            return RestartDecision(False, f"No restart is left of {self.limit:g}.")
        text = f"restart {self.num_losses} of {self.limit:g}"
        if self._num_in_vain >= _NO_PROGRESS:
            text += f", no progress in the last {self._num_in_vain} starts"
        return RestartDecision(True, text)

    def check(self, error: Exception, num_commits: int, start: str | None = None) -> None:
        """Log the restart after a failure, or raise if no restart follows.

        Args:
            error: The error of the call that failed.
            num_commits: How many checkpoints were committed by now.
            start: Where the workers resume from, for the log.

        Raises:
            WorkersLostError: Workers were lost too often, or fail the same way again.
            Exception: `error`, if it is an exception of the user's.
        """
        decision = self.decide(error, num_commits)
        if decision.is_restart:
            from_where = "" if start is None else f", {start}"
            logger.warning(
                "%s Starting the workers again, %s%s.", text_of(error), decision.text, from_where
            )
            return
        if _exit_code(error) == 0 or _is_raised(error):
            raise error
        why = (
            f"Workers must not be lost more often than `{self.option}` ({self.limit:g}) allows,"
            f" but were {self.num_losses} time(s)."
        )
        if decision.text and self.num_losses <= self.limit:
            why = decision.text
        raise WorkersLostError(
            f"{why} The last time: {error} {self.hint}".rstrip(), self.num_losses
        ) from error


def describe_failure(error: BaseException) -> str:
    """Return a sentence on a failure, for example "Rank 1 raised ValueError: boom."."""
    cause = error.__cause__
    headline = cause.headline if isinstance(cause, RemoteTraceback) else ""
    return f"{headline}." if headline else text_of(error)


def restart_cause(error: BaseException) -> str:
    """Return a sentence on a failure for records, without a reference to the output."""
    text, found, _ = describe_failure(error).partition(OUTPUT_IS)
    if found:
        return f"{text}."
    return text if len(text) <= _LONGEST_CAUSE else f"{text[: _LONGEST_CAUSE - 3]}..."


def _exit_code(error: BaseException) -> int | None:
    """Return a lost worker's exit code; None for users' exceptions, even those with a code."""
    return error.exit_code if isinstance(error, WorkerFailedError) else None


def _is_raised(error: BaseException) -> bool:
    """Tell whether an error is the program's own, and not the loss of a worker."""
    has_left = _exit_code(error) is not None
    is_mismatch = isinstance(error, CollectiveMismatchError)
    return is_mismatch or (is_told(error) and not has_left)


def _restart_reason(error: BaseException) -> str | None:
    """Return a key of the program's own failure, to detect a repeat; None for lost workers."""
    exit_code = _exit_code(error)
    if _is_raised(error):
        return f"{type(error).__name__}: {text_of(error)}"
    # Rank is left out: chance decides which of several ranks fails first.
    return None if exit_code is None else str(exit_code)
