"""The environment that tells each worker its place."""

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from paceline._network_interfaces import LOOPBACK
from paceline._usable_cores import num_cores

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
    """Which workers run on this node, and where all of them meet.

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
    """Return the environment of one worker: `base` and the variables that place it."""
    # These variables of torchrun would make the worker look for torchrun's store at MASTER_ADDR.
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
    watcher names the ranks that are missing, that of torch does not.

    Args:
        timeout_s: How long where nobody watches, in seconds.
    """
    watched_s = float(os.environ.get(COLLECTIVE_TIMEOUT_VARIABLE, 0))
    least_s = min(watched_s + _WATCHER_SLACK_S, _LONGEST_S) if watched_s else 0.0
    return timedelta(seconds=max(timeout_s, least_s))


def thread_environment(base: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return the variables that share the cores among the workers of this node.

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


def shards_of_launcher() -> int | None:
    """Return the shards of a global batch that the launcher tells, if it does.

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
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
