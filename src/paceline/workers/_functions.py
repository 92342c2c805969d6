"""A function of the driver, run in worker processes on this machine."""

import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.workers._call import Call, read_error, read_value, write_call
from paceline.workers._echo import Echo
from paceline.workers._environment import Placement, PortReservation
from paceline.workers._errors import Told, WorkerFailedError, told_error
from paceline.workers._leaving import left_error
from paceline.workers._local import LocalGroup
from paceline.workers._program import PROGRAM_FILE
from paceline.workers._restarts import Restarts, Start, describe_failure, offered_restarts
from paceline.workers._spec import WorkerExit, WorkerProcess, first_failure, local_specs
from paceline.workers._supervise import supervise

logger = logging.getLogger(__name__)


def call_in_workers(
    function: Callable[..., Any],
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    grace_s: float = 10.0,
    max_restarts: int = 0,
    heartbeat_timeout_s: float | None = 30.0,
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
        max_restarts: How often the workers are started again after a failure, see `Restarts`. A
            run of the function goes on from its last checkpoint then.
        heartbeat_timeout_s: How long a worker may be stopped or hold Python's lock, in seconds;
            None for ever.

    Raises:
        NotSendableError: The function, an argument or a value that it returned cannot be pickled.
        WorkerFailedError: A worker was ended by a signal or left by `sys.exit()`, whatever its
            exit code.
        WorkerStartError: A worker cannot be started.
        Exception: What the function raised on the rank that failed first, with the traceback of
            that rank as its cause.
    """
    call = Call(function, tuple(args), dict(kwargs or {}))
    restarts = Restarts(offered_restarts(max_restarts))
    variables: dict[str, str] = {}
    while True:
        start = Start()
        end = _call_once(call, num_workers, grace_s, heartbeat_timeout_s, variables)
        if end.failure is None:
            return end.values
        start.note(end.processes)
        verdict = start.follow(restarts, end.failure, end.received)
        if not verdict.is_restart:
            raise _raised(end)
        logger.warning(
            "%s. Starting them again, %s.",
            describe_failure(end.failure, num_workers),
            verdict.text,
        )
        variables |= start.resume_variables()


class _End(NamedTuple):
    """How the workers of one start have ended; either with values or by an error."""

    values: list[Any]
    failure: WorkerExit | None
    error: BaseException | None
    received: set[int]
    processes: Sequence[WorkerProcess]


def _call_once(
    call: Call,
    num_workers: int,
    grace_s: float,
    heartbeat_timeout_s: float | None,
    variables: Mapping[str, str],
) -> _End:
    with tempfile.TemporaryDirectory(prefix="paceline-call-") as name, PortReservation() as port:
        directory = Path(name)
        write_call(directory, call)
        placement = Placement(num_local_workers=num_workers, master_port=port.port)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
        command = [sys.executable, *flags, PROGRAM_FILE, "call", name]
        specs = local_specs(command, placement, signals_whole_group=False, environment=variables)
        group = LocalGroup(
            [replace(spec, must_return=True) for spec in specs],
            Echo(lambda: num_workers),
            directory,
            grace_s=grace_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        exits, received = supervise(group)
        failure = first_failure(exits)
        if failure is None:
            values = [read_value(directory, exit_.rank) for exit_ in exits]
            return _End(values, None, None, received, group.processes)
        error = _error_of(failure, exits, directory)
        return _End([], failure, error, received, group.processes)


def _raised(end: _End) -> BaseException:
    """Return the error to raise for an end, unless this process ends by a signal."""
    assert end.failure is not None
    assert end.error is not None
    if end.failure.signal in end.received and end.failure.signal != signal.SIGINT:
        # The driver was asked to end, and its workers did not take that as their own affair.
        signal.raise_signal(end.failure.signal)
    if signal.SIGINT in end.received and not isinstance(end.error, KeyboardInterrupt):
        interrupt = KeyboardInterrupt()
        interrupt.__cause__ = end.error
        return interrupt
    return end.error


def _error_of(failure: WorkerExit, exits: Sequence[WorkerExit], directory: Path) -> BaseException:
    """Return the error that tells of a failure."""
    rank, told = failure.rank, read_error(directory, failure.rank)
    if failure.is_early:
        where = "" if told is None else told.traceback
        return left_error(rank, len(exits), failure.left_by, failure.code, where)
    count = f", the first of {len(exits)} to fail" if len(exits) > 1 else ""
    if told is None:
        return WorkerFailedError(
            f"{failure.describe().replace('rank', 'Rank', 1)}{count}; its output is above.", rank
        )
    # What was stopped only because of this failure has no error of its own.
    others = [exit_ for exit_ in exits if exit_.error and exit_ is not failure]
    first = Told(rank, told.error, told.traceback, f"rank {rank} raised {failure.error}")
    return told_error(first, len(exits), [exit_.describe() for exit_ in others])
