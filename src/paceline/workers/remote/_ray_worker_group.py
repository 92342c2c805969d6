"""The workers of a generation on the nodes of a Ray cluster, as their driver sees them."""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from socket import socket

from paceline._waiting import join, wait_until
from paceline.workers.pools._channel import BlockingChannel, ChannelFrame, FrameKind
from paceline.workers.processes._local_worker_group import OnExit
from paceline.workers.processes._output_lines import OutputLine
from paceline.workers.processes._output_reader import OnLine
from paceline.workers.processes._worker_exit import WorkerExit
from paceline.workers.processes._worker_spec import WorkerProcess
from paceline.workers.remote._request_server import MakeHandler, RequestServer

logger = logging.getLogger(__name__)

# What a host gets beyond the grace of its worker to tell its end.
_HOST_SLACK_S = 4.0


class RayGroupWorker:
    """A worker and its host.

    Args:
        process: The worker's process on its node.
        node: How the node is called in errors.
        end: The driver's end of the socket to the host.
        kill: Ends the host at once, and the worker with it.
        tell_cause: Logs why Ray has ended the host, if it did, which it may know late.
        make_handler: Makes what answers the worker.
    """

    def __init__(
        self,
        process: WorkerProcess,
        node: str,
        end: socket,
        kill: Callable[[], None],
        tell_cause: Callable[[], None],
        make_handler: MakeHandler,
    ) -> None:
        self.process = process
        self.node = node
        self.channel = BlockingChannel(end)
        self.request_server = RequestServer(make_handler, self.channel)
        self.kill = kill
        self.tell_cause = tell_cause
        self.is_drained = threading.Event()
        self.is_stopped = False
        self.has_exited = False
        self.is_lost = False

    def tell(self, kind: FrameKind, content: object) -> None:
        """Send something to the host; a host that is gone needs nothing."""
        with suppress(OSError):
            self.channel.send(ChannelFrame(kind, body=json.dumps(content).encode()))


class RayGroup:
    """Workers that were started by their hosts; see `ServingGroup`.

    Args:
        workers: In rank order.
        on_line: Gets each output line.
        on_exit: Gets each exit once it is known.
    """

    def __init__(self, workers: Sequence[RayGroupWorker], on_line: OnLine, on_exit: OnExit) -> None:
        self._workers = workers
        self._on_line = on_line
        self._on_exit = on_exit
        self._line_lock = threading.Lock()
        self._stop_lock = threading.Lock()
        self._kill_at: float | None = None
        self._kill_timer: threading.Timer | None = None
        self._threads = [
            threading.Thread(
                target=self._listen,
                args=(worker,),
                name=f"paceline-host-{worker.process.rank}",
                daemon=True,
            )
            for worker in workers
        ]

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers' processes on their nodes, in rank order."""
        return [worker.process for worker in self._workers]

    def start(self) -> None:
        """Listen to the hosts."""
        for thread in self._threads:
            thread.start()

    def signal(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to workers that still run, to all by default."""
        for rank, worker in enumerate(self._workers):
            if ranks is None or rank in ranks:
                worker.tell(FrameKind.SIGNAL, int(signum))

    def is_stopped(self, rank: int) -> bool:
        """Tell whether a worker's process is stopped, as by SIGSTOP."""
        return self._workers[rank].is_stopped

    def drain(self, timeout_s: float) -> None:
        """Wait until what the workers have printed so far was delivered, but not for longer."""
        waiting = [worker for worker in self._workers if not worker.has_exited]
        for worker in waiting:
            worker.is_drained.clear()
            worker.tell(FrameKind.DRAIN, timeout_s)
        deadline = time.monotonic() + timeout_s
        for worker in waiting:
            wait_until(worker.is_drained.wait, max(0.0, deadline - time.monotonic()))

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Begin what `stop` does, and return at once; a later call can shorten the grace.

        Args:
            grace_s: When to kill, in seconds from now.
            is_asked: Whether the workers know already; asking again does no harm.
        """
        kill_at = time.monotonic() + grace_s
        with self._stop_lock:
            if self._kill_at is not None and kill_at >= self._kill_at:
                return
            self._kill_at = kill_at
            if self._kill_timer is not None:
                self._kill_timer.cancel()
            self._kill_timer = threading.Timer(grace_s + _HOST_SLACK_S, self._kill_hosts)
            self._kill_timer.daemon = True
            self._kill_timer.start()
        for worker in self._workers:
            worker.request_server.hurry()
            worker.tell(FrameKind.END, grace_s)

    def stop(self, grace_s: float) -> None:
        """End all workers in bounded time, and deliver their output."""
        self.request_stop(grace_s)
        for thread in self._threads:
            join(thread, grace_s + 2 * _HOST_SLACK_S)
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer.join()

    def _kill_hosts(self) -> None:
        """End hosts that do not answer, as their node may be gone."""
        for worker in self._workers:
            if not worker.has_exited:
                worker.kill()
                worker.channel.close()

    # ---- one thread per host -------------------------------------------------------------

    def _listen(self, worker: RayGroupWorker) -> None:
        while (frame := worker.channel.receive()) is not None:
            if frame.kind in (FrameKind.APPEND, FrameKind.ASK):
                worker.request_server.take(frame)
                continue
            content = json.loads(frame.body)
            if frame.kind is FrameKind.LINE:
                self._deliver(OutputLine(**content))
            elif frame.kind is FrameKind.DRAINED:
                worker.is_drained.set()
            elif frame.kind is FrameKind.STOPPED:
                worker.is_stopped = content
            elif frame.kind is FrameKind.EXIT:
                worker.has_exited = True
                self._on_exit(WorkerExit(**content))
                worker.is_drained.set()
                worker.request_server.close()
        if not worker.has_exited:
            worker.has_exited = worker.is_lost = True
            rank, now = worker.process.rank, time.time()
            self._on_exit(WorkerExit(rank=rank, code=1, time=now, lost_with=worker.node))
            # Nobody waits for that.
            threading.Thread(target=worker.tell_cause, name="paceline-cause", daemon=True).start()
        worker.request_server.close()
        worker.channel.close()

    def _deliver(self, line: OutputLine) -> None:
        try:
            with self._line_lock:
                self._on_line(line)
        except Exception:
            logger.exception("A line of output could not be passed on: %r", line)
