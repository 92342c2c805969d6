"""Pools of workers and their pending calls: base class, this process, an outer launcher's."""

import atexit
import dis
import io
import logging
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from paceline._base.process_and_network import num_cores, wait_until
from paceline._training.workers.pickled_calls import dump, exit_as_error, load
from paceline._training.workers.processes.signals_and_leftovers import signal_with_parent
from paceline._training.workers.processes.worker_process import THREADS_VARIABLE, WorkerProcess
from paceline._training.workers.processes.worker_program import (
    FLUSH_FAILED,
    INTERRUPTED,
    RUNNING_MARK,
    exit_code_of,
    flush,
    leave_process_group,
)

if TYPE_CHECKING:
    from paceline.core._distributed_context import DistributedContext

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PendingCall:
    """Call carried out by workers; may be used from any thread.

    Args:
        number: Its number, unique among the calls of its pool.
        ranks: The ranks that carry it out.
    """

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = tuple(sorted(ranks))
        self._changed = threading.Condition()
        self._pickled: dict[int, bytes | bytearray] = {}
        self._values: list[Any] | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: list[Callable[[PendingCall], object]] = []

    @property
    def is_done(self) -> bool:
        """Whether all ranks have returned, or the call has failed."""
        return self._is_done

    @property
    def error(self) -> BaseException | None:
        """Error of a failed call; None for a call in progress or a successful call."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> list[Any] | None:
        """Return the function's values in rank order, or None after `timeout_s`.

        Raises:
            NotSendableError: A value that it returned cannot be pickled.
            WorkerFailedError: A worker died, was stopped, hung or left by `sys.exit()`.
            RuntimeError: The pool was shut down before the call had ended.
            Exception: The function's error on the rank that failed first, with the traceback
                of that rank as its cause.
        """
        with self._changed:
            if not wait_until(self._wait_done, timeout_s):
                return None
            if self._error is not None:
                raise self._error
            if self._values is None:
                self._values = [load(io.BytesIO(self._pickled[rank])) for rank in self.ranks]
                self._pickled.clear()
            return list(self._values)

    def add_done_callback(self, function: Callable[["PendingCall"], object]) -> None:
        """Register a function to be called with this call once done, at once if done already.

        It runs in a thread of the pool, must return soon and must not raise.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(function)
                return
        function(self)

    # Methods for pools alone.

    def finish(self, values: list[Any]) -> None:
        """End the call with values returned in this process."""
        self._values = values
        self._finish()

    def answer(self, rank: int, pickled: bytes | bytearray) -> None:
        """Record a rank's pickled value; the last value ends the call."""
        self._pickled[rank] = pickled
        if len(self._pickled) == len(self.ranks):
            self._finish()

    def has_returned(self, rank: int) -> bool:
        """Tell whether a rank has returned."""
        return rank in (self._pickled if self._values is None else self.ranks)

    def fail(self, error: BaseException) -> None:
        """End the call with an error; does nothing after its end."""
        if not self._is_done:
            self._error = error
            self._pickled.clear()
            self._finish()

    def _wait_done(self, timeout_s: float | None) -> bool:
        return self._changed.wait_for(lambda: self._is_done, timeout_s)

    def _finish(self) -> None:
        with self._changed:
            self._is_done = True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class WorkerPool(ABC):
    """Pool of warm workers for calls, carried out in order until the shutdown.

    A pool can be started again after a failure or a `stop`, also with another number of workers;
    each time is a new generation of workers. When a call fails, its pool stops all workers in
    bounded time. Implementers provide the methods below; each may be called from any thread.

    Attributes:
        can_restart: Whether lost workers can be started again; the driver's own process cannot.
        needs_reservation: Whether somebody else may take the place of a worker that could run, so
            that more workers must be reserved before they are counted on.
        placement_timeout_s: How long a start may wait for room that others use, in seconds.
    """

    can_restart = True
    needs_reservation = False
    placement_timeout_s = 60.0

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers, or how many the next start begins with."""

    @property
    @abstractmethod
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order; empty where they are not on this node."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether all workers are there and take calls."""

    @abstractmethod
    def capacity(self) -> int:
        """Return how many workers could run at this moment, the living ones of this pool included.

        Those on nodes that will be taken away do not count. It never waits; `sys.maxsize` says that
        nothing limits their number.
        """

    def leaving_ranks(self) -> Sequence[int]:
        """Return the ranks of workers on nodes announced to be taken away.

        By default there are none.
        """
        return []

    def reserve(self, num_workers: int) -> int:
        """Reserve room for more workers, and return the number certain to start.

        Hardly waits: a longer start continues in the background, so call it again. By default all
        are certain, as where nobody else can take the place of a worker.

        Args:
            num_workers: How many there are to be, the living ones of this pool included.
        """
        return num_workers

    def request(self, num_workers: int) -> None:  # noqa: B027 - most pools have nothing to do here
        """Ask for room for more workers than could run, where something adds machines for them.

        Args:
            num_workers: How many there are to be, the living ones of this pool included.
        """

    def cancel_reservation(self) -> None:  # noqa: B027 - most pools have nothing to do here
        """Give back reservations of `reserve` or `request` not used by a worker."""

    @abstractmethod
    def start(self, num_workers: int | None = None) -> None:
        """Start a generation of workers and wait until they take calls.

        Args:
            num_workers: How many; as many as last time by default.

        Raises:
            RuntimeError: The workers of the last start are alive.
            ValueError: `num_workers` is below 1.
            WorkerStartError: A worker cannot be started; none is left running.
        """

    @abstractmethod
    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Submit a function to workers, after earlier calls, and return at once.

        Args:
            function: The function to call, on each rank alike.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            ranks: The ranks that call it; all by default.

        Raises:
            NotSendableError: The function or an argument cannot be pickled.
            RuntimeError: The workers were not started, or were stopped; as `WorkerFailedError`
                if one of them has died.
            ValueError: `ranks` is empty or names a worker that does not exist.
        """

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send a signal to all workers still running."""

    @abstractmethod
    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Have the workers ended after a time, and return at once.

        Args:
            grace_s: When to kill those that are left, in seconds from now.
            is_asked: Whether the workers have been asked to leave already.
        """

    @abstractmethod
    def drain(self, timeout_s: float) -> None:
        """Wait until output printed so far was delivered, for at most `timeout_s` seconds."""

    @abstractmethod
    def await_end(self) -> None:
        """Wait until all workers have ended, if a call has failed; in bounded time.

        Until then the remaining workers may still write. Their resources are kept for the next
        start.
        """

    @abstractmethod
    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """End the workers: ask, and kill after `grace_s`; waiting calls fail.

        Returns within `grace_s` and a few seconds.

        Args:
            grace_s: The time to leave in, in seconds.
            is_restart: Whether their resources are kept for a start that follows.
        """

    @abstractmethod
    def shutdown(self, force: bool = False) -> None:
        """End the workers; `force` kills them at once."""

    def __enter__(self) -> "WorkerPool":
        if not self.is_alive:
            self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.shutdown(force=error is not None)


def checked_ranks(ranks: Sequence[int] | None, num_workers: int) -> Sequence[int]:
    """Return the ranks of a call, in order; all by default.

    Raises:
        ValueError: `ranks` is empty or names a worker that does not exist.
    """
    wanted = range(num_workers) if ranks is None else sorted(set(ranks))
    if not wanted or wanted[0] < 0 or wanted[-1] >= num_workers:
        raise ValueError(
            f"`ranks` must name workers from 0 to {num_workers - 1}, but got {ranks!r}."
        )
    return wanted


class OwnProcessPool(WorkerPool):
    """Pool with this process as a worker: there is no process to signal or to end.

    A call is carried out in the thread that submits it, before `submit` returns. Output goes where
    this process sends its own.
    """

    can_restart = False

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """Nothing, as no process was started."""
        return []

    def signal(self, signum: int) -> None:
        """Do nothing: a signal to this process has reached its worker already."""

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Do nothing: a call has ended before anybody could ask."""

    def drain(self, timeout_s: float) -> None:
        """Do nothing: nobody passes the output on."""

    def await_end(self) -> None:
        """Do nothing: a failed call has ended."""

    def shutdown(self, force: bool = False) -> None:
        """End the use of the pool; no process is ended."""
        self.stop(0.0)


