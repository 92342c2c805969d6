"""Run the workers of this node to their end."""

import logging
import os
import select
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.launch._arguments import LaunchOptions
from paceline.launch._command import WorkerCommand
from paceline.workers import (
    LocalGroup,
    OutputLine,
    Placement,
    WorkerExit,
    first_failure,
    local_specs,
    signal_name,
    supervise,
)

logger = logging.getLogger("paceline.launch")

_INTERRUPTED = 130
_RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"


def run_workers(command: WorkerCommand, placement: Placement, options: LaunchOptions) -> int:
    """Start the workers, pass on their output and signals, and return the exit code."""
    with _status_directory() as status_dir:
        group = LocalGroup(
            local_specs(command.arguments, placement, signals_whole_group=not command.is_python),
            _LinePrinter() if placement.world_size > 1 else None,
            status_dir,
            grace_s=options.grace_s,
            adopt_strays=True,
        )
        exits, received = supervise(group)
    return _conclude(exits, received, placement)


@contextmanager
def _status_directory() -> Iterator[Path]:
    parent = os.environ.get(_RUN_DIRECTORY_VARIABLE)
    is_usable = parent is not None and os.access(parent, os.W_OK)
    with tempfile.TemporaryDirectory(
        prefix="launch-", dir=parent if is_usable else None, ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


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
    is_interrupted = signal.SIGINT in received and failure.signal is not None
    return _INTERRUPTED if is_interrupted else failure.code


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
