"""Host process of a worker on a Ray node: its start, and the forwarding to the driver."""

import dataclasses
import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from socket import socket, socketpair
from typing import NamedTuple

from paceline._base.process_and_network import interface_of
from paceline._training.workers.channels import (
    BlockingChannel,
    ChannelFrame,
    Forwarding,
    FrameKind,
    ListenerAddress,
    join_listener,
)
from paceline._training.workers.processes.leftover_processes import GROUP_VARIABLE
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.rank_environment import NodeLayout, rank_environment
from paceline._training.workers.processes.templates import forking_start, load_ahead
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.processes.worker_process import WorkerProcess, WorkerSpec
from paceline._training.workers.processes.worker_program import PROGRAM_FILE
from paceline._training.workers.ray.script_sources import unpack_script_directory
from paceline._training.workers.worker_failures import WorkerExit

# How often files are looked at.
_LOOK_INTERVAL_S = 0.01
_CHUNK_BYTES = 1024 * 1024
# Time to read the last data of a dead worker, in seconds.
_READ_S = 1.0


class Forwarder:
    """Forwarder of a worker's requests and of data appended to files.

    Args:
        end: The host's end of the socket to the worker.
        channel: The host's channel to the driver.
    """

    def __init__(self, end: socket, channel: BlockingChannel) -> None:
        self._link = BlockingChannel(end)
        self._channel = channel
        self._lock = threading.Lock()
        self._forwardings: list[Forwarding] = []
        self._offsets: dict[str, int] = {}
        self._is_over = threading.Event()
        self._answers: SimpleQueue[ChannelFrame | None] = SimpleQueue()
        self._relay = threading.Thread(target=self._pass_on, name="paceline-relay", daemon=True)
        self._answering = threading.Thread(
            target=self._give_answers, name="paceline-answer", daemon=True
        )
        self._pump: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen to the worker."""
        self._relay.start()
        self._answering.start()

    def answer(self, frame: ChannelFrame) -> None:
        """Queue a driver's answer for the worker, without waiting for the worker to read."""
        self._answers.put(frame)

    def finish(self) -> None:
        """Send the remaining data of an ended worker."""
        self._relay.join(_READ_S)
        self._is_over.set()
        self._answers.put(None)
        self._link.close()
        self._answering.join()
        if self._pump is not None:
            self._pump.join()
        self._send_news()
        for forwarding in self._forwardings:
            shutil.rmtree(forwarding.root, ignore_errors=True)

    def _pass_on(self) -> None:
        while (frame := self._link.receive()) is not None:
            if frame.kind is FrameKind.ASK:
                # Appended data go first: data written before a request arrive before it.
                self._send_news()
                with suppress(OSError):
                    self._channel.send(frame)
            elif frame.kind is FrameKind.FORWARD:
                with self._lock:
                    # The host unpickles what its own worker has written.
                    self._forwardings.append(pickle.loads(frame.body))  # noqa: S301
                if self._pump is None:
                    self._pump = threading.Thread(
                        target=self._follow_file, name="paceline-forward", daemon=True
                    )
                    self._pump.start()

    def _give_answers(self) -> None:
        while (frame := self._answers.get()) is not None:
            with suppress(OSError):
                self._link.send(frame)

    def _follow_file(self) -> None:
        while not self._is_over.wait(_LOOK_INTERVAL_S):
            self._send_news()

    def _send_news(self) -> None:
        """Send data appended since the last time."""
        with self._lock, suppress(OSError):
            for forwarding in list(self._forwardings):
                try:
                    names = sorted(os.listdir(forwarding.source))
                except FileNotFoundError:
                    if not os.path.isdir(forwarding.root):
                        self._forwardings.remove(forwarding)
                    continue
                for name in names:
                    self._send_file(forwarding, name)

    def _send_file(self, forwarding: Forwarding, name: str) -> None:
        source = os.path.join(forwarding.source, name)
        offset = self._offsets.get(source, 0)
        if os.stat(source).st_size <= offset:
            return
        with open(source, "rb") as file:
            file.seek(offset)
            while data := file.read(_CHUNK_BYTES):
                target = os.path.join(forwarding.target, name)
                self._channel.send(
                    ChannelFrame(FrameKind.APPEND, body=pickle.dumps((target, offset, data)))
                )
                offset += len(data)
                self._offsets[source] = offset


# Ray's own variables are for its processes; only what leads to the cluster is for others.
_KEPT_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH")


class HostOrder(NamedTuple):
    """Order to a host: the worker to start.

    Attributes:
        rank: The worker's rank.
        world_size: The number of workers.
        local_rank: Its number on the node.
        layout: The workers of its node, and where all of them meet.
        host_address: The address of its node.
        driver: Where the driver is met.
        key: The secret of those who may connect.
        environment: Variables for the worker.
        flags: Options of its interpreter.
        beat_s: The seconds between two signs of life.
        preload: Modules that the worker needs at once.
        directory: The directory that may have to travel.
    """

    rank: int
    world_size: int
    local_rank: int
    layout: NodeLayout
    host_address: str
    driver: ListenerAddress
    key: bytes
    environment: Mapping[str, str]
    flags: list[str]
    beat_s: float
    preload: Sequence[str]
    directory: str

    @property
    def worker_name(self) -> str:
        """Name of the worker's socket at the driver."""
        return f"worker {self.rank}"

    @property
    def host_name(self) -> str:
        """Name of the host's socket at the driver."""
        return f"host {self.rank}"


