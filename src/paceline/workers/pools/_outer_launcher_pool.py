"""Workers that an outer launcher has started: torchrun, srun, mpirun and the like."""

import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline._usable_cores import num_cores
from paceline.workers.pools._inline_pool import OwnProcessPool
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._pickling import dump
from paceline.workers.pools._worker_pool import checked_ranks
from paceline.workers.processes._exit_as_error import exit_as_error
from paceline.workers.processes._rank_environment import THREADS_VARIABLE

if TYPE_CHECKING:
    from paceline.core import DistributedContext

logger = logging.getLogger(__name__)

# A store takes messages of some megabytes, and one of them holds the pieces of all ranks.
_MESSAGE_BYTES = 4 * 1024 * 1024


class JoinedPool(OwnProcessPool):
    """The processes that an outer launcher has started, of which this one is a worker.

    There is no driver besides them: each process makes the pool and submits the same calls in the
    same order. A call is carried out in the thread that submits it, before `submit` returns, and
    each process gets the values of all ranks.

    Such a pool starts nothing and ends nothing. It cannot start lost workers again, or another
    number of them, nor signal or stop them: whoever started the processes does that, and what was
    trained goes on from its last checkpoint when the script is started again. A rank that raises
    is named to the others at their next call.

    Args:
        timeout_s: How long to wait for other ranks, in seconds.

    Raises:
        RuntimeError: This process works alone.
    """

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        # It costs a good part of the start of a launcher, which has no use for it.
        from paceline.core import launched_place

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
        """The number of processes that were started."""
        return self._size

    @property
    def is_alive(self) -> bool:
        """Whether this process has joined the others, and none of its calls has failed."""
        return self._distributed is not None

    def capacity(self) -> int:
        """Return the number of processes that were started."""
        return self._size

    def start(self, num_workers: int | None = None) -> None:
        """Join the other processes.

        Args:
            num_workers: Must be their number, if it is given.

        Raises:
            RuntimeError: They are joined.
            ValueError: `num_workers` is another number, or the launcher has not told enough.
            DistributedTimeoutError: Ranks are missing.
        """
        if self._distributed is not None:
            raise RuntimeError("A pool must not be started while its workers are alive.")
        if num_workers not in (None, self._size):
            raise ValueError(
                f"`num_workers` must be {self._size}, the number of processes that the launcher"
                f" has started, but got {num_workers!r}."
            )
        from paceline.core import DistributedContext

        self._distributed = DistributedContext.from_torch_distributed(timeout_s=self._timeout_s)

    def submit(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> PendingCall:
        """Call a function here, and exchange what it returned; see `WorkerPool.submit`.

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
    """Do for this process what Paceline's own launcher does for its workers.

    It computes with its part of the node's cores, unless OMP_NUM_THREADS is set, and gloo stays
    on the loopback interface if there is one node. Every rank must call this.
    """
    import torch

    if distributed.cross_size == 1 and sys.platform == "linux":
        # Gloo would bind to the address of the host's name, which not every machine can resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    is_told = THREADS_VARIABLE in os.environ
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
    """Return the data of all ranks, in messages that the store takes."""
    step = max(1, _MESSAGE_BYTES // distributed.size)
    longest = max(distributed.allgather(len(data)))
    pieces: list[list[bytes]] = [[] for _ in range(distributed.size)]
    for start in range(0, longest, step):
        for rank, piece in enumerate(distributed.allgather(data[start : start + step])):
            pieces[rank].append(piece)
    return [b"".join(parts) for parts in pieces]
