"""Pools of worker processes with a socket to the driver: base class, local, programs."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from paceline._base.process_and_network import PortReservation, num_cores
from paceline._training.workers.channels import RunEvents
from paceline._training.workers.pickled_calls import PackedCall, pack_call
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.rank_environment import (
    COLLECTIVE_TIMEOUT_VARIABLE,
    THREADS_MARK,
    THREADS_VARIABLE,
    NodeLayout,
)
from paceline._training.workers.processes.template_client import Template
from paceline._training.workers.processes.templates import ProgramStart, forking_start
from paceline._training.workers.processes.worker_output import LinePrinter
from paceline._training.workers.processes.worker_process import (
    OnLine,
    Start,
    WorkerProcess,
    WorkerSpec,
    local_specs,
    start_process,
)
from paceline._training.workers.processes.worker_program import CHANNEL_VARIABLE, PROGRAM_FILE
from paceline._training.workers.serve_calls import serve_target
from paceline._training.workers.shared_memory import SharedBuffers
from paceline._training.workers.stuck_ranks import WatchedRank
from paceline._training.workers.worker_failures import WorkerFailedError
from paceline._training.workers.worker_generation import Generation
from paceline._training.workers.worker_health import Assignment, PoolSettings
from paceline._training.workers.worker_pools import PendingCall, WorkerPool, checked_ranks

logger = logging.getLogger(__name__)


class ProcessPool(WorkerPool):
    """Pool with a new `Generation` of workers for each start.

    Implementers make the generations and know the capacity.

    Args:
        num_workers: The number of workers.
        environment: Variables for the workers besides those of their machines.
        on_line: Gets each output line of the workers, from threads of the pool, one at a time; by
            default they go to `sys.stdout` and `sys.stderr`, with the rank before each if there are
            several.
        heartbeat_timeout_s: How long a worker may give no sign of life until it counts as lost,
            in seconds. A worker that computes gives them; one that is stopped does not, nor one
            that holds Python's lock for so long.
        collective_timeout_s: How long ranks may wait for others in a collective operation, in
            seconds. If those have returned from the call, or are in another operation, five
            seconds are enough.
        grace_s: The time in seconds that the other workers get when a call fails on one.
        threads_per_worker: How many threads each worker computes with; the cores of its node are
            shared equally by default.

    Attributes:
        run_events: The events of runs from workers of the present or the last generation.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        environment: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
        heartbeat_timeout_s: float = 30.0,
        collective_timeout_s: float = 1800.0,
        grace_s: float = 10.0,
        threads_per_worker: int | None = None,
    ) -> None:
        check_at_least("num_workers", num_workers, 1)
        check_at_least("threads_per_worker", threads_per_worker, 1)
        check_at_least("grace_s", grace_s, 0)
        _check_above_0("heartbeat_timeout_s", heartbeat_timeout_s)
        _check_above_0("collective_timeout_s", collective_timeout_s)
        self._num_workers = num_workers
        self._threads_per_worker = threads_per_worker
        limit = {COLLECTIVE_TIMEOUT_VARIABLE: f"{collective_timeout_s:g}"}
        self._environment = dict(environment or {}) | limit
        if threads_per_worker is not None:
            # The mark has the number divided among workers that the workers start.
            threads = str(threads_per_worker)
            self._environment |= {THREADS_VARIABLE: threads, THREADS_MARK: threads}
        self._on_line = on_line or LinePrinter(lambda: self._num_workers)
        self._settings = PoolSettings(
            heartbeat_timeout_s=heartbeat_timeout_s,
            collective_timeout_s=collective_timeout_s,
            grace_s=grace_s,
        )
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._generation: Generation | None = None
        self.run_events = RunEvents()
        self._shared = SharedBuffers()

    @property
    def num_workers(self) -> int:
        """The number of workers, or how many the next start begins with."""
        return self._num_workers

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order."""
        return self._generation.processes if self._generation is not None else []

    @property
    def is_alive(self) -> bool:
        """Whether all workers are there and take calls."""
        generation = self._generation
        return generation is not None and generation.failure is None and not generation.is_over

    @property
    def is_ending(self) -> bool:
        """Whether a call has failed, and not all workers have ended."""
        generation = self._generation
        return generation is not None and generation.failure is not None and not generation.is_over

    @property
    def grace_s(self) -> float:
        """Time in seconds for the other workers to end after a call fails on a rank."""
        return self._settings.grace_s

    def start(self, num_workers: int | None = None) -> None:
        """Start a generation of workers; see `WorkerPool.start`."""
        check_at_least("num_workers", num_workers, 1)
        with self._lock:
            if self.is_alive:
                raise RuntimeError("A pool must not be started while its workers are alive.")
            self._end_generation(self._settings.grace_s)
            if num_workers is not None:
                self._num_workers = num_workers
            try:
                generation = self._make_generation()
                generation.start()
            except BaseException as error:
                self._release_after(error)
                raise
            self._generation, self.run_events = generation, generation.run_events

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Have workers call a function; see `WorkerPool.submit`."""
        return self.submit_packed(pack_call(function, args, kwargs, self._shared), ranks=ranks)

    def submit_packed(
        self, packed: PackedCall, *, ranks: Sequence[int] | None = None
    ) -> PendingCall:
        """Submit a call packed by `pack_call` to workers; see `WorkerPool.submit`."""
        wanted = checked_ranks(ranks, self._num_workers)
        generation = self._generation
        if generation is None:
            raise RuntimeError("A pool must be started before calls are submitted, but is not.")
        if isinstance(generation.failure, WorkerFailedError):
            raise generation.failure
        if generation.failure is not None:
            raise RuntimeError(
                "A pool must be started again after a failed call, but is not."
            ) from generation.failure
        call = PendingCall(next(self._numbers), wanted)
        generation.submit(Assignment(call, packed))
        return call

    def signal(self, signum: int) -> None:
        """Send a signal to all workers still running."""
        if self._generation is not None:
            self._generation.signal(signum)

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Have the workers ended after a time; see `WorkerPool.request_stop`."""
        if self._generation is not None:
            self._generation.request_stop(grace_s, is_asked=is_asked)

    def observations(self) -> list[WatchedRank]:
        """Return the known state of a program's ranks."""
        return [] if self._generation is None else self._generation.observations()

    def end_hung(self, error: Exception) -> None:
        """End all workers, with their stacks, as ranks of this node or others wait in vain."""
        if self._generation is not None:
            self._generation.end_hung(error)

    @property
    def refusal(self) -> Exception | None:
        """Error of the last workers' refusal of the hyperparameters, or None."""
        return None if self._generation is None else self._generation.refusal

    def resume_from(self, variables: Mapping[str, str]) -> None:
        """Make the next workers resume the runs named by variables."""
        for value in variables.values():
            logger.info("The next start resumes from the last checkpoint (%s).", value)
        self._environment |= variables

    def tell_restarts(self, causes: Sequence[str]) -> None:
        """Give the next workers the causes of past restarts to record; see `AttemptStarted`."""
        # Loads msgspec, which a launcher that never restarts has no need of.
        from paceline._base.run_directory import RESTART_CAUSES_VARIABLE

        self._environment |= {RESTART_CAUSES_VARIABLE: json.dumps(list(causes))}

    def drain(self, timeout_s: float) -> None:
        """Wait for the output of the workers; see `WorkerPool.drain`."""
        generation = self._generation
        if generation is not None:
            generation.drain(timeout_s)

    def await_end(self) -> None:
        """Wait until all workers have ended; see `WorkerPool.await_end`."""
        generation = self._generation
        if generation is not None and (generation.failure is not None or generation.is_program):
            generation.join(self._settings.grace_s)

    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """End the workers; see `WorkerPool.stop`."""
        with self._lock:
            self._end_generation(grace_s)
            if not is_restart:
                self._release()
                self._shared.clear()

    def shutdown(self, force: bool = False) -> None:
        """End the workers; `force` kills them at once."""
        self.stop(0.0 if force else self._settings.grace_s)

    @abstractmethod
    def _make_generation(self) -> Generation:
        """Return the next generation, not started yet; the last has ended."""

    @abstractmethod
    def _release(self) -> None:
        """Give back resources used by generations."""

    def _release_after(self, error: BaseException) -> None:
        """Give back resources used by a failed start."""
        self._release()

    def _end_generation(self, grace_s: float) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.end(grace_s)


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Raise a ValueError unless a number is None or at least so large."""
    if value is not None and not value >= least:
        raise ValueError(f"`{name}` must be at least {least}, but got {value!r}.")


def _check_above_0(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be above 0, but got {value!r}.")


class LocalPool(ProcessPool):
    """Warm worker processes on this machine.

    They see this process's environment, and the working directory and the module path that it has
    at each call. They end with this process, however it ends (on Linux).

    Args:
        num_workers: The number of workers.
        capacity: Returns how many workers could run at the moment, where something else than this
            machine decides it. By default that is the cores that this process may use, divided by
            `threads_per_worker`; without that, any number.
        preload: Modules that workers need at once; those that are forked have them loaded.
        fork_server: Whether workers are forked, on Linux, from a process that has torch loaded.
            It is started by the first pool and serves later ones of this process too. Without it
            each worker is a new interpreter.
        options: Those of `ProcessPool`.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        capacity: Callable[[], int] | None = None,
        preload: Sequence[str] = (),
        fork_server: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(num_workers, **options)
        self._capacity = capacity
        self._preload = tuple(preload)
        self._uses_fork_server = fork_server
        self._port: PortReservation | None = None

    def capacity(self) -> int:
        """Return how many workers could run at this moment; see `WorkerPool.capacity`."""
        if self._capacity is not None:
            return self._capacity()
        if self._threads_per_worker is None:
            return sys.maxsize
        return num_cores() // self._threads_per_worker

    def _make_generation(self) -> Generation:
        self._release()
        self._port = PortReservation()
        specs = self._specs(self._port.port)
        start: Start = start_process
        if self._uses_fork_server:
            start = forking_start(specs[0].environment, self._preload)
        return _local_generation(
            specs, self._with_target, self._on_line, self._settings, start=start
        )

    def _with_target(self, spec: WorkerSpec, end: socket.socket) -> WorkerSpec:
        target = serve_target(end.fileno(), self._settings.tick_s)
        return replace(spec, command=[*spec.command, target], descriptors=(end.fileno(),))

    def _release(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _specs(self, port: int) -> list[WorkerSpec]:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
        return local_specs(
            [sys.executable, *flags, PROGRAM_FILE, "serve"],
            NodeLayout(num_local_workers=self._num_workers, master_port=port),
            signals_whole_group=False,
            environment=self._environment,
        )


WorkerVariables: TypeAlias = Callable[[NodeLayout], Sequence[Mapping[str, str]]]
"""Returns more variables for each worker of this node; called for each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Command for each worker to run.

    Attributes:
        arguments: The program and its arguments.
        is_python: The process is the program itself, and not a shell that starts it.
    """

    arguments: tuple[str, ...]
    is_python: bool


class ProgramPool(ProcessPool):
    """Pool of a launcher's programs on this machine: takes no calls, each start is a call.

    They are judged as those of other pools are: by how they end, by a stop of their process, and,
    if they use Paceline, by their signs of life and the collective operations that they wait in.

    Args:
        command: The command line of each worker.
        layout: Returns where so many workers meet; called for each start.
        capacity: Returns how many could run at this moment.
        worker_variables: Returns more variables for each worker, besides those that place it.
        is_restarted: Whether there may be another start, to be prepared for.
        template: The template of the first start, if there is one.
        options: Those of `ProcessPool`.
    """

    def __init__(
        self,
        command: WorkerCommand,
        layout: Callable[[int], NodeLayout],
        capacity: Callable[[], int],
        *,
        worker_variables: WorkerVariables = lambda layout: (),
        is_restarted: bool = False,
        template: Template | None = None,
        **options: Any,
    ) -> None:
        super().__init__(1, **options)
        # Programs can still save their work after a loss, unlike the calls of other pools.
        self._settings = self._settings._replace(lost_grace_s=self.grace_s)
        self._command = command
        self._layout = layout
        self._worker_variables = worker_variables
        self._capacity = capacity
        self._is_restarted = is_restarted
        self._program: PendingCall | None = None
        self._program_start: ProgramStart | None = None
        if (is_restarted or template) and command.is_python:
            self._program_start = ProgramStart(
                command.arguments, lambda: self.run_events.loaded, template
            )

    @property
    def program(self) -> PendingCall:
        """Call made up of the programs of the last start."""
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
        self._environment_of_all = specs[0].environment
        self._program = PendingCall(next(self._numbers), [spec.rank for spec in specs])
        return _local_generation(
            specs,
            _with_channel,
            # A single worker keeps this process's terminal.
            self._on_line if layout.world_size > 1 else None,
            self._settings,
            self._program,
            layout,
            adopt_strays=True,
            start=start_process if self._program_start is None else self._program_start.start,
        )

    def start(self, num_workers: int | None = None) -> None:
        """Start the programs; see `WorkerPool.start`."""
        super().start(num_workers)
        if self._program_start is not None and self._is_restarted:
            self._program_start.learn(self.processes[0].pid, self._environment_of_all)
        elif self._program_start is not None:
            # Nobody needs its memory any more.
            self._program_start.close()

    def _release(self) -> None:
        if self._program_start is not None:
            self._program_start.close()


def _with_channel(spec: WorkerSpec, end: socket.socket) -> WorkerSpec:
    descriptor = end.fileno()
    name = f"{descriptor}:{os.fstat(descriptor).st_ino}"
    return replace(
        spec, environment={**spec.environment, CHANNEL_VARIABLE: name}, descriptors=(descriptor,)
    )


def _local_generation(
    specs: Sequence[WorkerSpec],
    with_end: Callable[[WorkerSpec, socket.socket], WorkerSpec],
    on_line: OnLine | None,
    settings: PoolSettings,
    program: PendingCall | None = None,
    layout: NodeLayout | None = None,
    **options: Any,
) -> Generation:
    """Return a generation of workers on this machine; `options` are those of `LocalGroup`.

    Each worker has a socket to this process, whose end `with_end` adds to the specification.
    """
    pairs = [socket.socketpair() for _ in specs]
    ends = [end for _, end in pairs]
    whole = [with_end(spec, end) for spec, end in zip(specs, ends, strict=True)]
    return Generation(
        [ours for ours, _ in pairs],
        lambda on_exit: LocalGroup(whole, on_line, on_exit=on_exit, ends=ends, **options),
        settings,
        program,
        layout=layout,
    )