class WorkerHost:
    """Host of a worker: starts the process, forwards output and exit, obeys the driver.

    It ends the worker when the driver has gone; the worker dies with this process.

    Args:
        order: Which worker.
        archive: The driver's sources, if this node lacks them.
    """

    def __init__(self, order: HostOrder, archive: bytes | None) -> None:
        self._order = order
        self._copy = None if archive is None else unpack_script_directory(archive)
        self._group: LocalGroup | None = None

    def start(self) -> WorkerProcess:
        """Start the worker, and return its process.

        Raises:
            ConnectionError: The driver cannot be reached.
            WorkerStartError: The process cannot be started.
        """
        order = self._order
        self._channel = BlockingChannel(join_listener(order.driver, order.key, order.host_name))
        ours, theirs = socketpair()
        self._forwarder = Forwarder(ours, self._channel)
        self._forwarder.start()
        with theirs, join_listener(order.driver, order.key, order.worker_name) as end:
            spec = self._spec(end.fileno(), theirs.fileno())
            self._group = group = LocalGroup(
                [spec],
                self._send_line,
                on_exit=self._send_exit,
                # The next worker of this host is there at once.
                start=forking_start(spec.environment, order.preload),
            )
            group.start()
        threading.Thread(target=self._obey, name="paceline-host", daemon=True).start()
        threading.Thread(target=self._watch, name="paceline-watch", daemon=True).start()
        return dataclasses.replace(group.processes[0], rank=order.rank)

    def _spec(self, descriptor: int, link: int) -> WorkerSpec:
        order = self._order
        directory = self._copy or os.getcwd()
        target = {
            "descriptor": descriptor,
            "beat_s": order.beat_s,
            "node": {
                "link": link,
                "directory": directory,
                "moved": {} if self._copy is None else {order.directory: self._copy},
            },
        }
        return WorkerSpec(
            command=[sys.executable, *order.flags, PROGRAM_FILE, "serve", json.dumps(target)],
            environment=worker_environment(order),
            working_directory=Path(directory),
            rank=order.rank,
            local_rank=order.local_rank,
            node_rank=order.layout.node_rank,
            world_size=order.world_size,
            signals_whole_group=False,
            descriptors=(descriptor, link),
        )

    # ---- to the driver -------------------------------------------------------------------

    def _send(self, kind: FrameKind, content: object) -> None:
        # Without a driver nobody needs it.
        with suppress(OSError):
            self._channel.send(ChannelFrame(kind, body=json.dumps(content).encode()))

    def _send_line(self, line: OutputLine) -> None:
        self._send(FrameKind.LINE, dataclasses.asdict(line))

    def _send_exit(self, exit_: WorkerExit) -> None:
        self._forwarder.finish()
        self._send(FrameKind.EXIT, dataclasses.asdict(exit_))

    def _watch(self) -> None:
        """Report each stop and continuation of the worker, until its end."""
        assert self._group is not None
        was_stopped = False
        while self._group.wait(self._order.beat_s) is None:
            is_stopped = self._group.is_stopped(self._order.rank)
            if is_stopped != was_stopped:
                self._send(FrameKind.STOPPED, is_stopped)
                was_stopped = is_stopped
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        # The driver may kill this host as soon as it hears nothing more.
        self._channel.close()

    # ---- from the driver -----------------------------------------------------------------

    def _obey(self) -> None:
        assert self._group is not None
        while (frame := self._channel.receive()) is not None:
            if frame.kind is FrameKind.SIGNAL:
                self._group.signal(json.loads(frame.body))
            elif frame.kind is FrameKind.END:
                self._group.request_stop(json.loads(frame.body))
            elif frame.kind is FrameKind.DRAIN:
                self._group.drain(json.loads(frame.body))
                self._send(FrameKind.DRAINED, None)
            elif frame.kind is FrameKind.ANSWER:
                self._forwarder.answer(frame)
        self._group.request_stop(0.0)


def warm_up(order: HostOrder) -> None:
    """Load modules for this host's workers ahead, so they start at once."""
    load_ahead(worker_environment(order), order.preload)


def worker_environment(order: HostOrder) -> dict[str, str]:
    """Return the environment of a worker: this node's, the driver's wishes, and its place."""
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") or name.startswith(_KEPT_RAY_VARIABLES)
    }
    for name in (GROUP_VARIABLE, "OMP_NUM_THREADS"):
        # The number of threads is what Ray gives its actors, not the user's wish.
        base.pop(name, None)
    base |= order.environment
    interface = interface_of(order.host_address)
    if interface is not None:
        base.setdefault("GLOO_SOCKET_IFNAME", interface)
        if order.layout.num_nodes > 1 and not order.host_address.startswith("127."):
            base.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    environment = rank_environment(base, order.layout, order.local_rank)
    # Nodes may have unequally many workers.
    return environment | {"RANK": str(order.rank), "WORLD_SIZE": str(order.world_size)}
