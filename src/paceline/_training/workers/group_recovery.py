"""Calls of a worker group over its generations: restarts, and the state kept for recovery."""

import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline._training.workers.elastic_group import ElasticGroup, ElasticLimits
from paceline._training.workers.failures_and_restarts import (
    RestartPolicy,
    TrainingFailedError,
    WorkerFailedError,
    restart_cause,
)
from paceline._training.workers.pickled_calls import NotSendableError, dump, load
from paceline._training.workers.worker_pools import JoinedPool, PendingCall

if TYPE_CHECKING:
    from paceline.core._distributed_context import DistributedContext


logger = logging.getLogger(__name__)

# How often to look whether the call has ended, in seconds, and while there are too few workers.
_INTERVAL_S = 0.01
_FORM_INTERVAL_S = 0.25


class GroupRun(ABC):
    """Call carried out by workers: repeated after losses, continued by others from a checkpoint.

    `begin` it. Then `wait`, and by its answer `take_end` or `go_on`, until `take_end` returns
    values. Subclasses say what the workers are asked to do and what lies between two generations.

    Args:
        group: The workers.
    """

    # Errors that end a generation and may be followed by another one; others end the run.
    _retried: tuple[type[Exception], ...] = (WorkerFailedError,)

    def __init__(self, group: ElasticGroup) -> None:
        self._group = group
        self._call: PendingCall | None = None
        self._call_lock = threading.Lock()
        self._has_ended = threading.Event()
        self._form_at: float | None = None
        # At the last look for more workers, or when the generation began.
        self._num_commits_seen = 0
        self._is_growing = False
        # Causes of the failed starts since the last start that was recorded.
        self._restart_causes: list[str] = []

    @property
    @abstractmethod
    def num_commits(self) -> int:
        """How many checkpoints were committed, since the first start."""

    @abstractmethod
    def _submit(self) -> PendingCall:
        """Begin the call on the present workers."""

    @abstractmethod
    def _decide(self, error: Exception) -> None:
        """Return if the workers start again after a failure; all of them have ended.

        Raises:
            Exception: They do not.
        """

    @abstractmethod
    def _has_recorded(self) -> bool:
        """Tell whether the workers of the present generation have begun to record."""

    def _prepare_next(self) -> None:  # noqa: B027 - some have nothing to do here
        """Have the next workers begin where the last checkpoint was committed."""

    def _note_restart(self, error: Exception) -> None:  # noqa: B027 - likewise
        """Report a restart of the workers after a failure."""

    def _form(self) -> float:
        """Form the workers unless they are there; with too few, return a delay in seconds."""
        return 0.0 if self._group.is_alive else self._group.try_form()

    def _values_of(self, call: PendingCall) -> list[Any]:
        """Return the values of an ended call.

        Raises:
            Exception: It has failed.
        """
        return call.wait() or []

    def _is_complete(self) -> bool:
        """Tell whether nothing is left to do, though the workers were ended to have others."""
        return False

    def _take_form_failure(self, error: Exception) -> None:
        """Prepare the generation after workers lost during their start.

        Raises:
            Exception: There is none.
        """
        self._take_failure(error)

    def _ask_to_move(self) -> None:  # noqa: B027 - some cannot be asked
        """Ask the workers for a checkpoint soon, as others are ready to resume from there."""

    def _wake(self, call: PendingCall) -> None:  # noqa: B027 - most look by themselves
        """Handle the end of the present call; runs in another thread."""

    # ---- the generations -----------------------------------------------------------------

    def begin(self) -> None:
        """Form the workers if necessary and begin the call, or schedule a later attempt.

        Raises:
            Exception: The workers cannot be formed.
        """
        self._has_ended.clear()
        self._form_at, self._is_growing = None, False
        self._group.call_until_done(self._begin, self._take_form_failure)

    def _begin(self) -> None:
        if delay_s := self._form():
            self._form_at = time.monotonic() + delay_s
            return
        self._num_commits_seen = self.num_commits
        self._call = self._submit()
        self._call.add_done_callback(self._note_end)

    def _note_end(self, call: PendingCall) -> None:
        # A call of workers that were ended to have others is told of too.
        with self._call_lock:
            is_present = call is self._call
            if is_present:
                self._has_ended.set()
        if is_present:
            self._wake(call)

    def wait(self) -> bool:
        """Wait a moment for the end of the call; return whether the call has ended."""
        if self._form_at is None:
            return self._has_ended.wait(_INTERVAL_S)
        left_s = max(0.0, self._form_at - time.monotonic())
        return self._has_ended.wait(min(_FORM_INTERVAL_S, left_s))

    def go_on(self) -> None:
        """Do any work due during the call: form workers, or replace them."""
        if self._form_at is not None:
            if time.monotonic() >= self._form_at:
                self.begin()
        elif not self._is_growing and self.num_commits > self._num_commits_seen:
            self._num_commits_seen = self.num_commits
            self._resize_if_due()
        elif self._group.prepare_growth():
            self._ask_to_move()

    def _resize_if_due(self) -> None:
        """Go on with more workers, or without leaving nodes, from the checkpoint just committed."""
        present, wanted = self._group.num_present, self._group.next_size()
        if wanted is None or self._has_ended.is_set():
            return
        logger.info(
            "%d workers can run: ending the present %d after a checkpoint, to go on from it.",
            wanted,
            present,
        )
        self._begin_others()

    def _begin_others(self) -> None:
        """End the workers, as others go on from the last checkpoint."""
        self._is_growing = True
        if self._group.end_for_others():
            with self._call_lock:
                self._call = None
            self._begin_next()

    def take_end(self) -> list[Any] | None:
        """Return the values of the ended call, or None if other workers repeat the call.

        Raises:
            Exception: What ended the call, if the workers do not start again.
        """
        assert self._call is not None
        if not self._is_growing or self._is_complete():
            try:
                return self._values_of(self._call)
            except self._retried as error:
                if not self._group.can_restart:
                    raise
                self._take_failure(error)
                self.begin()
                return None
        self._begin_next()
        return None

    def _begin_next(self) -> None:
        self._restart_causes.clear()
        self._prepare_next()
        self.begin()

    def _take_failure(self, error: Exception) -> None:
        """Prepare the generation after a failure.

        Raises:
            Exception: There is none.
        """
        # Until the others have ended they may commit and delete checkpoints.
        self._group.await_end()
        self._decide(error)
        if self._has_recorded():
            self._restart_causes.clear()
        self._restart_causes.append(restart_cause(error))
        self._prepare_next()
        self._note_restart(error)


