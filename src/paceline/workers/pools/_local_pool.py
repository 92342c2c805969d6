"""A pool of workers that are processes on this machine."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from paceline._listening import PortReservation
from paceline._usable_cores import num_cores
from paceline.workers.pools._generation import Generation
from paceline.workers.pools._local_generation import local_generation
from paceline.workers.pools._served_pool import ServedPool
from paceline.workers.processes._fork_client import forking_start
from paceline.workers.processes._output_reader import OnLine
from paceline.workers.processes._process_start import Start, start_process
from paceline.workers.processes._rank_environment import NodeLayout
from paceline.workers.processes._worker_program import PROGRAM_FILE
from paceline.workers.processes._worker_spec import WorkerSpec, local_specs


class LocalPool(ServedPool):
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
        super().__init__(
            num_workers,
            environment=environment,
            on_line=on_line,
            heartbeat_timeout_s=heartbeat_timeout_s,
            collective_timeout_s=collective_timeout_s,
            grace_s=grace_s,
            threads_per_worker=threads_per_worker,
        )
        self._threads_per_worker = threads_per_worker
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
        return local_generation(specs, self._on_line, self._settings, start)

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
