"""Host process of a worker on a node of a Ray cluster; the Ray actor starts it."""

import dataclasses
import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from typing import NamedTuple

from paceline._network_interfaces import interface_of
from paceline.workers.pools._channel import BlockingChannel, ChannelFrame, FrameKind
from paceline.workers.processes._fork_client import forking_start, load_ahead
from paceline.workers.processes._leftover_processes import GROUP_VARIABLE
from paceline.workers.processes._local_worker_group import LocalGroup
from paceline.workers.processes._output_lines import OutputLine
from paceline.workers.processes._rank_environment import NodeLayout, rank_environment
from paceline.workers.processes._worker_exit import WorkerExit
from paceline.workers.processes._worker_program import PROGRAM_FILE
from paceline.workers.processes._worker_spec import WorkerProcess, WorkerSpec
from paceline.workers.remote._forwarder import Forwarder
from paceline.workers.remote._listener import ListenerAddress, join_listener
from paceline.workers.remote._script_directory import unpack_script_directory

# Ray's own variables are for its processes; only what leads to the cluster is for others.
_KEPT_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH")


class HostOrder(NamedTuple):
    """Which worker a host is to start.

    Attributes:
        rank: The worker's rank.
        world_size: The number of workers.
        local_rank: Its number on the node.
        layout: The workers of its node, and where all of them meet.
        host_address: The address of its node.
        driver: Where the driver is met.
        key: What is known to those who may meet it.
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
        """The name under which the worker's socket reaches the driver."""
        return f"worker {self.rank}"

    @property
    def host_name(self) -> str:
        """The name under which the host's socket reaches the driver."""
        return f"host {self.rank}"


class WorkerHost:
    """Starts one worker, passes on its output and its end, and obeys the driver.

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
        """Tell when the worker is stopped or goes on, until it has ended."""
        assert self._group is not None
        was_stopped = False
        while self._group.wait(self._order.beat_s) is None:
            is_stopped = self._group.is_stopped(self._order.rank)
            if is_stopped != was_stopped:
                self._send(FrameKind.STOPPED, is_stopped)
                was_stopped = is_stopped
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        # The driver may kill this host as soon as it hears no more of it.
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
    """Load what workers of this host need, so that they start at once."""
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