class StateFunctions(NamedTuple):
    """How the state of workers is captured and put back.

    Attributes:
        capture: Called in each worker with the path of a file or None; returns the worker's part of
            the state, see `write_part`.
        restore: Called in each worker with the path of a file or None, and the parts in rank order;
            see `read_parts`.
        join: Returns the whole state of its parts.
        split: Returns the parts of a whole state.
    """

    capture: Callable[[str | None], Any]
    restore: Callable[[str | None, list[Any]], None]
    join: Callable[[Sequence[Any]], dict[str, Any]]
    split: Callable[[dict[str, Any]], list[Any]]


class MemoryFile:
    """File in memory, freed by `close` or the end of this process.

    Attributes:
        path: Where processes of the same user on this machine open it.
        close: Frees the memory; may be called again.
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("paceline_state")
        # Path through /proc: a memory file has no name in any directory.
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.close = weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def is_possible() -> bool:
        """Return whether the system supports files in memory."""
        return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class KeptState:
    """The parts of a state.

    Args:
        parts: That of each rank, in rank order; None for the chief's if that is in the file.
        file: Where the chief's part may be.

    Attributes:
        parts: As given.
        path: The file, if the chief's part is there.
    """

    def __init__(self, parts: Sequence[Any], file: MemoryFile | None = None) -> None:
        self.parts = list(parts)
        self._file = file if parts[0] is None else None
        self.path = None if self._file is None else self._file.path

    def close(self) -> None:
        """Forget the state."""
        if self._file is not None:
            self._file.close()


def read_parts(path: str | None, parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a state; the first is read from the file if there is a path."""
    if path is None:
        return parts
    with open(path, "rb") as file:
        return [load(file), *parts[1:]]


def write_part(part: dict[str, Any], path: str | None) -> dict[str, Any] | None:
    """Write a part of a state to the file and return None, or return the part if not written.

    Args:
        part: The part.
        path: The file, if there is one.
    """
    if path is None:
        return part
    try:
        with open(path, "wb") as file:
            dump(part, file, what="The state", name="state")
    except (OSError, NotSendableError):
        # Another user's, or no memory is left; what cannot be pickled is told where it is sent.
        return part
    return None


