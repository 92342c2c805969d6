"""Generation of a pool's workers: their processes, their calls, and the judgement of failures."""

import json
import logging
import pickle
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from paceline._base.process_and_network import join, wait_until
from paceline._training.workers.channels import RANK_LOST, ChannelFrame, FrameKind, RunEvents
from paceline._training.workers.processes.local_worker_group import LocalGroup, OnExit
from paceline._training.workers.processes.process_facts_and_signals import (
    STACKS_SIGNAL,
    has_pending_signal,
)
from paceline._training.workers.processes.rank_environment import NodeLayout
from paceline._training.workers.processes.worker_process import WorkerProcess
from paceline._training.workers.serve_calls import read_error
from paceline._training.workers.stuck_ranks import Progress, WatchedRank
from paceline._training.workers.worker_failures import (
    WorkerExit,
    WorkerFailedError,
    WorkerStartError,
)
from paceline._training.workers.worker_health import (
    Assignment,
    FailureDetector,
    HyperparametersRefusedError,
    PoolEnd,
    PoolSettings,
    PoolWorker,
    worker_observations,
)
from paceline._training.workers.worker_pools import PendingCall

if TYPE_CHECKING:
    from paceline._training.workers.ray.hosts import RayGroup

logger = logging.getLogger(__name__)


# The longest that an interpreter and its libraries may take to load.
_START_S = 120.0
# Time for the end beyond the grace, in seconds: kills, and the output of the dead.
_END_SLACK_S = 10.0
# Times to write stacks, in seconds: after the beginning, and until it on a busy machine.
_STACKS_S = 0.3
_STACKS_BEGIN_S = 10.0
_STACKS_LOOK_S = 0.05
# Pickled return value of a program.
_NOTHING = pickle.dumps(None)


