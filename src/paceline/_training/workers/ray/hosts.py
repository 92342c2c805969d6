"""Hosts of workers on Ray nodes as their driver sees them: actors, a generation's group.

Also: the server of their requests.
"""

import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from socket import socket
from typing import Any, Protocol

from paceline._base.process_and_network import join, wait_until
from paceline._training.workers.channels import BlockingChannel, ChannelFrame, FrameKind, answer_of
from paceline._training.workers.processes.local_worker_group import OnExit
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.processes.worker_process import OnLine, WorkerProcess
from paceline._training.workers.ray.cluster import COMPARED, Bundles, Resources, make_node_watch
from paceline._training.workers.ray.host_process import HostOrder
from paceline._training.workers.worker_failures import WorkerExit

logger = logging.getLogger(__name__)


def make_worker_actor_class() -> Any:
    """Return the actor class, defined here to travel by value: nodes may lack Paceline."""
    end_with_node = make_node_watch()

    class PacelineWorker:
        def __init__(self) -> None:
            import os
            import threading

            self.parent = os.getppid()
            threading.Thread(target=end_with_node, args=(self.parent,), daemon=True).start()

        def is_on_node(self) -> bool:
            import os

            return os.getppid() == self.parent

        def facts(self, packages: Sequence[str]) -> dict[str, Any]:
            import os
            import platform
            from importlib import metadata

            import ray

            versions = {"Python": platform.python_version()}
            for name in packages:
                try:
                    versions[name] = metadata.version(name)
                except metadata.PackageNotFoundError:
                    versions[name] = "none"
            return {
                "node": ray.get_runtime_context().get_node_id(),
                "address": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call] # Ray
                "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
                "versions": versions,
            }

        def mark_of(self, directory: str) -> Any:
            from paceline._training.workers.ray.script_sources import script_directory_mark

            return script_directory_mark(directory)

        def warm_up(self, order: Any) -> None:
            from paceline._training.workers.ray.host_process import warm_up

            warm_up(order)

        def reserve_port(self) -> int:
            from paceline._base.process_and_network import PortReservation

            # Held as long as the actor.
            self.port = PortReservation()
            return self.port.port

        def start(self, order: Any, archive: bytes | None) -> Any:
            from paceline._training.workers.ray.host_process import WorkerHost

            self.host = WorkerHost(order, archive)
            return self.host.start()

    return PacelineWorker


# How long an actor that waits for its worker may take to answer before it is not relied on.
_PING_S = 0.5
# How long one may take whose node is in doubt, as another one was lost there.
_NODE_PING_S = 3.0
# How long Ray may take to report why it has killed an actor.
_CAUSE_S = 10.0
LACK_OF_MEMORY = (
    "as its node is short of memory. Hint: fewer workers for each node, or smaller batches; Ray's"
    " log names the processes that have the most."
)


class HostActor:
    """Actor with the resources of a worker, perhaps not created by Ray yet.

    Args:
        actor: Ray's handle.
        bundle: The index of the bundle that it is in; None if it is in no placement group.
        sample: Such an order as it will get, if it is to load all that its worker needs before it
            counts.
    """

    def __init__(self, actor: Any, bundle: int | None, sample: HostOrder | None) -> None:
        self.actor = actor
        self.bundle = bundle
        self.facts: Mapping[str, Any] = {}
        # Answers come in the order of the calls, the facts first.
        self.unheard = [actor.facts.remote(COMPARED)]
        if sample is not None:
            # Asked for at once: nobody may look for its facts for a while.
            self.unheard.append(actor.warm_up.remote(sample))
        self.is_lost = False
        self.has_worked = False

    @property
    def node(self) -> str | None:
        """Id of the actor's node; None before its first answer."""
        return self.facts.get("node")

    @property
    def is_placed(self) -> bool:
        """Whether the actor can start a worker, perhaps after some loading."""
        return bool(self.facts) and not self.is_lost

    @property
    def is_ready(self) -> bool:
        """Whether the actor can start a worker at once."""
        return self.is_placed and not self.unheard


