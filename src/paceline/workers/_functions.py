"""A function of the driver, run in worker processes on this machine."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.workers._call import Call, read_error, read_value, write_call
from paceline.workers._echo import Echo
from paceline.workers._environment import Placement, PortReservation
from paceline.workers._errors import Told, WorkerFailedError, told_error
from paceline.workers._local import LocalGroup
from paceline.workers._program import PROGRAM_FILE
from paceline.workers._spec import WorkerExit, first_failure, local_specs
from paceline.workers._supervise import supervise


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
        group = LocalGroup(specs, Echo(lambda: num_workers), directory, grace_s=grace_s)
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


def _error_of(failure: WorkerExit, exits: Sequence[WorkerExit], directory: Path) -> BaseException:
    """Return the error that tells of a failure."""
    rank, told = failure.rank, read_error(directory, failure.rank)
    count = f", the first of {len(exits)} to fail" if len(exits) > 1 else ""
    if told is None:
        return WorkerFailedError(
            f"{failure.describe().replace('rank', 'Rank', 1)}{count}; its output is above.", rank
        )
    # What was stopped only because of this failure has no error of its own.
    others = [exit_ for exit_ in exits if exit_.error and exit_ is not failure]
    first = Told(rank, told.error, told.traceback, f"rank {rank} raised {failure.error}")
    return told_error(first, len(exits), [exit_.describe() for exit_ in others])
