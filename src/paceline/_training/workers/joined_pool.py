"""Pool whose workers an outer launcher has started: each process joins with its own rank."""

import atexit
import dis
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from paceline._base.process_and_network import num_cores
from paceline._training.workers.pickled_calls import dump, exit_as_error
from paceline._training.workers.processes.process_facts_and_signals import signal_with_parent
from paceline._training.workers.processes.rank_environment import THREADS_VARIABLE
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
from paceline._training.workers.worker_pools import OwnProcessPool, PendingCall, checked_ranks

logger = logging.getLogger(__name__)


T = TypeVar("T")


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
