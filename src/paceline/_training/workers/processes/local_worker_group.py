"""Group of worker processes on this machine, watched until all leftovers are gone."""

import logging
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from socket import socket

from paceline._base.process_and_network import join, wait_until
from paceline._training.workers.processes.leftover_processes import (
    GROUP_VARIABLE,
    StoppedWorkerWatch,
    adopting_orphan_processes,
    end_marked,
    end_stray_processes,
    nested_group_mark,
)
from paceline._training.workers.processes.process_facts_and_signals import (
    living_members,
    own_children,
    read_process,
    signal_group,
)
from paceline._training.workers.processes.worker_process import (
    LocalWorker,
    OnLine,
    OutputReader,
    Start,
    WorkerProcess,
    WorkerSpec,
    await_exit,
    start_process,
)
from paceline._training.workers.worker_failures import WorkerExit, WorkerStartError

logger = logging.getLogger(__name__)

# How long a worker's leftovers may live: its background processes, mostly cleaners of
# shared memory, and output that they still hold open.
DRAIN_S = 2.0
LOOK_INTERVAL_S = 0.05
_KILL_LOOK_INTERVAL_S = 0.005


@dataclass(eq=False, repr=False)
class EndedWorkers:
    """Closer of a group's ended workers, for the thread reading their output.

    Args:
        workers: All workers of the group, also those that are added later.
        reader: Reads their output.
        lock: Guards the workers.
        adopted_mark: The group's mark if this process adopts what its workers orphan, else None.
    """

    workers: Sequence[LocalWorker]
    reader: OutputReader
    lock: threading.Condition
    adopted_mark: str | None

    def close_due(self, kill_at: float | None) -> None:
        """Close ended workers without leftovers, or with leftovers for too long.

        Args:
            kill_at: When all are or were killed, on the monotonic clock; None if they are not.
        """
        now = time.monotonic()
        is_killed = kill_at is not None and now >= kill_at
        if self.adopted_mark and is_killed and all(each.exit for each in self.workers):
            # Orphans of killed workers would keep their output open.
            end_stray_processes(self.adopted_mark)
        for worker in self.workers:
            if not worker.is_ending or now < worker.next_look_at:
                continue
            worker.next_look_at = now + LOOK_INTERVAL_S
            has_members = self._has_members(worker)
            if has_members and worker.may_save_its_work:
                continue
            is_overdue = now > worker.exited_at + DRAIN_S
            if is_overdue or not (has_members or worker.open_streams):
                self._close(worker)

    def _has_members(self, worker: LocalWorker) -> bool:
        """Return whether an ended worker has left living processes in its group."""
        if self.adopted_mark:
            # A process without a parent becomes a child of this process, or of one below it.
            ended = {other.process.pid for other in self.workers if other.exit is not None}
            children = own_children()
            if children is not None and ended.issuperset(children):
                return False
        return any(map(living_members, worker.process_groups()))

    def _close(self, worker: LocalWorker) -> None:
        for process_group in worker.process_groups():
            signal_group(process_group, signal.SIGKILL)
        deadline = time.monotonic() + DRAIN_S
        # A kill takes effect a moment after it was sent.
        while self._has_members(worker) and time.monotonic() < deadline:
            self.reader.read(_KILL_LOOK_INTERVAL_S)
        # Data left in the pipes count, but only for a time: a process that got away from the group
        # could write for ever.
        while worker.open_streams and self.reader.read(0.0) and time.monotonic() < deadline:
            pass
        for pipe in list(worker.open_streams):
            self.reader.close_stream(worker, pipe)
        with self.lock:
            worker.close()


# Time from a kill until the process is gone and its output is read, in seconds.
_KILL_SLACK_S = 5.0

OnExit = Callable[[WorkerExit], None]