class HostActors:
    """Actors of a pool, as reported by Ray and themselves; for a single thread at a time.

    Args:
        ray: Ray itself.
        wanted: The resources of each.
        sample: Such an order as actors will get that are reserved while workers run.

    Attributes:
        all: The hosts that were created and not dropped.
        leaving: The ids of the nodes that will be taken away. The next look drops actors there,
            but for those that have worked.
        lacked_memory: Whether Ray has killed the actor for lack of memory that was lost last.
    """

    def __init__(self, ray: Any, wanted: Resources, sample: HostOrder) -> None:
        self._ray = ray
        self._wanted = wanted
        self._sample = sample
        self._kind: Any = None
        self.all: list[HostActor] = []
        self.leaving: Collection[str] = ()
        self.lacked_memory = False

    def create(
        self, bundles: Bundles | None = None, index: int | None = None, *, is_reserve: bool
    ) -> None:
        """Create an actor through Ray: in a bundle, else on any node.

        Args:
            bundles: The bundles of a placement group.
            index: The index of the bundle.
            is_reserve: Whether it loads what its worker needs before it is ready.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._kind is None:
            self._kind = self._ray.remote(make_worker_actor_class())
        strategy: Any = "DEFAULT"
        if bundles is not None and index is not None:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=bundles.group, placement_group_bundle_index=index
            )
        actor = self._kind.options(
            num_cpus=self._wanted.get("CPU", 0),
            num_gpus=self._wanted.get("GPU", 0),
            resources={n: a for n, a in self._wanted.items() if n not in ("CPU", "GPU")},
            max_restarts=0,
            scheduling_strategy=strategy,
        ).remote()
        self.all.append(HostActor(actor, index, self._sample if is_reserve else None))

    def drop(self, hosts: Iterable[HostActor]) -> None:
        """Give some back."""
        for host in hosts:
            self.all.remove(host)
            with suppress(Exception):
                # An actor that is gone already counts as given back.
                self._ray.kill(host.actor)

    def look(self) -> list[HostActor]:
        """Take new answers, drop lost actors, and return the ready actors on staying nodes."""
        self._doubt_nodes()
        for host in list(self.all):
            if not host.is_ready and not host.is_lost:
                self._hear(host)
            if host.is_lost or (host.node in self.leaving and not host.has_worked):
                self.drop([host])
        return [h for h in self.all if h.is_ready and h.node not in self.leaving]

    def placed(self) -> list[HostActor]:
        """Return the placed actors on staying nodes, as of the last look."""
        return [h for h in self.all if h.is_placed and h.node not in self.leaving]

    def _doubt_nodes(self) -> None:
        """Mark actors on the nodes of lost actors as lost too, unless they report to be alive.

        Ray itself learns only after many seconds that a node is gone.
        """
        nodes = {host.node for host in self.all if host.is_lost and host.node}
        doubted = [host for host in self.all if host.is_ready and host.node in nodes]
        asked = {host.actor.is_on_node.remote(): host for host in doubted}
        if not asked:
            return
        answers, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_PING_S)
        for host in doubted:
            host.is_lost = True
        for answer in answers:
            with suppress(self._ray.exceptions.RayError):
                asked[answer].is_lost = not self._ray.get(answer)

    def _hear(self, host: HostActor) -> None:
        while host.unheard and self._ray.wait([host.unheard[0]], timeout=0)[0]:
            try:
                host.facts = self._ray.get(host.unheard[0]) or host.facts
            except self._ray.exceptions.RayTaskError:
                # Node lacks something, which the start of a worker reports.
                pass
            except self._ray.exceptions.RayError as error:
                host.is_lost = True
                self.lacked_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
                return
            del host.unheard[0]

    def answering(self) -> list[HostActor]:
        """Return the ready actors, without idle actors slow to answer."""
        ready = self.look()
        idle = {host.actor.facts.remote(COMPARED): host for host in ready if not host.has_worked}
        if idle:
            _, silent = self._ray.wait(list(idle), num_returns=len(idle), timeout=_PING_S)
            unheard = [idle[reference] for reference in silent]
            ready = [host for host in ready if host not in unheard]
        return ready


def log_lack_of_memory(ray: Any, actor: Any, rank: int) -> None:
    """Log it if Ray has killed the actor of a rank because its node was short of memory."""
    with suppress(Exception):
        # A hint for the log alone: no error of Ray may hide the loss itself.
        reference = actor.is_on_node.remote()
        if not ray.wait([reference], timeout=_CAUSE_S)[0]:
            return
        try:
            ray.get(reference)
        except ray.exceptions.OutOfMemoryError:
            logger.warning("Ray has killed the actor of rank %d, %s", rank, LACK_OF_MEMORY)


# How long forwarded records wait for space on a full disk until they count as lost.
_FULL_DISK_S = 5.0
_RETRY_S = 0.2


class RequestHandler(Protocol):
    """Handler of a worker's requests; each other method serves a kind of request."""

    def close(self) -> None:
        """Abandon the worker's unfinished work."""