class Generation:
    """Workers started together, and ended together.

    All is decided in one thread, which ends after the last worker.

    Args:
        ends: The driver's ends of the sockets to the workers, in rank order.
        make_group: Makes the group of workers, which gives each exit to a function.
        settings: How the workers are judged.
        program: The call that the workers carry out from their start to their end, if they serve
            no calls but are programs of their own.
        layout: The place of these workers among those of other nodes; None if there are none.

    Attributes:
        run_events: The events of the workers' runs.
    """

    def __init__(
        self,
        ends: Sequence[socket.socket],
        make_group: "Callable[[OnExit], LocalGroup | RayGroup]",
        settings: PoolSettings,
        program: PendingCall | None = None,
        *,
        layout: NodeLayout | None = None,
    ) -> None:
        self.run_events = RunEvents()
        self._program = program
        self._settings = settings
        first = 0 if layout is None else layout.first_rank
        self._workers = [PoolWorker(rank, end) for rank, end in enumerate(ends, first)]
        self._by_rank = {worker.rank: worker for worker in self._workers}
        self._group = make_group(lambda exit_: self._post(self._note_exit, exit_))
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._posted: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="paceline-pool", daemon=True)
        self._is_ready = threading.Event()
        self._detector = FailureDetector(self._workers, settings, self._group.is_stopped, layout)
        self._pool_end: PoolEnd | None = None
        self._break_at: float | None = None
        self._stacks_due: float | None = None
        self._kill_at: float | None = None
        self.failure: BaseException | None = None

    # Methods for any thread.

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order."""
        return self._group.processes

    @property
    def is_program(self) -> bool:
        """Whether the workers are programs of their own and end by themselves."""
        return self._program is not None

    @property
    def refusal(self) -> HyperparametersRefusedError | None:
        """Error of a worker's refusal of the hyperparameters, or None."""
        return self._detector.refusal

    @property
    def is_over(self) -> bool:
        """Whether all workers have ended."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Start the workers and wait until they take calls.

        Raises:
            WorkerStartError: One cannot be started; none is left.
        """
        try:
            self._group.start()
        except BaseException:
            self._close()
            raise
        if self._program is not None:
            # Ready at once: only programs that use Paceline report that they are ready.
            for worker in self._workers:
                worker.run_program(self._program)
            self._is_ready.set()
            self._thread.start()
            # Programs that end at once have been started all the same.
            return
        try:
            self._thread.start()
            is_ready = wait_until(self._is_ready.wait, _START_S)
        except BaseException:
            # Nobody else knows of these workers when a Ctrl-C interrupts the wait.
            self._end_start()
            raise
        if not is_ready:
            self.end(0.0)
            raise WorkerStartError(f"The workers must be ready within {_START_S:g} s, but are not.")
        if self.failure is not None:
            self.join(self._settings.grace_s)
            raise WorkerStartError(f"The workers could not be started: {self.failure}")

    def _end_start(self) -> None:
        """End the workers of an interrupted start, perhaps interrupted as the thread began."""
        deadline = time.monotonic() + 1.0
        while not self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._thread.is_alive():
            self.end(0.0)
        else:
            # Without a driver the workers end by themselves.
            self._close()

    def submit(self, assignment: Assignment) -> None:
        """Assign a call to its ranks."""
        self._post(self._assign, assignment)

    def signal(self, signum: int) -> None:
        """Send a signal to all workers still running."""
        self._group.signal(signum)
        if signum == signal.SIGTERM:
            self._post(lambda: self._detector.note_request(time.monotonic()))

    def request_stop(self, grace_s: float, *, is_asked: bool) -> None:
        """Have the workers ended after a time in seconds; `is_asked` if they know already."""
        self._group.request_stop(grace_s, is_asked=is_asked)

    def observations(self) -> list[WatchedRank]:
        """Return the known state of a program's ranks."""
        return [] if self._program is None else worker_observations(self._program, self._workers)

    def end_hung(self, error: Exception) -> None:
        """End all workers, with their stacks, as ranks of this node or others wait in vain."""
        self._post(self._pass, PoolEnd(error, 0.0, wants_stacks=True))

    def drain(self, timeout_s: float) -> None:
        """Wait until output printed so far was delivered, for at most `timeout_s` seconds."""
        self._group.drain(timeout_s)

    def end(self, grace_s: float) -> None:
        """End all workers, in `grace_s` and a few seconds."""
        error = RuntimeError("A call must end before its pool is stopped, but this one had not.")
        self._post(self._break, PoolEnd(error, grace_s))
        self.join(grace_s)

    def join(self, grace_s: float) -> None:
        """Wait for the end of all workers, requested before."""
        join(self._thread, grace_s + _END_SLACK_S)
        if self._thread.is_alive():
            logger.error("Workers could not be ended: %s.", [p.pid for p in self.processes])

    def _post(self, action: Callable[..., None], *arguments: Any) -> None:
        self._posted.put((action, arguments))
        try:
            self._wake_writer.send(b"\0")
        except OSError:
            # Thread is awake anyway, or has ended.
            return

    # The pool's thread.

    def _run(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        for worker in self._workers:
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        try:
            while not all(worker.exit for worker in self._workers):
                self._turn()
            if self._pool_end is not None and self.failure is None:
                # Workers ended by themselves while they had time to write their stacks.
                self._break(self._pool_end)
        except Exception as error:
            logger.exception("The thread of a pool failed.")
            self._break(PoolEnd(error, 0.0))
        finally:
            self._group.stop(grace_s=0.0)
            # Actions posted too late are answered too.
            self._act()
            self._close()

    def _close(self) -> None:
        for worker in self._workers:
            worker.channel.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _turn(self) -> None:
        """Wait for events, and handle them."""
        began = time.monotonic()
        for key, events in self._selector.select(self._timeout_s(began)):
            if key.data is None:
                self._wake_reader.recv(4096)
                continue
            if events & selectors.EVENT_WRITE:
                key.data.channel.flush()
            if events & selectors.EVENT_READ:
                self._read(key.data)
        self._act()
        self._watch(began)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._update_interest(key.data)

    def _timeout_s(self, now: float) -> float:
        times = (self._detector.due, self._break_at, self._kill_at)
        waits = [at - now for at in times if at is not None]
        return max(0.0, min([self._settings.tick_s, *waits]))

    def _act(self) -> None:
        while True:
            try:
                action, arguments = self._posted.get_nowait()
            except Empty:
                return
            action(*arguments)

    def _update_interest(self, worker: PoolWorker) -> None:
        if not worker.channel.is_open:
            self._selector.unregister(worker.channel)
            return
        is_writing = worker.channel.wants_to_write
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)
        self._selector.modify(worker.channel, events, worker)

    # Handlers of events.

    def _assign(self, assignment: Assignment) -> None:
        if self.failure is not None:
            assignment.call.fail(self.failure)
            return
        for rank in assignment.call.ranks:
            self._by_rank[rank].assign(assignment)

    def _read(self, worker: PoolWorker) -> None:
        for frame in worker.channel.receive():
            self._note_frame(worker, frame)
        # Half a frame is a sign of life too.
        worker.silent_s = 0.0

    def _note_frame(self, worker: PoolWorker, frame: ChannelFrame) -> None:
        if frame.kind is FrameKind.EVENT:
            event, path, text = json.loads(frame.body)
            self.run_events.note(event, path, worker.rank)
            if event == "invalid_hp":
                self._detector.note_refusal(worker, text, time.monotonic())
        elif frame.kind is FrameKind.LOADED:
            self.run_events.loaded = json.loads(frame.body)
        elif frame.kind is FrameKind.OUTCOME:
            worker.outcome = json.loads(frame.body)
        if self._pool_end is not None:
            # Asking for its stack can wake a worker that hung.
            return
        if frame.kind is FrameKind.READY:
            worker.is_ready = True
            if all(other.is_ready for other in self._workers):
                self._is_ready.set()
        elif frame.kind is FrameKind.VALUE:
            worker.take_value(frame.body)
        elif frame.kind is FrameKind.WANT:
            worker.send_data()
        elif frame.kind is FrameKind.BEAT:
            worker.progress = Progress.from_bytes(frame.body)
        elif frame.kind is FrameKind.ERROR:
            error = read_error(frame.body)
            self._pass(self._detector.note_error(worker, error, time.monotonic()))

    def _note_exit(self, exit_: WorkerExit) -> None:
        worker = self._by_rank[exit_.rank]
        # Frames sent before the end come first.
        self._read(worker)
        exit_ = worker.take_outcome(exit_)
        if self._program is not None and not exit_.is_failure:
            worker.exit = exit_
            worker.take_value(_NOTHING)
            return
        self._pass(self._detector.note_exit(worker, exit_, time.monotonic()))

    def _watch(self, began: float) -> None:
        """Handle everything due by now; `began` is the start of this turn."""
        now = time.monotonic()
        if self._pool_end is None:
            # While this process stood still itself, nobody was late.
            elapsed_s = min(now - began, 2 * self._settings.tick_s)
            self._pass(self._detector.look(now, elapsed_s))
        if self._pool_end is None and (notice := self._detector.notice()):
            logger.warning("%s", notice)
        if self._break_at is not None and now >= self._break_at and self._pool_end is not None:
            self._break_at = self._end_of_stacks(now)
            if self._break_at is None:
                self._break(self._pool_end)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._group.request_stop(0.0)

    def _pass(self, pool_end: PoolEnd | None) -> None:
        """End as the first failure asks; later ones are only about its consequences."""
        if pool_end is None or self._pool_end is not None:
            return
        self._pool_end = pool_end
        if not pool_end.wants_stacks:
            self._break(pool_end)
            return
        # Ready workers only: the signal would end others, which have no handler yet.
        ready = [worker for worker in self._workers if worker.is_ready]
        for worker in ready:
            logger.error("Rank %d %s.", worker.rank, worker.progress.describe())
        self._group.signal(STACKS_SIGNAL, [worker.rank for worker in ready])
        self._break_at = time.monotonic()
        self._stacks_due = self._break_at + _STACKS_BEGIN_S

    def _end_of_stacks(self, now: float) -> float | None:
        """Return the end of the time for writing stacks, or None if this time is over."""
        if self._stacks_due is None:
            return None
        if now < self._stacks_due and any(map(self._is_yet_to_write, self._workers)):
            return now + _STACKS_LOOK_S
        self._stacks_due = None
        return now + _STACKS_S

    def _is_yet_to_write(self, worker: PoolWorker) -> bool:
        """Tell whether a worker has not begun to write its stacks, and can."""
        if not worker.is_ready or worker.exit is not None or self._group.is_stopped(worker.rank):
            return False
        # The id of a process on another node names none here that gets this signal.
        process = self._group.processes[self._workers.index(worker)]
        return has_pending_signal(process.pid, STACKS_SIGNAL)

    def _break(self, pool_end: PoolEnd) -> None:
        """End all calls, and all workers in bounded time."""
        error, grace_s = pool_end.error, pool_end.grace_s
        is_idle = self._is_ready.is_set() and not any(worker.is_busy for worker in self._workers)
        if self.failure is None:
            self.failure = error
            self._pool_end = self._pool_end or pool_end
            if pool_end.is_success:
                logger.warning("%s The run ends for all ranks.", error)
                for worker in self._workers:
                    if worker.current is not None:
                        worker.current.answer(worker.rank, _NOTHING)
            why = RANK_LOST if isinstance(error, WorkerFailedError) else b""
            for worker in self._workers:
                worker.channel.send(ChannelFrame(FrameKind.STOP, body=why))
                worker.drop_calls(error)
            self._is_ready.set()
        if is_idle and grace_s > 0:
            # Idle workers leave by themselves, so they are killed only after the grace.
            self._kill_at = time.monotonic() + grace_s
        else:
            self._group.request_stop(grace_s)