class RecoveringGroup(ElasticGroup):
    """Workers of a pool, with a kept state to restore after a loss.

    Args:
        limits: How many workers there may be.
        hint: What to do about too few of them, which the error says.
        functions: How their state is captured and put back.
    """

    def __init__(self, limits: ElasticLimits, *, hint: str, functions: StateFunctions) -> None:
        super().__init__(limits, hint=hint)
        self._functions = functions
        self._kept: KeptState | None = None
        self._next: MemoryFile | None = None
        self._is_current = False
        self.num_losses = 0

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether all workers are processes of this machine."""

    @property
    def is_state_kept(self) -> bool:
        """Whether the present state is in this process."""
        return self._is_current

    def start(self) -> None:
        """Start the first workers; no worker is left if the start fails."""
        try:
            self.form()
        except BaseException:
            self.stop(force=True)
            raise

    def state(self) -> dict[str, Any]:
        """Return the present state; a copy of its parts stays in this process."""
        kept = self._current()
        return self._functions.join(read_parts(kept.path, kept.parts))

    def keep(self, parts: list[Any] | None) -> None:
        """Replace the kept state by the present state.

        Args:
            parts: Its parts, the chief's None if that is in the file for the next state; or None
                if nobody has fetched them.
        """
        if self._kept is not None:
            self._kept.close()
        self._kept, self._is_current = None, parts is not None
        if parts is not None:
            self._kept = KeptState(parts, self._next)
            if parts[0] is None:
                self._next = None

    def load(self, state: dict[str, Any]) -> None:
        """Have the workers go on from a state."""
        parts = self._functions.split(state)
        self._load(KeptState(parts))
        self.keep(parts)

    def form_if_lost(self) -> None:
        """Start the workers unless they are alive, and restore the kept state.

        Raises:
            TrainingFailedError: Nothing was kept.
            Exception: They cannot be formed.
        """
        if self.is_alive:
            return
        if self._kept is None:
            raise TrainingFailedError(
                "The workers were lost, and there is no state to go on from, as none was kept."
                " Hint: load(path); with `max_retries` above 0 `train` keeps the state."
            )
        self._load(self._kept)

    def end_to_resize(self) -> None:
        """End the workers if more can run, or the nodes of some will be taken away.

        The state is kept, so the next call goes on with others.
        """
        if self.is_alive and self.next_size() is not None:
            self._current()
            self.end_generation()

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        changes_state: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call a function on workers, and return its values in rank order.

        Args:
            function: The function.
            args: Its arguments.
            changes_state: Whether the state is another one afterwards.
            ranks: Which workers; all by default.

        Raises:
            WorkerFailedError: A worker was lost.
            Exception: What the function raised on the rank that failed first.
        """
        self.form_if_lost()
        try:
            return self._call(function, *args, ranks=ranks)
        finally:
            self._is_current = self._is_current and not changes_state

    def call_with_retries(
        self,
        function: Callable[..., Any],
        *args: Any,
        max_retries: int,
        keeps_state: bool = False,
        source: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function on workers, again after each loss, and return its values.

        Args:
            function: The function.
            args: Its arguments.
            max_retries: How often workers may be lost.
            keeps_state: Whether to keep the present state before. The function is then also given
                the file for the next one, or None.
            source: The state to go on from after a loss; by default what was kept.

        Raises:
            WorkersLostError: They were lost too often.
            Exception: What the function raised.
        """
        attempts = count()

        def attempt() -> list[Any]:
            if source is not None and next(attempts):
                self.keep(self._functions.split(source))
            self.form_if_lost()
            if keeps_state:
                self._current()
                # Kept state must stay whole until the function has stored the next one.
                return self._call(function, *args, self._path_for_next())
            return self._call(function, *args)

        policy = RestartPolicy(max_retries)

        def go_on(error: Exception) -> None:
            self.num_losses += 1
            policy.check(error, 0, "from the state that was kept")

        return self.call_until_done(attempt, go_on)

    def stop(self, *, force: bool = False) -> None:
        """End the workers, in bounded time, and forget the state."""
        self.keep(None)
        if self._next is not None:
            self._next.close()
            self._next = None
        super().stop(force=force)

    def _current(self) -> KeptState:
        if not self._is_current:
            self.form_if_lost()
            self.keep(self._call(self._functions.capture, self._path_for_next()))
        assert self._kept is not None
        return self._kept

    def _path_for_next(self) -> str | None:
        """Return the path of a file for the next state; None if out of the workers' reach."""
        if self._next is None and self.is_local and MemoryFile.is_possible():
            self._next = MemoryFile()
        return None if self._next is None else self._next.path

    def _load(self, state: KeptState) -> None:
        if not self.is_alive:
            self.form()
        self._call(self._functions.restore, state.path, state.parts)
        self._is_current = True

    def _call(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        try:
            values = self.submit(function, args, ranks=ranks).wait()
        except KeyboardInterrupt:
            # Nobody knows how far the workers are.
            super().stop(force=True)
            raise
        assert values is not None
        return values


T = TypeVar("T")


class JoinedGroup(ElasticGroup):
    """Group of all processes started by srun, mpirun, torchrun or another launcher.

    Each of them makes the group, and carries out calls as its rank. Lost workers are not started
    again here: what was trained goes on from its last checkpoint when the launcher starts the
    processes again. Subclasses make the `JoinedPool`.
    """

    can_restart = False
    _is_set_up = False

    @property
    def joined_pool(self) -> JoinedPool:
        """The pool of these processes."""
        assert isinstance(self._pool, JoinedPool)
        return self._pool

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self.joined_pool.num_workers

    @property
    def is_alive(self) -> bool:
        """Whether this process is set up beside the others, and no call has failed."""
        return super().is_alive and self._is_set_up

    @property
    def is_chief(self) -> bool:
        """Whether this process is rank 0; joins the other processes to find out."""
        return self.join().rank == 0

    def join(self) -> "DistributedContext":
        """Join the other processes, unless done before, and return this process's place."""
        pool = self.joined_pool
        if not pool.is_alive:
            pool.start()
        return pool.distributed

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
            self.joined_pool.shutdown()
            raise

    def try_form(self) -> float:
        """Join the other processes, unless done before, set this process up, and return 0."""
        self.join()
        self._set_up()
        self._is_set_up = True
        self.num_formed += 1
        return 0.0

    def stop(self, *, force: bool = False) -> None:
        """Leave the others."""
        super().stop(force=force)
        self._is_set_up = False