MakeHandler = Callable[[], RequestHandler]


class RequestServer:
    """Server for the frames of a worker's host.

    Args:
        make_handler: Makes what answers the worker, in one thread; it is closed at the end.
        channel: Leads to the host.
    """

    def __init__(self, make_handler: MakeHandler, channel: BlockingChannel) -> None:
        self._make_handler = make_handler
        self._channel = channel
        self._requests: SimpleQueue[ChannelFrame | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_disk_full = False

    def take(self, frame: ChannelFrame) -> None:
        """Write forwarded data, or queue a request; called by a single thread."""
        if frame.kind is FrameKind.APPEND:
            self._append(*pickle.loads(frame.body))  # noqa: S301 - written by our own host
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._answer, name="paceline-requests", daemon=True
            )
            self._thread.start()
        self._requests.put(frame)

    def hurry(self) -> None:
        """Wait for space on a full disk no more."""
        self._is_closing = True

    def close(self) -> None:
        """Stop answering, and abandon the worker's unfinished work."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join()

    def _answer(self) -> None:
        handler = self._make_handler()
        try:
            while (frame := self._requests.get()) is not None:
                answer = answer_of(handler, frame.body)
                # A worker that has gone needs none.
                with suppress(OSError):
                    self._channel.send(ChannelFrame(FrameKind.ANSWER, body=answer))
        finally:
            handler.close()

    def _append(self, path: str, offset: int, data: bytes) -> None:
        """Write at an offset, retrying on a full disk; lost data do not move later data."""
        give_up_at = time.monotonic() + (0.0 if self._is_disk_full else _FULL_DISK_S)
        while True:
            try:
                _write_at(path, offset, data)
            except OSError as error:
                self._is_disk_full = True
                # Space may be freed meanwhile, and lost records cannot be had again.
                if time.monotonic() < give_up_at and not self._is_closing:
                    time.sleep(_RETRY_S)
                    continue
                logger.error("Forwarded records for %s are lost: %s.", path, error.strerror)
            else:
                self._is_disk_full = False
            return


def _write_at(path: str, offset: int, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            num_written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[num_written:], offset + num_written
    finally:
        os.close(descriptor)


# Time for a host to report its worker's end, beyond the worker's grace, in seconds.
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
        """Send a frame to the host; does nothing if the host is gone."""
        with suppress(OSError):
            self.channel.send(ChannelFrame(kind, body=json.dumps(content).encode()))


class RayGroup:
    """Group of workers started by their hosts; its methods are those of `LocalGroup`.

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
        """Send a signal to workers still running, to all by default."""
        for rank, worker in enumerate(self._workers):
            if ranks is None or rank in ranks:
                worker.tell(FrameKind.SIGNAL, int(signum))

    def is_stopped(self, rank: int) -> bool:
        """Tell whether a worker's process is stopped, as by SIGSTOP."""
        return self._workers[rank].is_stopped

    def drain(self, timeout_s: float) -> None:
        """Wait until output printed so far was delivered, for at most `timeout_s` seconds."""
        waiting = [worker for worker in self._workers if not worker.has_exited]
        for worker in waiting:
            worker.is_drained.clear()
            worker.tell(FrameKind.DRAIN, timeout_s)
        deadline = time.monotonic() + timeout_s
        for worker in waiting:
            wait_until(worker.is_drained.wait, max(0.0, deadline - time.monotonic()))

    def request_stop(self, grace_s: float, *, is_asked: bool = False) -> None:
        """Begin to stop the workers and return at once; a later call can shorten the grace.

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
        """Kill hosts without a reported exit, as their nodes may be gone."""
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
            # A failing callback must not end the reading of other lines.
            logger.exception("A line of output could not be passed on: %r", line)
