"""Environment of a worker: its rank and threads, and the process groups of torch and Horovod."""

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from paceline._base.process_and_network import (
    LOOPBACK,
    await_listener,
    num_cores,
    with_available_store,
)

logger = logging.getLogger(__name__)

THREADS_VARIABLE = "OMP_NUM_THREADS"
THREADS_MARK = "PACELINE_THREADS"
# The shards of a global batch, for workers whose number may change.
SHARDS_VARIABLE = "PACELINE_NUM_SHARDS"
# How long the workers may wait for others in a collective operation until their parent ends them.
COLLECTIVE_TIMEOUT_VARIABLE = "PACELINE_COLLECTIVE_TIMEOUT_S"
_WATCHER_SLACK_S = 60.0
_TORCHRUN_PREFIX = "TORCHELASTIC_"
_LONGEST_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Layout of a node: its share of the workers, and the meeting place of all workers.

    Attributes:
        num_local_workers: The workers of this node.
        num_nodes: The nodes of the attempt.
        node_rank: The number of this node.
        master_address: The address of the node of rank 0.
        master_port: The port on which rank 0 listens.
        sizes: The workers of each node; empty if every node has equally many.
    """

    num_local_workers: int
    master_port: int
    num_nodes: int = 1
    node_rank: int = 0
    master_address: str = LOOPBACK
    sizes: tuple[int, ...] = ()

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        if self.sizes:
            return sum(self.sizes[: self.node_rank])
        return self.node_rank * self.num_local_workers

    @property
    def world_size(self) -> int:
        """The workers of all nodes."""
        if self.sizes:
            return sum(self.sizes)
        return self.num_local_workers * self.num_nodes


def rank_environment(
    base: Mapping[str, str], layout: NodeLayout, local_rank: int
) -> dict[str, str]:
    """Return the environment of a worker: `base` and the variables of its place."""
    # Variables of torchrun would make the worker look for torchrun's store at MASTER_ADDR.
    environment = {k: v for k, v in base.items() if not k.startswith(_TORCHRUN_PREFIX)}
    environment |= {
        "RANK": str(layout.first_rank + local_rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.num_local_workers),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.num_nodes),
        "NODE_RANK": str(layout.node_rank),
        "MASTER_ADDR": layout.master_address,
        "MASTER_PORT": str(layout.master_port),
    }
    environment |= thread_environment(base, layout.num_local_workers)
    if layout.num_nodes == 1 and sys.platform == "linux":
        # Gloo would bind to the address of the host's name, which not every machine can resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def group_timeout(timeout_s: float) -> timedelta:
    """Return how long torch is to wait in a collective operation.

    Where somebody watches the workers, that is longer than the limit for them: the error of a
    watcher names the ranks that are missing, torch's does not.

    Args:
        timeout_s: How long where nobody watches, in seconds.
    """
    watched_s = float(os.environ.get(COLLECTIVE_TIMEOUT_VARIABLE, 0))
    least_s = min(watched_s + _WATCHER_SLACK_S, _LONGEST_S) if watched_s else 0.0
    return timedelta(seconds=max(timeout_s, least_s))


def thread_environment(base: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return the variables to share the cores among the workers of this node.

    A number that the user set stays. One that a runner set (which marks it) is for all workers
    together and is divided.
    """
    given = base.get(THREADS_VARIABLE)
    if given and not base.get(THREADS_MARK):
        return {}
    available = int(given) if given and given.isdigit() else num_cores()
    threads = str(max(1, available // num_workers))
    return {THREADS_VARIABLE: threads, THREADS_MARK: threads}


def log_threads(environments: Sequence[Mapping[str, str]]) -> None:
    """Say how many threads the workers of these environments compute with."""
    logger.info(
        "Starting %d worker(s) with %s thread(s) each (%s).",
        len(environments),
        environments[0][THREADS_VARIABLE],
        THREADS_VARIABLE,
    )


def launcher_shards() -> int | None:
    """Return the launcher's number of shards of a global batch, or None if not given.

    Raises:
        ValueError: PACELINE_NUM_SHARDS is no number from 1 on.
    """
    text = os.environ.get(SHARDS_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{SHARDS_VARIABLE} must be a number from 1 on, but got {text!r}.")
    return int(text)


def is_port_free(port: int) -> bool:
    """Tell whether a process on this node could listen on the port now."""
    with socket.socket() as probe:
        # Closed connections of an earlier run may linger on the port, and do no harm.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


_Info = TypeVar("_Info", bound="RankInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Place of a worker: its rank and its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(
        cls: type[_Info], environment: Mapping[str, str] = os.environ, **more: Any
    ) -> _Info:
        """Return the place given by the variables of a worker.

        Args:
            environment: The variables.
            more: Fields of a subclass.
        """
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(environment["NODE_RANK"]),
            **more,
        )


_HOST = "localhost"


class HorovodRendezvous:
    """Rendezvous server of Horovod, running in this process until `stop`.

    It gives the workers what `horovodrun --gloo` gives them.

    Raises:
        ImportError: Horovod is not installed.
    """

    def __init__(self) -> None:
        # Late import: only users of Horovod need the package.
        from horovod.runner.http.http_server import RendezvousServer

        self._server: Any = RendezvousServer()
        self._port = self._server.start()

    def variables(self, num_workers: int) -> list[dict[str, str]]:
        """Prepare a start of so many workers, and return the variables of each, in rank order."""
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

        # Server forgets the addresses of an earlier start by this call.
        self._server.init(get_host_assignments([HostInfo(_HOST, num_workers)], num_workers))
        return horovod_variables(num_workers, self._port)

    def stop(self) -> None:
        """End the server."""
        self._server.stop()

    def __enter__(self) -> "HorovodRendezvous":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop()


def horovod_variables(num_workers: int, port: int) -> list[dict[str, str]]:
    """Return the variables of workers meeting at a port of this machine, in rank order."""
    size = str(num_workers)
    same = {
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": _HOST,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
    }
    ranks = map(str, range(num_workers))
    return [{**same, "HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank} for rank in ranks]


# After so long torch waits for rank 0 itself, and says the cause.
_LISTEN_S = 60.0


def join_process_group(
    backend: str,
    *,
    timeout_s: float,
    method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Join a process group like `init_process_group`, without long pauses until rank 0 is there.

    Args:
        backend: Such as "gloo".
        timeout_s: How long ranks may wait for others where nobody watches them, in seconds.
        method: "env://", or "tcp://" with the host and the port of rank 0.
        rank: The rank of this process; by default the one in the environment.
        world_size: The number of ranks; by default the one in the environment.
    """
    from torch import distributed

    own_rank = os.environ.get("RANK", "0") if rank is None else rank
    if int(own_rank) != 0:
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if method == "env://":
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if host and port.isdecimal():
            await_listener(host, int(port), min(_LISTEN_S, timeout_s))
    with_available_store(
        lambda _: distributed.init_process_group(
            backend,
            init_method=method,
            rank=-1 if rank is None else rank,
            world_size=-1 if world_size is None else world_size,
            timeout=group_timeout(timeout_s),
        )
    )
