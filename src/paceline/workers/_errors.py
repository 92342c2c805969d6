"""Errors that a driver raises if a worker fails."""

from collections.abc import Iterable
from typing import NamedTuple

from paceline._errors import CollectiveMismatchError as CollectiveMismatchError
from paceline._errors import PicklableError

_TEXT_CHARACTERS = 200


class WorkerStartError(RuntimeError):
    """Raised when a worker's process cannot be started."""


class PlacementError(WorkerStartError):
    """Raised when resources that seemed to be free could not be had in time."""


class PlacementTimeoutError(PlacementError):
    """Raised when resources were not there in time, as others have them or no node came."""


# Follows what happened to a worker, in messages beside which its output is.
OUTPUT_IS = "; its output is "


class WorkerFailedError(PicklableError, RuntimeError):
    """Raised when a worker ended without an exception that the driver could raise.

    `rank` is that of the worker which failed first, `exit_code` what it left with if it left by
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
    """Raised when parameters, rates or buffers that all ranks must have alike are not the same."""


class ResourcesError(ValueError):
    """Raised when the workers are to have more than there is."""


class NodesDifferError(RuntimeError):
    """Raised when a node cannot run workers as its versions or options are not the driver's."""


class TrainingFailedError(PicklableError, RuntimeError):
    """The base of the errors of a run that are no exceptions of the user's code."""


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
    """The cause of an error that a worker raised: its text there, with the rank.

    `headline` is one phrase such as "Rank 1 raised ValueError: boom, the first of 2 to fail".
    """

    headline = ""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text.rstrip()}"


def is_told(error: BaseException) -> bool:
    """Tell whether an error is what a rank's function raised, and not the loss of a worker.

    Args:
        error: What a call of a pool has raised, which may be a `WorkerFailedError` in both cases.
    """
    return isinstance(error.__cause__, RemoteTraceback)


class Told(NamedTuple):
    """Exception that a rank's function raised, as the driver knows it.

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
