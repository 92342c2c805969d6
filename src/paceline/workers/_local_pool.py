"""A pool of workers that are processes on this machine."""

import io
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from paceline.workers._call import Call
from paceline.workers._echo import Echo
from paceline.workers._environment import (
    THREADS_MARK,
    THREADS_VARIABLE,
    Placement,
    PortReservation,
    num_cores,
)
from paceline.workers._errors import WorkerFailedError
from paceline.workers._fork_client import forking_start
from paceline.workers._generation import Generation, local_generation
from paceline.workers._judge import PoolSettings
from paceline.workers._local import OnLine
from paceline.workers._peer import Assignment
from paceline.workers._pickling import dump
from paceline.workers._pool import PendingCall, WorkerPool
from paceline.workers._program import PROGRAM_FILE
from paceline.workers._serve import driver_facts
from paceline.workers._spec import WorkerProcess, WorkerSpec, local_specs
from paceline.workers._start import Start, start_process


class LocalPool(WorkerPool):
    """Warm worker processes on this machine.

    They see this process's environment, and the working directory and the module path that it has
    at each call. They end with this process, however it ends (on Linux).

    Args:
        num_workers: The number of workers.
        environment: Variables for the workers besides those of this process.
        on_line: Gets each output line of the workers, from a thread of the pool; by default they
            go to `sys.stdout` and `sys.stderr`, with the rank before each if there are several.
        heartbeat_timeout_s: How long a worker may give no sign of life until it counts as lost,
            in seconds. A worker that computes gives them; one that is stopped does not, nor one
            that holds Python's lock for so long.
        grace_s: The time in seconds that the other workers get when a call fails on one.
        threads_per_worker: How many threads each worker computes with; the cores are shared
            equally by default.
        capacity: Tells how many workers could run at the moment, where something else than this
            machine decides it. By default that is the cores that this process may use, divided by
            `threads_per_worker`; without that, any number.
        collective_timeout_s: How long ranks may wait for others in a collective operation, in
            seconds. If those have returned from the call, or are in another operation, five
            seconds are enough.
        preload: Modules that workers need at once; those that are forked have them loaded.
        fork_server: Whether workers are forked, on Linux, from a process that has torch loaded.
            It is started by the first pool and serves later ones of this process too. Without it
            each worker is a new interpreter.

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
        grace_s: float = 10.0,
        threads_per_worker: int | None = None,
        capacity: Callable[[], int] | None = None,
        collective_timeout_s: float = 1800.0,
        preload: Sequence[str] = (),
        fork_server: bool = True,
    ) -> None:
        _check_at_least("num_workers", num_workers, 1)
        _check_at_least("threads_per_worker", threads_per_worker, 1)
        _check_at_least("grace_s", grace_s, 0)
        _check_above_0("heartbeat_timeout_s", heartbeat_timeout_s)
        _check_above_0("collective_timeout_s", collective_timeout_s)
        self._num_workers = num_workers
        self._environment = dict(environment or {})
        if threads_per_worker is not None:
            # The mark has the number divided among workers that the workers start.
            threads = str(threads_per_worker)
            self._environment |= {THREADS_VARIABLE: threads, THREADS_MARK: threads}
        self._threads_per_worker = threads_per_worker
        self._capacity = capacity
        self._preload = tuple(preload)
        self._uses_fork_server = fork_server
        self._on_line = on_line or Echo(lambda: self._num_workers)
        self._settings = PoolSettings(
            heartbeat_timeout_s=heartbeat_timeout_s,
            collective_timeout_s=collective_timeout_s,
            grace_s=grace_s,
        )
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._port: PortReservation | None = None
        self._generation: Generation | None = None

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
        return self._generation is not None and self._generation.failure is None

    def capacity(self) -> int:
        """Return how many workers could run at this moment; see `WorkerPool.capacity`."""
        if self._capacity is not None:
            return self._capacity()
        if self._threads_per_worker is None:
            return sys.maxsize
        return num_cores() // self._threads_per_worker

    def start(self, num_workers: int | None = None) -> None:
        """Start a generation of workers; see `WorkerPool.start`."""
        _check_at_least("num_workers", num_workers, 1)
        with self._lock:
            if self.is_alive:
                raise RuntimeError("A pool must not be started while its workers are alive.")
            self._end(self._settings.grace_s)
            if num_workers is not None:
                self._num_workers = num_workers
            self._port = PortReservation()
            specs = self._specs(self._port.port)
            start: Start = start_process
            if self._uses_fork_server:
                start = forking_start(specs[0].environment, self._preload)
            generation = local_generation(specs, self._on_line, self._settings, start)
            try:
                generation.start()
            except BaseException:
                self._port.close()
                raise
            self._generation = generation

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Have workers call a function; see `WorkerPool.submit`."""
        wanted = range(self._num_workers) if ranks is None else sorted(set(ranks))
        if not wanted or wanted[0] < 0 or wanted[-1] >= self._num_workers:
            raise ValueError(
                f"`ranks` must name workers from 0 to {self._num_workers - 1}, but got {ranks!r}."
            )
        generation = self._generation
        if generation is None:
            raise RuntimeError("A pool must be started before calls are submitted, but is not.")
        if isinstance(generation.failure, WorkerFailedError):
            raise generation.failure
        if generation.failure is not None:
            raise RuntimeError(
                "A pool must be started again after a failed call, but is not."
            ) from generation.failure
        buffer = io.BytesIO()
        dump(driver_facts(), buffer, what="The driver's state", name="driver")
        dump(Call(function, tuple(args), dict(kwargs or {})), buffer, what="The call", name="")
        call = PendingCall(next(self._numbers), wanted)
        generation.submit(Assignment(call, buffer.getvalue()))
        return call

    def signal(self, signum: int) -> None:
        """Send a signal to all workers that still run."""
        if self._generation is not None:
            self._generation.signal(signum)

    def stop(self, grace_s: float) -> None:
        """End the workers; see `WorkerPool.stop`."""
        with self._lock:
            self._end(grace_s)

    def shutdown(self, force: bool = False) -> None:
        """End the workers; `force` kills them at once."""
        self.stop(0.0 if force else self._settings.grace_s)

    def _end(self, grace_s: float) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.end(grace_s)
        if self._port is not None:
            self._port.close()
            self._port = None

    def _specs(self, port: int) -> list[WorkerSpec]:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
        return local_specs(
            [sys.executable, *flags, PROGRAM_FILE, "serve"],
            Placement(num_local_workers=self._num_workers, master_port=port),
            signals_whole_group=False,
            environment=self._environment,
        )


def _check_at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise ValueError(f"`{name}` must be at least {least}, but got {value!r}.")


def _check_above_0(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be above 0, but got {value!r}.")
