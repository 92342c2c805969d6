"""Run the workers of this node to their end."""

import os
import select
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from paceline.launch._arguments import LaunchOptions
from paceline.launch._command import WorkerCommand
from paceline.workers import (
    LocalGroup,
    OutputLine,
    Placement,
    WorkerExit,
    WorkerProcess,
    local_specs,
    supervise,
)

_RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"


Watch = Callable[[LocalGroup], AbstractContextManager[object]]


class WorkersEnd(NamedTuple):
    """How workers have ended: their exits in rank order, the signals received, the processes."""

    exits: list[WorkerExit]
    received: set[int]
    processes: Sequence[WorkerProcess]


def run_workers(
    command: WorkerCommand,
    placement: Placement,
    options: LaunchOptions,
    variables: Mapping[str, str],
    watch: Watch,
) -> WorkersEnd:
    """Start the workers, pass on their output and signals, and return how they ended.

    Args:
        command: What each runs.
        placement: Where they meet.
        options: The launcher's options.
        variables: Variables for the workers besides those of this process.
        watch: Makes a context in which the group runs.
    """
    with _status_directory() as status_dir:
        specs = local_specs(
            command.arguments,
            placement,
            signals_whole_group=not command.is_python,
            environment=variables,
        )
        group = LocalGroup(
            specs,
            _LinePrinter() if placement.world_size > 1 else None,
            status_dir,
            grace_s=options.grace_s,
            adopt_strays=True,
            heartbeat_timeout_s=options.heartbeat_timeout_s or None,
        )
        with watch(group):
            exits, received = supervise(group)
    return WorkersEnd(exits, received, group.processes)


@contextmanager
def _status_directory() -> Iterator[Path]:
    parent = os.environ.get(_RUN_DIRECTORY_VARIABLE)
    is_usable = parent is not None and os.access(parent, os.W_OK)
    with tempfile.TemporaryDirectory(
        prefix="launch-", dir=parent if is_usable else None, ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


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