class LocalGroup:
    """Run workers as processes on this machine, each in a session of its own; once only.

    Workers die with this process, however it dies (on Linux; processes that they started are
    found by `kill_leftover`). A failure of one is reported, and ends no other. Methods may be
    called from any thread.

    Args:
        specs: The workers, in rank order.
        on_line: Gets each output line, in order per stream, from the group's own thread; while it
            blocks, workers that print are held up. None leaves the workers this process's own
            standard streams.
        adopt_strays: Make this process the parent of the workers' orphans, and kill these at
            the end. Until then the process adopts what its other children orphan, too, and does
            not reap them: only a process that exists for the group should ask for this.
        heartbeat_timeout_s: How long a worker may be stopped until it counts as lost and is
            killed, in seconds; None for ever.
        on_exit: Gets each exit once it is known, from a thread of its own.
        start: Starts the process of a worker.
        mark: Names the group in the environments of its processes, see `end_marked`; a new name
            by default.
        ends: The workers' ends of sockets, which are closed here once the workers have them.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        on_line: OnLine | None = None,
        *,
        adopt_strays: bool = False,
        heartbeat_timeout_s: float | None = None,
        on_exit: OnExit | None = None,
        start: Start = start_process,
        mark: str | None = None,
        ends: Sequence[socket] = (),
    ) -> None:
        if not specs:
            raise ValueError("`specs` must name at least one worker, but got none.")
        self._specs = specs
        self._on_line = on_line
        self._adopt_strays = adopt_strays
        self._on_exit = on_exit
        self._start = start
        self._ends = ends
        self._id = mark or secrets.token_hex(8)
        self._workers: list[LocalWorker] = []
        self._exits: list[WorkerExit] = []
        # Lock of the condition is reentrant: a signal handler may call any method of the group.
        self._changed = threading.Condition()
        self._kill_timer: threading.Timer | None = None
        self._kill_at: float | None = None
        self._is_over = False
        self._is_done = False
        self._start_error: Exception | None = None
        self._has_spawned = threading.Event()
        self._supervisor: threading.Thread | None = None
        self._watchers: list[threading.Thread] = []
        self._drains: list[threading.Event] = []
        self._stopped_watch: StoppedWorkerWatch | None = None
        if heartbeat_timeout_s is not None:
            self._stopped_watch = StoppedWorkerWatch(
                heartbeat_timeout_s, self._running, self.is_stopped, self._end_silent
            )

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes, in rank order."""
        return [worker.process for worker in self._workers]

    def start(self) -> None:
        """Start all workers; on an error none is left running.

        Raises:
            RuntimeError: The group was started before.
            WorkerStartError: A worker cannot be started.
        """
        if self._supervisor is not None:
            raise RuntimeError(
                "A worker group is started once only. Hint: make a new `LocalGroup`."
            )
        try:
            self._start_all()
        except BaseException:
            if self._ends:
                # After a Ctrl-C workers may still be about to be started, with these descriptors.
                self.stop(0.0)
            raise
        finally:
            for end in self._ends:
                end.close()

    def _start_all(self) -> None:
        self._reader = OutputReader(self._on_line)
        adopted_mark = self._id if self._adopt_strays else None
        self._ended = EndedWorkers(self._workers, self._reader, self._changed, adopted_mark)
        # A worker dies with the thread that started it, so that thread lives as long as the group.
        self._supervisor = threading.Thread(
            target=self._supervise, name="paceline-workers", daemon=True
        )
        try:
            self._supervisor.start()
        except RuntimeError as error:
            self._start_error = error
        else:
            wait_until(self._has_spawned.wait)
            if self._start_error is not None:
                join(self._supervisor)
        if self._start_error is not None:
            raise WorkerStartError(
                f"The workers could not be started: {self._start_error}."
            ) from self._start_error

    def poll(self) -> list[WorkerExit]:
        """Return the exits known by now, in the order of notice."""
        with self._changed:
            return list(self._exits)

    def wait(self, timeout_s: float | None = None) -> list[WorkerExit] | None:
        """Wait until all workers have ended and their output was delivered.

        Returns:
            The exits in rank order, or None after `timeout_s`.

        Raises:
            RuntimeError: The group was not started.
        """
        if self._supervisor is None:
            raise RuntimeError("A worker group must be started before it is waited for.")
        with self._changed:
            if not wait_until(self._wait_done, timeout_s):
                return None
        if threading.current_thread() is not self._supervisor:
            join(self._supervisor)
        return sorted(self._exits, key=lambda exit_: exit_.rank)

    def signal(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to workers still running, to all by default."""
        with self._changed:
            for worker in self._workers:
                if ranks is None or worker.spec.rank in ranks:
                    worker.send(signum)

    def is_stopped(self, rank: int) -> bool:
        """Tell whether a worker's process is stopped, as by SIGSTOP.

        Where the worker is a shell, that is whether any process of its process group is.
        """
        with self._changed:
            (worker,) = (worker for worker in self._workers if worker.spec.rank == rank)
        if worker.spec.signals_whole_group:
            members = (m for group in worker.process_groups() for m in living_members(group))
            return any(member.is_stopped for member in members)
        facts = read_process(worker.process.pid)
        return facts is not None and facts.is_stopped

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Begin to stop the workers and return at once; a later call can shorten the grace.

        Args:
            grace_s: When to kill, in seconds from now.
            is_asked: Whether the workers have been asked to leave by some other signal.
        """
        kill_at = time.monotonic() + grace_s
        with self._changed:
            if self._is_over or (self._kill_at is not None and kill_at >= self._kill_at):
                return
            self._kill_at = kill_at
            for worker in self._workers if grace_s > 0 and not is_asked else ():
                # Asking twice would end a worker that is saving its work at the first request.
                if signal.SIGTERM not in worker.sent_signals:
                    worker.send(signal.SIGTERM)
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            # A thread of its own: neither a slow `on_line` nor the caller can hold the kill up.
            self._kill_timer = threading.Timer(max(0.0, grace_s), self.signal, (signal.SIGKILL,))
            self._kill_timer.daemon = True
            try:
                self._kill_timer.start()
            except RuntimeError:
                # There are no more threads: nobody would kill them later.
                self._kill_timer = None
                self.signal(signal.SIGKILL)

    def stop(self, grace_s: float) -> list[WorkerExit]:
        """End all workers: ask, and after `grace_s` kill them.

        Returns:
            The exits in rank order, within `grace_s` and a few seconds.
        """
        self.request_stop(grace_s)
        exits = self.wait(grace_s + DRAIN_S + _KILL_SLACK_S)
        if exits is not None:
            return exits
        running = [worker.spec.rank for worker in self._workers if not worker.is_closed]
        logger.error("The workers of these ranks could not be ended: %s.", running)
        return sorted(self.poll(), key=lambda exit_: exit_.rank)

    def __enter__(self) -> "LocalGroup":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(grace_s=0.0)

    def drain(self, timeout_s: float) -> None:
        """Wait until output printed so far was delivered, for at most `timeout_s` seconds."""
        is_drained = threading.Event()
        with self._changed:
            if self._is_over or self._supervisor is None:
                return
            self._drains.append(is_drained)
            self._reader.wake()
        wait_until(is_drained.wait, timeout_s)

    def _wait_done(self, timeout_s: float | None) -> bool:
        return self._changed.wait_for(lambda: self._is_done, timeout_s)

    def _running(self) -> list[int]:
        with self._changed:
            return [worker.spec.rank for worker in self._workers if worker.exit is None]

    def _end_silent(self, rank: int, what: str) -> None:
        with self._changed:
            for worker in self._workers:
                if worker.spec.rank == rank and worker.exit is None:
                    worker.silence = what
                    worker.send(signal.SIGKILL)

    # The supervising thread: spawn, read output, close.

    def _supervise(self) -> None:
        with adopting_orphan_processes() if self._adopt_strays else nullcontext():
            self._live()

    def _live(self) -> None:
        try:
            self._spawn_all()
            self._has_spawned.set()
            while not all(worker.is_closed for worker in self._workers):
                self._reader.read(self._timeout_s())
                self._reader.deliver_due(self._workers)
                self._answer_drains()
                self._ended.close_due(self._kill_at)
        finally:
            self._has_spawned.set()
            self._finish()

    def _spawn_all(self) -> None:
        try:
            for spec in self._specs:
                worker = self._spawn(spec)
                with self._changed:
                    if self._kill_at is not None:
                        # Stop requested during the start: this worker may have been started too
                        # late for that stop to reach it, and has nothing to lose yet.
                        worker.send(signal.SIGKILL)
                        break
            if self._stopped_watch is not None:
                self._stopped_watch.start()
        except (OSError, RuntimeError, ValueError) as error:
            self._start_error = error
            self.signal(signal.SIGKILL)

    def _spawn(self, spec: WorkerSpec) -> LocalWorker:
        # First, as nobody would see the end of a process for which no thread can be started.
        started = queue.SimpleQueue[LocalWorker | None]()
        watcher = threading.Thread(
            target=self._watch, args=(started,), name=f"paceline-worker-{spec.rank}", daemon=True
        )
        watcher.start()
        self._watchers.append(watcher)
        worker = None
        try:
            worker = self._start_worker(spec)
        finally:
            started.put(worker)
        return worker

    def _start_worker(self, spec: WorkerSpec) -> LocalWorker:
        handle = self._start(spec, self._environment(spec), self._on_line is not None)
        worker = LocalWorker(spec, handle, self._id)
        if handle.stdout is not None and handle.stderr is not None:
            self._reader.open(worker, handle.stdout, "stdout")
            self._reader.open(worker, handle.stderr, "stderr")
        with self._changed:
            self._workers.append(worker)
        return worker

    def _environment(self, spec: WorkerSpec) -> dict[str, str]:
        environment = dict(spec.environment)
        environment[GROUP_VARIABLE] = nested_group_mark(self._id, environment.get(GROUP_VARIABLE))
        return environment

    def _timeout_s(self) -> float | None:
        """Return how long there is nothing to do if no worker prints or ends."""
        splitters = [s for worker in self._workers for s in worker.open_streams.values()]
        waits = [s.due - time.time() for s in splitters if s.due is not None]
        if any(worker.is_ending for worker in self._workers):
            waits.append(LOOK_INTERVAL_S)
        return max(0.0, min(waits)) if waits else None

    def _answer_drains(self) -> None:
        """Read all output printed so far, and release the threads waiting in `drain`."""
        if not self._drains:
            return
        deadline = time.monotonic() + DRAIN_S
        while self._reader.read(0.0) and time.monotonic() < deadline:
            pass
        with self._changed:
            drains, self._drains = self._drains, []
        for is_drained in drains:
            is_drained.set()

    def _finish(self) -> None:
        with self._changed:
            self._is_over = True
            for is_drained in self._drains:
                is_drained.set()
        if self._stopped_watch is not None:
            self._stopped_watch.stop()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer.join()
        for watcher in self._watchers:
            watcher.join()
        if self._adopt_strays:
            end_stray_processes(self._id)
        with self._changed:
            self._reader.close()
            self._is_done = True
            self._changed.notify_all()
        if not self._adopt_strays:
            self._end_others()

    def _end_others(self) -> None:
        """End processes started by the workers in other sessions, with parents elsewhere.

        Workers that follow do not wait for it; the end of this process does.
        """
        sweep = threading.Thread(
            target=end_marked, args=(self._id,), name="paceline-sweep", daemon=False
        )
        # At the end of the interpreter there are no more threads.
        with suppress(RuntimeError):
            sweep.start()

    # Watcher threads, one per worker: notice its end.

    def _watch(self, started: "queue.SimpleQueue[LocalWorker | None]") -> None:
        worker = started.get()
        if worker is None:
            return
        exit_ = await_exit(worker)
        with self._changed:
            self._exits.append(exit_)
        with self._changed:
            worker.exited_at = time.monotonic()
            worker.exit = exit_
        if self._on_exit is not None:
            self._on_exit(exit_)
        self._reader.wake()
