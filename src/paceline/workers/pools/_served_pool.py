"""Base class of pools whose workers each serve the driver through a socket."""

import json
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from paceline.workers._errors import WorkerFailedError
from paceline.workers.pools._begun_runs import BegunRuns
from paceline.workers.pools._failure_detector import PoolSettings
from paceline.workers.pools._generation import Generation
from paceline.workers.pools._packed_call import PackedCall, pack_worker_call
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._pool_worker import Assignment
from paceline.workers.pools._serve_calls import driver_facts
from paceline.workers.pools._shared_buffer_cache import SharedBuffers
from paceline.workers.pools._watchdog import WatchedRank
from paceline.workers.pools._worker_call import WorkerCall
from paceline.workers.pools._worker_pool import WorkerPool, checked_ranks
from paceline.workers.processes._line_printer import LinePrinter
from paceline.workers.processes._output_reader import OnLine
from paceline.workers.processes._rank_environment import (
    COLLECTIVE_TIMEOUT_VARIABLE,
    THREADS_MARK,
    THREADS_VARIABLE,
)
from paceline.workers.processes._worker_spec import WorkerProcess

logger = logging.getLogger(__name__)


class ServedPool(WorkerPool):
    """A pool of which each generation of workers is a `Generation`.

    Implementers make the generations and know the capacity.

    Args:
        num_workers: The number of workers.
        environment: Variables for the workers.
        on_line: Gets each output line; by default they go to this process's streams.
        heartbeat_timeout_s: How long a worker may give no sign of life, in seconds.
        collective_timeout_s: How long ranks may wait for others, in seconds.
        grace_s: The time in seconds that the other workers get when a call fails on one.
        threads_per_worker: How many threads each worker computes with, or None to share cores.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        environment: Mapping[str, str] | None,
        on_line: OnLine | None,
        heartbeat_timeout_s: float,
        collective_timeout_s: float,
        grace_s: float,
        threads_per_worker: int | None,
    ) -> None:
        check_at_least("num_workers", num_workers, 1)
        check_at_least("threads_per_worker", threads_per_worker, 1)
        check_at_least("grace_s", grace_s, 0)
        _check_above_0("heartbeat_timeout_s", heartbeat_timeout_s)
        _check_above_0("collective_timeout_s", collective_timeout_s)
        self._num_workers = num_workers
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
        self._reports = BegunRuns()
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
        """The time in seconds that the other workers get when a call fails on one."""
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
            self._generation, self._reports = generation, generation.reports

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
        """Have workers carry out what `pack_call` has packed; see `WorkerPool.submit`."""
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
        """Send a signal to all workers that still run."""
        if self._generation is not None:
            self._generation.signal(signum)

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Have the workers ended after a time; see `WorkerPool.request_stop`."""
        if self._generation is not None:
            self._generation.request_stop(grace_s, is_asked=is_asked)

    def observations(self) -> list[WatchedRank]:
        """Return what is known of the ranks of a program."""
        return [] if self._generation is None else self._generation.observations()

    def end_hung(self, error: Exception) -> None:
        """End all workers, with their stacks, as ranks of this node or others wait in vain."""
        if self._generation is not None:
            self._generation.end_hung(error)

    @property
    def reports(self) -> BegunRuns:
        """What the workers of the present or the last generation have told of their runs."""
        return self._reports

    @property
    def refusal(self) -> Exception | None:
        """That one of the last workers has refused the hyperparameters, if it did."""
        return None if self._generation is None else self._generation.refusal

    def resume_from_reports(self) -> None:
        """Have the next workers go on in the runs that the last generation has told of."""
        self.resume_from(self._reports.resume_variables())

    def resume_from(self, variables: Mapping[str, str]) -> None:
        """Have the next workers go on in the runs that variables name."""
        for value in variables.values():
            logger.info("The next start goes on from the last checkpoint (%s).", value)
        self._environment |= variables

    def tell_restarts(self, causes: Sequence[str]) -> None:
        """Have the next workers record what ended those before them; see `AttemptStarted`."""
        # Loads msgspec, which a launcher that never restarts has no need of.
        from paceline.journal import RESTART_CAUSES_VARIABLE

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
        """Return the next generation, which is to be started, after the last one has ended."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what generations have used."""

    def _release_after(self, error: BaseException) -> None:
        """Give back what a start has used that failed."""
        self._release()

    def _end_generation(self, grace_s: float) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.end(grace_s)


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    shared: SharedBuffers,
) -> PackedCall:
    """Return a call and how this process is set up, as they travel to workers.

    Args:
        function: What to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        shared: Where large data go.

    Raises:
        NotSendableError: The function or an argument cannot be pickled.
    """
    return pack_worker_call(
        driver_facts(), WorkerCall(function, tuple(args), dict(kwargs or {})), shared
    )


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Raise a ValueError unless a number is None or at least so large."""
    if value is not None and not value >= least:
        raise ValueError(f"`{name}` must be at least {least}, but got {value!r}.")


def _check_above_0(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be above 0, but got {value!r}.")
