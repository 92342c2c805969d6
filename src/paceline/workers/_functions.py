"""A function of the driver, run in worker processes on this machine."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.workers._call import Call, read_error, read_value, write_call
from paceline.workers._environment import Placement, PortReservation
from paceline.workers._local import LocalGroup
from paceline.workers._output import OutputLine
from paceline.workers._program import PROGRAM_FILE
from paceline.workers._spec import WorkerExit, first_failure, local_specs
from paceline.workers._supervise import supervise

_ERROR_CHARACTERS = 200


class WorkerFailedError(RuntimeError):
    """Raised when a worker ended without an exception that the driver could raise.

    `rank` is that of the worker which failed first.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RemoteTraceback(Exception):
    """The cause of an error that a worker raised: its text there, with the rank."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text.rstrip()}"


def call_in_workers(
    function: Callable[..., Any],
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    grace_s: float = 10.0,
) -> list[Any]:
    """Call a function in new worker processes and return what it returned, in rank order.

    The workers see the driver's environment, working directory and module path. What they print
    goes to the driver's `sys.stdout` and `sys.stderr`, with the rank before each line if there are
    several.

    Args:
        function: What to call, in every worker alike.
        num_workers: The number of workers.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        grace_s: The time in seconds that the other workers get when one fails.

    Raises:
        NotSendableError: The function, an argument or a value that it returned cannot be pickled.
        WorkerFailedError: A worker was ended by a signal or left by `sys.exit()`.
        WorkerStartError: A worker cannot be started.
        Exception: What the function raised on the rank that failed first, with the traceback of
            that rank as its cause.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-call-") as name, PortReservation() as port:
        directory = Path(name)
        write_call(directory, Call(function, tuple(args), dict(kwargs or {})))
        placement = Placement(num_local_workers=num_workers, master_port=port.port)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
        command = [sys.executable, *flags, PROGRAM_FILE, "call", name]
        specs = local_specs(command, placement, signals_whole_group=False)
        group = LocalGroup(specs, _Echo(num_workers), directory, grace_s=grace_s)
        exits, received = supervise(group)
        failure = first_failure(exits)
        if failure is None:
            return [read_value(directory, exit_.rank) for exit_ in exits]
        error = _error_of(failure, exits, directory)
    if failure.signal in received and failure.signal != signal.SIGINT:
        # The driver was asked to end, and its workers did not take that as their own affair.
        signal.raise_signal(failure.signal)
    if signal.SIGINT in received and not isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt from error
    raise error


class _Echo:
    """Write the workers' lines to the driver's streams, as they are at that moment."""

    def __init__(self, num_workers: int) -> None:
        self._is_one_of_many = num_workers > 1

    def __call__(self, line: OutputLine) -> None:
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        prefix = f"[rank={line.rank}] " if self._is_one_of_many else ""
        # Training goes on when nobody reads any more.
        with suppress(OSError, ValueError, AttributeError):
            stream.write(f"{prefix}{line.text}\n")
            stream.flush()


def _error_of(failure: WorkerExit, exits: Sequence[WorkerExit], directory: Path) -> BaseException:
    """Return the error that tells of a failure."""
    rank, told = failure.rank, read_error(directory, failure.rank)
    count = f", the first of {len(exits)} to fail" if len(exits) > 1 else ""
    if told is None:
        return WorkerFailedError(
            f"{failure.describe().replace('rank', 'Rank', 1)}{count}; its output is above.", rank
        )
    error = told.error
    if error is None:
        error = WorkerFailedError(
            f"Rank {rank} raised an exception that cannot travel to the driver: {failure.error}",
            rank,
        )
    others = [exit_ for exit_ in exits if exit_.is_failure and exit_ is not failure]
    lines = [f"Rank {rank} raised{count}:", "", told.traceback.rstrip()]
    lines += [""] * bool(others) + [f"Then {_in_short(exit_)}." for exit_ in others]
    error.__cause__ = RemoteTraceback("\n".join(lines))
    return error


def _in_short(exit_: WorkerExit) -> str:
    text = exit_.describe()
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}..."
