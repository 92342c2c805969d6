"""The Ray cluster that a driver is connected to, or starts for itself on this machine."""

import logging
import math
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_ADDRESS"
_AUTH_VARIABLE = "RAY_AUTH_MODE"
# How far sums of fractions of a GPU may be off.
_EPSILON = 1e-6

Resources = Mapping[str, float]


def import_ray() -> Any:
    """Return Ray.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Workers on a Ray cluster need Ray, which is not installed. Hint: pip install"
            " 'paceline[ray]'"
        ) from error
    return ray


def is_ray_connected() -> bool:
    """Tell whether this process is connected to a Ray cluster, or is told of one to connect to."""
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return True
    return bool(os.environ.get(ADDRESS_VARIABLE))


def join_ray(address: str, namespace: str) -> Any:
    """Connect this process to a cluster, unless it is connected to one, and return Ray.

    Args:
        address: What another process of the cluster has as its `gcs_address`.
        namespace: The namespace of Ray.
    """
    ray = import_ray()
    if not ray.is_initialized():
        # Ray would look for a cluster of the loopback address at another one.
        is_on_loopback = address.startswith("127.")
        with _on_loopback() if is_on_loopback else nullcontext():
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                configure_logging=False,
            )
    return ray


class _OwnCluster:
    """Counts who uses the Ray that Paceline has started."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self.old_auth: str | None = None


_own = _OwnCluster()


class RayConnection:
    """A use of Ray, which is joined, or started on the loopback address for the time of its use.

    Raises:
        ImportError: Ray is not installed.
        NotOfferedError: This process is a Ray client, which is on no node of the cluster.
    """

    def __init__(self) -> None:
        self.ray = ray = import_ray()
        with _own.lock:
            if not ray.is_initialized():
                _connect(ray)
            elif _own.num_users:
                _own.num_users += 1
            self._is_user = _own.num_users > 0
        if ray.util.client.ray.is_connected():
            from paceline.core import NotOfferedError

            self.close()
            raise NotOfferedError(
                "A driver of workers on Ray must run on a node of the cluster, but this process is"
                " a Ray client (ray://). Hint: submit the script as a Ray job, or start it on the"
                " head node."
            )

    def close(self) -> None:
        """Give up this use; the last one ends a Ray that was started here."""
        with _own.lock:
            if self._is_user:
                self._is_user = False
                _own.num_users -= 1
                if _own.num_users == 0:
                    _end(self.ray)

    # ---- what there is -------------------------------------------------------------------

    def leaving(self) -> Collection[str]:
        """Return the ids of the nodes that will be taken away, as Ray was told with notice."""
        # Ray has no public function for it, and older releases have none at all.
        ask = getattr(self.ray._private.state.state, "get_draining_nodes", dict)
        return frozenset(ask())

    def total(self) -> list[Resources]:
        """Return what each living node has that will not be taken away."""
        return [node["Resources"] for node in self._staying()]

    def staying(self) -> set[str]:
        """Return the ids of the living nodes that will not be taken away."""
        return {node["NodeID"] for node in self._staying()}

    def available(self) -> list[Resources]:
        """Return what each such node has to give at this moment."""
        # Ray's public function adds up the nodes, though a worker must fit on one of them.
        per_node = self.ray._private.state.available_resources_per_node()
        leaving = self.leaving()
        return [resources for node, resources in per_node.items() if node not in leaving]

    def _staying(self) -> list[Mapping[str, Any]]:
        leaving = self.leaving()
        nodes = self.ray.nodes()
        return [node for node in nodes if node["Alive"] and node["NodeID"] not in leaving]


def num_fitting(nodes: list[Resources], bundle: Resources) -> int:
    """Return how many bundles of resources fit on nodes."""
    wanted = {name: amount for name, amount in bundle.items() if amount}
    if not wanted:
        return sys.maxsize if nodes else 0
    return sum(
        min(math.floor(node.get(name, 0.0) / amount + _EPSILON) for name, amount in wanted.items())
        for node in nodes
    )


def told_resources(resources: Resources) -> str:
    """Return resources as text, such as "4 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "none"


def added_up(nodes: list[Resources], names: list[str]) -> dict[str, float]:
    """Return how much of named resources nodes have together."""
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in names}


def _connect(ray: Any) -> None:
    if os.environ.get(ADDRESS_VARIABLE):
        # Ray reads the variable itself.
        ray.init(log_to_driver=False, configure_logging=False)
        return
    _own.old_auth = os.environ.get(_AUTH_VARIABLE)
    # Whoever reaches a cluster without a token may run code on it.
    os.environ.setdefault(_AUTH_VARIABLE, "token")
    _reread_settings()
    try:
        with _on_loopback():
            # Not a cluster that happens to run on this machine.
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
    except BaseException:
        _restore_auth()
        raise
    _own.num_users = 1
    logger.info("Started Ray on this machine.")


def _end(ray: Any) -> None:
    ray.shutdown()
    _restore_auth()


def _restore_auth() -> None:
    if _own.old_auth is None:
        os.environ.pop(_AUTH_VARIABLE, None)
    _reread_settings()


def _reread_settings() -> None:
    """Have Ray see the variables that it has read at its import."""
    from ray._raylet import Config  # type: ignore[attr-defined] # it is compiled

    Config.initialize("")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray listen on the loopback address alone, as it does where it makes no clusters."""
    from ray._private import ray_constants

    name = "ENABLE_RAY_CLUSTER"
    before = getattr(ray_constants, name, None)
    setattr(ray_constants, name, False)
    try:
        yield
    finally:
        setattr(ray_constants, name, before)
