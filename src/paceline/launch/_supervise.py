"""Run the workers of this node to their end."""

import logging
import os
import select
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from paceline.launch._arguments import LaunchOptions
from paceline.launch._command import WorkerCommand
from paceline.workers import (
    LocalGroup,
    OutputLine,
    Placement,
    WorkerExit,
    WorkerSpec,
    first_failure,
    rank_environment,
    signal_name,
)

logger = logging.getLogger("paceline.launch")

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = (signal.SIGTERM, signal.SIGINT)
_RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"


def run_workers(command: WorkerCommand, placement: Placement, options: LaunchOptions) -> int:
    """Start the workers, pass on their output and signals, and return the exit code."""
    # Numbers are signals that arrived; None is the end of all workers.
    events: SimpleQueue[int | None] = SimpleQueue()
    with _status_directory() as status_dir, _signals_to(events):
        group = LocalGroup(
            _specs(command, placement),
            _LinePrinter() if placement.world_size > 1 else None,
            status_dir,
            grace_s=options.grace_s,
            adopt_strays=True,
        )
        group.start()
        waiter = threading.Thread(target=_announce_end, args=(group, events))
        waiter.start()
        received = _follow(group, events)
        waiter.join()
        exits = group.wait() or []
    return _conclude(exits, received, placement)


def _specs(command: WorkerCommand, placement: Placement) -> list[WorkerSpec]:
    environments = [
        rank_environment(os.environ, placement, local_rank)
        for local_rank in range(placement.num_local_workers)
    ]
    return [
        WorkerSpec(
            command=command.arguments,
            environment=environment,
            working_directory=Path.cwd(),
            rank=int(environment["RANK"]),
            local_rank=local_rank,
            node_rank=placement.node_rank,
            world_size=placement.world_size,
            signals_whole_group=not command.is_python,
        )
        for local_rank, environment in enumerate(environments)
    ]


@contextmanager
def _status_directory() -> Iterator[Path]:
    parent = os.environ.get(_RUN_DIRECTORY_VARIABLE)
    is_usable = parent is not None and os.access(parent, os.W_OK)
    with tempfile.TemporaryDirectory(
        prefix="launch-", dir=parent if is_usable else None, ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


@contextmanager
def _signals_to(events: "SimpleQueue[int | None]") -> Iterator[None]:
    """Turn signals into events until the end; those that were ignored stay ignored."""

    def put(signum: int, _: FrameType | None) -> None:
        # A `SimpleQueue` may be put into from a signal handler.
        events.put(signum)

    numbers = [getattr(signal, name) for name in _FORWARDED]
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if previous[number] is not signal.SIG_IGN:
            signal.signal(number, put)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _announce_end(group: LocalGroup, events: "SimpleQueue[int | None]") -> None:
    group.wait()
    events.put(None)


def _follow(group: LocalGroup, events: "SimpleQueue[int | None]") -> set[int]:
    """Forward signals until all workers have ended; return the signals that arrived."""
    received: set[int] = set()
    while (event := events.get()) is not None:
        if event in received and event in _ENDING:
            logger.warning("%s again: the workers are killed.", signal_name(event))
            group.request_stop(grace_s=0.0)
        else:
            received.add(event)
            group.signal(event)
    return received


def _conclude(exits: list[WorkerExit], received: set[int], placement: Placement) -> int:
    failure = first_failure(exits)
    if failure is None:
        return 0
    text = failure.describe().replace("rank", "Rank", 1)
    if placement.world_size > 1:
        text += f", the first of {placement.world_size} to fail"
    if received:
        names = " and ".join(sorted(signal_name(number) for number in received))
        text += f", after the launcher had received {names}"
    logger.error("%s; its output is above.", text)
    return failure.code


class _LinePrinter:
    """Write each line as a whole, with its rank, to the stream that it came from."""

    def __init__(self) -> None:
        self._broken: set[int] = set()

    def __call__(self, line: OutputLine) -> None:
        descriptor = 1 if line.stream == "stdout" else 2
        data = f"[rank={line.rank}] {line.text}\n".encode()
        # Training goes on when nobody reads any more, as with `| head`.
        if descriptor not in self._broken and not _write_all(descriptor, data):
            self._broken.add(descriptor)


def _write_all(descriptor: int, data: bytes) -> bool:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True
