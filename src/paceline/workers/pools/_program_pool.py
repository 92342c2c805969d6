"""Workers that are programs of their own: one command for each, from its start to its end."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from paceline.workers.pools._generation import Generation
from paceline.workers.pools._local_generation import LocalServingGroup
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._served_pool import ServedPool
from paceline.workers.processes._output_reader import OnLine
from paceline.workers.processes._rank_environment import NodeLayout
from paceline.workers.processes._worker_program import CHANNEL_VARIABLE
from paceline.workers.processes._worker_spec import WorkerSpec, local_specs

WorkerVariables: TypeAlias = Callable[[NodeLayout], Sequence[Mapping[str, str]]]
"""Returns more variables for each worker of this node; called for each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Command that each worker runs.

    Attributes:
        arguments: The program and its arguments.
        is_python: The process is the program itself, and not a shell that starts it.
    """

    arguments: tuple[str, ...]
    is_python: bool


class ProgramPool(ServedPool):
    """A launcher's workers on this machine: they take no calls, but are one call by themselves.

    They are judged as those of other pools are: by how they end, by a stop of their process, and,
    if they use Paceline, by their signs of life and the collective operations that they wait in.

    Args:
        command: What each worker runs.
        layout: Returns where so many workers meet; called for each start.
        capacity: Returns how many could run at this moment.
        environment: Variables for the workers besides those of this process.
        worker_variables: Returns more variables for each worker, besides those that place it.
        on_line: Gets each output line; None leaves a single worker this process's own streams.
        heartbeat_timeout_s: How long a worker may give no sign of life, in seconds.
        collective_timeout_s: How long ranks may wait for others, in seconds.
        grace_s: The time in seconds that the other workers get when one fails.
    """

    def __init__(
        self,
        command: WorkerCommand,
        layout: Callable[[int], NodeLayout],
        capacity: Callable[[], int],
        *,
        environment: Mapping[str, str],
        worker_variables: WorkerVariables = lambda layout: (),
        on_line: OnLine,
        heartbeat_timeout_s: float,
        collective_timeout_s: float,
        grace_s: float,
    ) -> None:
        super().__init__(
            1,
            environment=environment,
            on_line=on_line,
            heartbeat_timeout_s=heartbeat_timeout_s,
            collective_timeout_s=collective_timeout_s,
            grace_s=grace_s,
            threads_per_worker=None,
        )
        self._settings = self._settings._replace(lost_grace_s=grace_s)
        self._command = command
        self._layout = layout
        self._worker_variables = worker_variables
        self._capacity = capacity
        self._program: PendingCall | None = None

    @property
    def program(self) -> PendingCall:
        """The call that the workers of the last start consist in."""
        assert self._program is not None, "A pool must have been started."
        return self._program

    def capacity(self) -> int:
        """Return how many workers could run at this moment; see `WorkerPool.capacity`."""
        return self._capacity()

    def _make_generation(self) -> Generation:
        layout = self._layout(self._num_workers)
        specs = local_specs(
            self._command.arguments,
            layout,
            signals_whole_group=not self._command.is_python,
            environment=self._environment,
        )
        for index, variables in enumerate(self._worker_variables(layout)):
            environment = {**specs[index].environment, **variables}
            specs[index] = replace(specs[index], environment=environment)
        pairs = [socket.socketpair() for _ in specs]
        specs = [_with_channel(spec, end) for spec, (_, end) in zip(specs, pairs, strict=True)]
        self._program = PendingCall(next(self._numbers), [spec.rank for spec in specs])
        return Generation(
            [ours for ours, _ in pairs],
            lambda on_exit: LocalServingGroup(
                specs,
                [theirs for _, theirs in pairs],
                # A single worker keeps this process's terminal.
                self._on_line if layout.world_size > 1 else None,
                on_exit,
                adopt_strays=True,
            ),
            self._settings,
            self._program,
            layout=layout,
        )

    def _release(self) -> None:
        """Do nothing: what generations use ends with them."""


def _with_channel(spec: WorkerSpec, end: socket.socket) -> WorkerSpec:
    descriptor = end.fileno()
    name = f"{descriptor}:{os.fstat(descriptor).st_ino}"
    return replace(
        spec,
        environment={**spec.environment, CHANNEL_VARIABLE: name},
        descriptors=(descriptor,),
    )
