"""A generation of workers on this machine: the group of their processes, and what each serves."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.workers.pools._failure_detector import (
    PoolSettings,
)
from paceline.workers.pools._generation import Generation
from paceline.workers.pools._serve_calls import serve_target
from paceline.workers.processes._local_worker_group import LocalGroup, OnExit
from paceline.workers.processes._output_reader import OnLine
from paceline.workers.processes._process_start import Start
from paceline.workers.processes._worker_spec import WorkerSpec


class LocalServingGroup(LocalGroup):
    """Workers of this machine, each of which gets one end of a socket.

    Args:
        specs: The workers, in rank order, whose descriptors these ends are.
        ends: The workers' ends, which are closed here once the workers have them.
        on_line: Gets each output line.
        on_exit: Gets each exit.
        options: Further arguments of `LocalGroup`.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        ends: Sequence[socket.socket],
        on_line: OnLine | None,
        on_exit: OnExit,
        **options: Any,
    ) -> None:
        super().__init__(specs, on_line, on_exit=on_exit, **options)
        self._ends = ends

    def start(self) -> None:
        try:
            super().start()
        except BaseException:
            # After a Ctrl-C workers may still be about to be started, with these descriptors.
            self.stop(0.0)
            raise
        finally:
            for end in self._ends:
                end.close()


def local_generation(
    specs: Sequence[WorkerSpec], on_line: OnLine, settings: PoolSettings, start: Start
) -> Generation:
    """Return a generation of workers on this machine.

    Args:
        specs: The workers, in rank order. What to serve is added to their commands.
        on_line: Gets each line of output.
        settings: How the workers are judged.
        start: Starts the process of a worker.
    """
    pairs = [socket.socketpair() for _ in specs]
    theirs = [end for _, end in pairs]
    serving = [
        serving_spec(spec, end.fileno(), settings.tick_s)
        for spec, end in zip(specs, theirs, strict=True)
    ]
    return Generation(
        [ours for ours, _ in pairs],
        lambda on_exit: LocalServingGroup(serving, theirs, on_line, on_exit, start=start),
        settings,
    )


def serving_spec(spec: WorkerSpec, descriptor: int, beat_s: float) -> WorkerSpec:
    """Return how to start a worker that serves its driver by a socket that it is given."""
    target = serve_target(descriptor, beat_s)
    return replace(spec, command=[*spec.command, target], descriptors=(descriptor,))