class InlinePool(OwnProcessPool):
    """Pool of a single worker, this process: debuggers can follow, and nothing travels."""

    num_workers = 1

    def __init__(self) -> None:
        self._numbers = count(1)
        self._is_started = False

    @property
    def is_alive(self) -> bool:
        """Whether the pool was started."""
        return self._is_started

    def capacity(self) -> int:
        """Return 1."""
        return 1

    def start(self, num_workers: int | None = None) -> None:
        """Take calls.

        Raises:
            RuntimeError: The pool was started before.
            ValueError: `num_workers` is neither None nor 1.
        """
        if self._is_started:
            raise RuntimeError("A pool must not be started while its workers are alive.")
        if num_workers not in (None, 1):
            raise ValueError(
                f"`num_workers` must be 1, as the worker is this process, but got {num_workers!r}."
            )
        self._is_started = True

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Call a function here; see `WorkerPool.submit`. The call is done when this returns."""
        if not self._is_started:
            raise RuntimeError("A pool must be started before calls are submitted, but is not.")
        call = PendingCall(next(self._numbers), checked_ranks(ranks, 1))
        try:
            with exit_as_error():
                call.finish([function(*args, **(kwargs or {}))])
        except Exception as error:
            call.fail(error)
        return call

    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """Take no calls until the next start."""
        self._is_started = False


# A store takes messages of some megabytes, and one of them holds the pieces of all ranks.
_MESSAGE_BYTES = 4 * 1024 * 1024


class JoinedPool(OwnProcessPool):
    """Pool of the processes started by an outer launcher, this process among them.

    There is no driver besides them: each process makes the pool and submits the same calls in the
    same order. A call is carried out in the thread that submits it, before `submit` returns, and
    each process gets the values of all ranks.

    Such a pool starts nothing and ends nothing. It cannot start lost workers again, or another
    number of them, nor signal or stop them: their own launcher does that, and the
    training resumes from its last checkpoint when the script is started again. A rank that raises
    is named to the others at their next call.

    Args:
        timeout_s: How long to wait for other ranks, in seconds.

    Raises:
        RuntimeError: This process works alone.
    """

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        # Late import: a launcher has no use for the module, which takes much of its start.
        from paceline.core._launcher_place import launched_place

        place = launched_place()
        if place is None:
            raise RuntimeError(
                "A `JoinedPool` must be made in a process that a launcher has started as one of"
                " several, but this one works alone. Hint: srun -n2, mpirun -np 2 or torchrun."
            )
        self._size = place.size
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._distributed: DistributedContext | None = None

    @property
    def distributed(self) -> "DistributedContext":
        """This process's place, after `start`."""
        if self._distributed is None:
            raise RuntimeError("A pool must be started before it is used, but is not.")
        return self._distributed

    @property
    def num_workers(self) -> int:
        """Number of processes started by the launcher."""
        return self._size

    @property
    def is_alive(self) -> bool:
        """Whether this process has joined the others, and none of its calls has failed."""
        return self._distributed is not None

    def join(self) -> "DistributedContext":
        """Join the other processes, unless done before, and return this process's place."""
        if self._distributed is None:
            self.start()
        return self.distributed

    def decide(self, choose: Callable[[], T]) -> T:
        """Return the chief's choice on every rank.

        Raises:
            DistributedPeerError: The chief could not choose.
            Exception: What `choose` raised here.
        """
        distributed = self.join()
        try:
            return distributed.broadcast(choose() if distributed.rank == 0 else None)  # type: ignore[return-value] # the chief's
        except Exception as error:
            distributed.fail(error)
            self.shutdown()
            raise

    def capacity(self) -> int:
        """Return the number of processes started by the launcher."""
        return self._size

    def start(self, num_workers: int | None = None) -> None:
        """Join the other processes.

        Args:
            num_workers: Must be their number, if it is given.

        Raises:
            RuntimeError: They are joined.
            ValueError: `num_workers` is another number, or the launcher has not set enough
                variables.
            DistributedTimeoutError: Ranks are missing.
        """
        if self._distributed is not None:
            raise RuntimeError("A pool must not be started while its workers are alive.")
        if num_workers not in (None, self._size):
            raise ValueError(
                f"`num_workers` must be {self._size}, the number of processes that the launcher"
                f" has started, but got {num_workers!r}."
            )
        from paceline.core._distributed_context import DistributedContext

        self._distributed = DistributedContext.from_torch_distributed(timeout_s=self._timeout_s)

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Call a function here, and exchange its values; see `WorkerPool.submit`.

        Nothing travels but the values. The call is done when this returns.

        Raises:
            RuntimeError: The pool was not started, or a call has failed.
            ValueError: `ranks` is empty or names a worker that does not exist.
        """
        distributed = self.distributed
        wanted = checked_ranks(ranks, self._size)
        call = PendingCall(next(self._numbers), wanted)
        try:
            buffer = io.BytesIO()
            if distributed.rank in wanted:
                with exit_as_error(distributed.rank, self._size):
                    value = function(*args, **(kwargs or {}))
                what = f"What rank {distributed.rank} returned"
                dump(value, buffer, what=what, name="value")
            values = _exchange(distributed, buffer.getvalue())
        except Exception as error:
            distributed.fail(error)
            self._distributed = None
            call.fail(error)
            return call
        for rank in wanted:
            call.answer(rank, values[rank])
        return call

    def stop(self, grace_s: float, *, is_restart: bool = False) -> None:
        """Leave the others; no process is ended."""
        if self._distributed is not None:
            self._distributed.close()
            self._distributed = None


def prepare_joined(distributed: "DistributedContext") -> None:
    """Set up this process as Paceline's own launcher sets up its workers.

    It computes with its part of the node's cores, unless OMP_NUM_THREADS is set, and gloo stays
    on the loopback interface if there is one node. Every rank must call this.
    """
    import torch

    if distributed.cross_size == 1 and sys.platform == "linux":
        # Gloo would bind to the address of the host's name, which not every machine can resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_told = THREADS_VARIABLE in os.environ
    # Exchange on every rank, even with the variable set: it is a collective operation.
    cores = distributed.allgather_local(None if is_told else _own_cores())
    if is_told:
        return
    # Some launchers bind each process to cores of its own.
    own = set(_own_cores())
    sharing = [set(others) for others in cores if others is not None and own & set(others)]
    num_threads = max(1, len(set().union(*sharing)) // len(sharing))
    logger.info("Computing with %d thread(s), the part of this process.", num_threads)
    torch.set_num_threads(num_threads)


def _own_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(num_cores()))


def _exchange(distributed: "DistributedContext", data: bytes) -> list[bytes]:
    """Return the data of all ranks, exchanged in messages within the store's limit."""
    step = max(1, _MESSAGE_BYTES // distributed.size)
    longest = max(distributed.allgather(len(data)))
    pieces: list[list[bytes]] = [[] for _ in range(distributed.size)]
    for start in range(0, longest, step):
        for rank, piece in enumerate(distributed.allgather(data[start : start + step])):
            pieces[rank].append(piece)
    return [b"".join(parts) for parts in pieces]


def skip_interpreter_shutdown() -> None:
    """Have this process leave with its exit code right after the last exit handler.

    Does nothing in workers of our own, and when it was called before. From then on `sys.exit`
    notes the exit code, since Python does not record it. A code that is not known (`raise
    SystemExit(3)`, which passes by `sys.exit`) is left to Python.

    A worker of torchrun gets SIGTERM when torchrun itself ends, as a second Ctrl-C makes it do.
    """
    if RUNNING_MARK in sys.modules or _Ending.is_installed:
        return
    _Ending.is_installed = True
    _Ending().install()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_with_parent(signal.SIGTERM)


class _Ending:
    """Knows how the main program has ended."""

    is_installed = False

    def __init__(self) -> None:
        self._program = _outermost_frame()
        self._exit = sys.exit
        self._requests: list[object] = []

    def install(self) -> None:
        sys.exit = self._note_exit
        # Threads are waited for before exit handlers run, and the last to be registered is the
        # first to run: it runs all others and does not come back.
        threading._register_atexit(self._register)  # type: ignore[attr-defined] # as futures do

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._requests.append(status)
        self._exit(status)

    def _register(self) -> None:
        atexit.register(self._leave)

    def _leave(self) -> None:
        code = self._exit_code()
        if code is None:
            leave_process_group()
            return
        atexit.unregister(self._leave)
        atexit._run_exitfuncs()
        if not flush() and code == 0:
            code = FLUSH_FAILED
        if code == 0:
            _finalize_mpi()
            leave_process_group()
        os._exit(code)

    def _exit_code(self) -> int | None:
        """Return the code Python is about to end with, or None if unknown."""
        if _has_returned(self._program):
            return 0
        error = getattr(sys, "last_value", None)
        if error is not None:
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return exit_code_of(self._requests[-1]) if self._requests else None


def _finalize_mpi() -> None:
    """End the use of MPI, as mpi4py does only when Python shuts down.

    mpiexec takes a process that leaves without it for one that has failed, and kills the others.
    After a failure that is right.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.Is_thread_main():
        mpi.Finalize()


def _outermost_frame() -> FrameType:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame no longer running ended by a return, not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
