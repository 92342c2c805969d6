"""Pools whose calls are carried out in the process that submits them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._worker_pool import WorkerPool, checked_ranks
from paceline.workers.processes._exit_as_error import exit_as_error
from paceline.workers.processes._worker_spec import WorkerProcess


class OwnProcessPool(WorkerPool):
    """A pool of which this process is a worker, so that there is no process to signal or to end.

    A call is carried out in the thread that submits it, before `submit` returns. Output goes where
    this process has it go.
    """

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """Nothing, as no process was started."""
        return []

    def signal(self, signum: int) -> None:
        """Do nothing: whoever signals this process means it."""

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Do nothing: a call has ended before anybody could ask."""

    def drain(self, timeout_s: float) -> None:
        """Do nothing: nobody passes the output on."""

    def await_end(self) -> None:
        """Do nothing: a call that has failed has ended."""

    def shutdown(self, force: bool = False) -> None:
        """End the use of the pool; no process is ended."""
        self.stop(0.0)


class InlinePool(OwnProcessPool):
    """One worker, which is this process: debuggers can follow it, and nothing travels."""

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
