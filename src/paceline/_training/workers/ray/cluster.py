"""Ray cluster of a driver: connection, resources, placement bundles, versions of nodes.

Also: shards of Ray Data.
"""

import json
import logging
import math
import os
import platform
import secrets
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline._base.files import replacing_atomically
from paceline._base.imports import required_library
from paceline._base.process_and_network import join
from paceline._training.workers.worker_failures import NodesDifferError

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_ADDRESS"
CLIENT_SCHEME = "ray://"
_AUTH_VARIABLE = "RAY_AUTH_MODE"
# With one of these, Ray reads no file in the home directory.
_OWN_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# Key of the first Ray autoscaler's state, and a dead node's status by the second autoscaler.
_STATUS_KEY = b"__autoscaling_status"
_DEAD = 2
# How far sums of fractions of a GPU may be off.
_EPSILON = 1e-6
_ANSWER_S = 10.0
_NOTICE_S = 1.0

Resources = Mapping[str, float]


def import_ray() -> Any:
    """Return Ray.

    Raises:
        ImportError: It is not installed.
    """
    return required_library("ray", "A Ray cluster", "paceline[ray]")


def is_ray_connected() -> bool:
    """Return whether this process is connected to a Ray cluster, or given an address."""
    ray = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)
    if is_initialized is not None and is_initialized():
        return True
    return bool(os.environ.get(ADDRESS_VARIABLE))


def check_no_client(ray: Any) -> None:
    """Check for a driver on a node of its Ray cluster, rather than a Ray client.

    Args:
        ray: Ray itself.

    Raises:
        NotOfferedError: It is a Ray client, or would be one.
    """
    if ray.is_initialized():
        is_client, what = (
            ray.util.client.ray.is_connected(),
            "this process is a Ray client (ray://)",
        )
    else:
        address = os.environ.get(ADDRESS_VARIABLE, "")
        is_client = address.startswith(CLIENT_SCHEME)
        what = f"{ADDRESS_VARIABLE} is {address!r}, which is for Ray clients"
    if is_client:
        from paceline.core._exceptions import NotOfferedError

        raise NotOfferedError(
            f"A driver of workers on Ray must run on a node of the cluster, but {what}. Hint: start"
            f" the script on the head node with {ADDRESS_VARIABLE}=HEAD:6379, the port of `ray"
            " start --head`, or submit it as a Ray job."
        )


def join_ray(address: str, namespace: str) -> Any:
    """Connect this process to a cluster, unless connected already, and return Ray.

    Args:
        address: What another process of the cluster has as its `gcs_address`.
        namespace: The namespace of Ray.

    Raises:
        ConnectionError: Nobody answers there, or the cluster needs a token.
    """
    ray = import_ray()
    if not ray.is_initialized():
        # Ray would look for a cluster of the loopback address at another one.
        is_on_loopback = address.startswith("127.")
        with _on_loopback() if is_on_loopback else nullcontext():
            _join_ray_cluster(ray, address, namespace=namespace)
    return ray


class _OwnCluster:
    """Counter of the users of a Ray started by Paceline."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_users = 0
        self.old_auth: str | None = None


_own = _OwnCluster()


class RayConnection:
    """Use of Ray: a joined cluster, or a Ray on the loopback address while in use.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: Nobody answers at ``RAY_ADDRESS``, or the cluster needs a token.
        NotOfferedError: This process is a Ray client, which is on no node of the cluster.
    """

    def __init__(self) -> None:
        self.ray = ray = import_ray()
        check_no_client(ray)
        with _own.lock:
            if not ray.is_initialized():
                _connect_to_ray(ray)
            elif _own.num_users:
                _own.num_users += 1
            self._is_user = _own.num_users > 0
        self._known_leaving: Collection[str] = ()
        self._asking: threading.Thread | None = None

    def close(self) -> None:
        """End this use; the last use ends a Ray started here."""
        with _own.lock:
            if self._is_user:
                self._is_user = False
                _own.num_users -= 1
                if _own.num_users == 0:
                    _end(self.ray)

    # ---- what there is -------------------------------------------------------------------

    def leaving(self) -> Collection[str]:
        """Return the ids of nodes to be taken away, as Ray was notified before."""
        # Ray has no public function for it, and older releases have none at all.
        ask = getattr(self.ray._private.state.state, "get_draining_nodes", dict)
        return frozenset(ask())

    def known_leaving(self) -> Collection[str]:
        """Return the last known ids of nodes to be taken away, in bounded time.

        Ray waits for a minute for a head node that is gone, while workers keep running.
        """
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(
                target=self._ask_leaving, name="paceline-leaving", daemon=True
            )
            self._asking.start()
            join(self._asking, _NOTICE_S)
        return self._known_leaving

    def _ask_leaving(self) -> None:
        # Without a head node nobody gives notice.
        with suppress(Exception):
            self._known_leaving = self.leaving()

    def may_grow(self) -> bool:
        """Return whether an autoscaler may add nodes for requested resources.

        Launchers such as `ray up` and KubeRay name the kinds of their nodes. In a cluster without
        an autoscaler, nodes have no kind, or Ray makes up one for each.
        """
        nodes = self._status().cluster_resource_state.node_states
        if any(node.ray_node_type_name for node in nodes if node.status != _DEAD):
            return True
        told = self._gcs.internal_kv_get(_STATUS_KEY, None, timeout=_ANSWER_S)
        report = json.loads(told or "{}").get("autoscaler_report") or {}
        return any(not kind.startswith("node_") for kind in report.get("active_nodes", ()))

    def is_infeasible(self, group_id: str) -> bool:
        """Return whether the autoscaler reports having no nodes for a placement group.

        It says so also while others use all the nodes that it may have. The first autoscaler of Ray
        says nothing.
        """
        requests = self._status().autoscaling_state.infeasible_gang_resource_requests
        return any(group_id in request.details for request in requests)

    @property
    def _gcs(self) -> Any:
        return self.ray._private.worker.global_worker.gcs_client

    def _status(self) -> Any:
        from ray.core.generated import autoscaler_pb2

        reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined] # generated
        reply.ParseFromString(self._gcs.get_cluster_status(timeout_s=_ANSWER_S))
        return reply

    def total(self) -> list[Resources]:
        """Return the resources of each living node, without nodes to be taken away."""
        return [node["Resources"] for node in self._staying()]

    def staying(self) -> set[str]:
        """Return the ids of the living nodes, without nodes to be taken away."""
        return {node["NodeID"] for node in self._staying()}

    def has_own_node(self) -> bool:
        """Tell whether the node of this process is alive, as far as Ray knows."""
        own = self.ray.get_runtime_context().get_node_id()
        return any(node["Alive"] and node["NodeID"] == own for node in self.ray.nodes())

    def available(self) -> list[Resources]:
        """Return the free resources of each staying node at this moment."""
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
    """Return resources as text, for example "4 CPU, 1 GPU"."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "none"


def added_up(nodes: list[Resources], names: list[str]) -> dict[str, float]:
    """Return how much of named resources nodes have together."""
    return {name: sum(node.get(name, 0.0) for node in nodes) for name in names}


def _connect_to_ray(ray: Any) -> None:
    if os.environ.get(ADDRESS_VARIABLE):
        _join_ray_cluster(ray, os.environ[ADDRESS_VARIABLE])
        return
    _own.old_auth = os.environ.get(_AUTH_VARIABLE)
    # Anyone who reaches a cluster without a token may run code there.
    os.environ.setdefault(_AUTH_VARIABLE, "token")
    _reread_settings()
    try:
        make_token_private()
        with _on_loopback():
            # Local address: a cluster that happens to run on this machine must not be used.
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
    if cluster := _machine_cluster():
        logger.warning(
            "Started Ray on this machine, beside the Ray cluster %s that it belongs to, as none was"
            " named. Hint: %s=%s uses that one.",
            cluster,
            ADDRESS_VARIABLE,
            cluster,
        )
    else:
        logger.info("Started Ray on this machine.")


def make_token_private() -> None:
    """Make the file of Ray's token, which Ray itself makes readable for all users of the machine.

    Raises:
        OSError: It cannot be written.
    """
    if os.environ[_AUTH_VARIABLE].lower() != "token" or any(map(os.environ.get, _OWN_TOKENS)):
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with replacing_atomically(path, mode=0o600) as written:
            written.write_text(secrets.token_hex(32))
    elif path.stat().st_mode & 0o077:
        path.chmod(0o600)
        logger.warning(
            "Others could read the token of Ray in %r, and run code as you where Ray runs. From now"
            " on they cannot. Hint: remove the file, and Ray gets another token.",
            str(path),
        )


def _machine_cluster() -> str | None:
    """Return the address of the cluster joined by `ray start` on this machine, or None."""
    # `ray stop` removes the file.
    path = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _join_ray_cluster(ray: Any, address: str, **options: Any) -> None:
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        # Ray itself keeps trying for minutes.
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError as error:
            raise ConnectionError(f"No Ray cluster answers at {address} ({error}).") from error
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except ConnectionError as error:
        if "InvalidAuthToken" not in "".join(traceback.format_exception(error)):
            raise
        raise ConnectionError(
            f"The Ray cluster at {address} needs its token. Hint: {_AUTH_VARIABLE}=token, and the"
            " token of the cluster in ~/.ray/auth_token."
        ) from error


def _end(ray: Any) -> None:
    ray.shutdown()
    _restore_auth()


def _restore_auth() -> None:
    if _own.old_auth is None:
        os.environ.pop(_AUTH_VARIABLE, None)
    _reread_settings()


def _reread_settings() -> None:
    """Make Ray read again the variables usually read at its import."""
    from ray._raylet import Config  # type: ignore[attr-defined] # it is compiled

    Config.initialize("")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on the loopback address only, as on systems without clusters."""
    from ray._private import ray_constants

    name = "ENABLE_RAY_CLUSTER"
    before = getattr(ray_constants, name, None)
    setattr(ray_constants, name, False)
    try:
        yield
    finally:
        setattr(ray_constants, name, before)


# A bundle must want something.
_NOTHING = {"CPU": 0.001}


class Bundles:
    """Bundles of a placement group with room for workers.

    Args:
        group: The placement group.
        indices: The index of a bundle for each worker that fits.
    """

    def __init__(self, group: Any, indices: Sequence[int]) -> None:
        self.group = group
        self.indices = list(indices)

    @classmethod
    def of_own(cls, wanted: Resources, num_workers: int, strategy: str) -> "Bundles":
        """Ask Ray for a placement group with a bundle for each worker."""
        from ray.util.placement_group import placement_group

        named = {name: amount for name, amount in wanted.items() if amount}
        bundles = [named or _NOTHING] * num_workers
        return cls(placement_group(bundles, strategy=strategy), range(num_workers))

    def free(self, connection: RayConnection, used: Sequence[int | None]) -> list[int]:
        """Return the unused bundles on staying nodes, an entry for each worker."""
        left = Counter(self.indices)
        left.subtract(index for index in used if index is not None)
        # Unary plus of a counter keeps positive counts only.
        if not +left:
            return []
        from ray.util.placement_group import placement_group_table

        staying = connection.staying()
        # Ray moves the bundles of a node that was lost once another one has room.
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return [index for index in sorted((+left).elements()) if nodes.get(index) in staying]

    def remove(self) -> None:
        """Give the bundles back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)

    def describe_lack(self, num_workers: int, wanted: Resources) -> str:
        """Return an error message: too few bundles of this process for the workers."""
        each = told_resources(wanted)
        bundle = json.dumps({name: _short(amount) for name, amount in wanted.items() if amount})
        return (
            f"{num_workers} worker(s) with {each} each must fit into the placement group that this"
            f" process runs in, such as that of a Ray Tune trial, but its free bundles have room"
            f" for {len(self.indices)}. Hint: ask for a bundle for each worker beside the one of"
            f" this process: tune.with_resources(function, tune.PlacementGroupFactory("
            f'[{{"CPU": 1}}] + [{bundle}] * {num_workers})).'
        )


def why_waiting(
    connection: RayConnection, bundle: Resources, num_bundles: int, strategy: str, group_id: str
) -> str:
    """Return why a placement group has no place in the cluster yet, as a phrase."""
    nodes = connection.total()
    if strategy == "STRICT_SPREAD":
        num_fit = sum(num_fitting([node], bundle) > 0 for node in nodes)
    else:
        num_fit = num_fitting(nodes, bundle)
    may_grow = connection.may_grow()
    if num_fit >= num_bundles:
        return "its resources are in use now" + "; its autoscaler may add nodes" * may_grow
    lack = f"its {len(nodes)} node(s) have room for {num_fit}"
    if not may_grow:
        return lack
    if connection.is_infeasible(group_id):
        return f"{lack}, and its autoscaler can add none that fits"
    return f"{lack}; its autoscaler may add nodes"


def given_bundles(ray: Any, wanted: Resources) -> Bundles | None:
    """Return the free bundles of this process's placement group; None without a group."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return None
    from ray.util.placement_group import placement_group_table

    own = _own_resources(ray)
    indices = []
    for index, resources in sorted(placement_group_table(group)["bundles"].items()):
        suffix = f"_group_{index}_{group.id.hex()}"
        left = {name: amount - own.get(name + suffix, 0.0) for name, amount in resources.items()}
        num_workers = num_fitting([left], wanted)
        if num_workers == sys.maxsize:
            # Workers that want nothing are spread over the bundles.
            num_workers = int("bundle" + suffix not in own)
        indices += [index] * num_workers
    return Bundles(group, indices)


def given_gpus(ray: Any) -> float | None:
    """Return the most GPUs in a bundle of this process's placement group, or None without."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return None
    from ray.util.placement_group import placement_group_table

    bundles = placement_group_table(group)["bundles"].values()
    return max(float(bundle.get("GPU", 0.0)) for bundle in bundles)


def _own_resources(ray: Any) -> Mapping[str, float]:
    """Return the resources given to this process by Ray, by names with the bundle."""
    # Ray's public function leaves out of which bundle it is.
    given = ray._private.worker.global_worker.core_worker.resource_ids()
    return {name: sum(amount for _, amount in parts) for name, parts in given.items()}


def _short(amount: float) -> float:
    return int(amount) if math.floor(amount) == amount else amount


COMPARED = ("paceline", "torch")


def check_versions(told: Sequence[Mapping[str, Any]]) -> None:
    """Check the versions reported by the actors of nodes.

    Raises:
        NodesDifferError: A node has others than this process.
    """
    own = own_versions()
    for facts in told:
        found = version_differences(own, facts["versions"])
        if found:
            raise NodesDifferError(
                f"All nodes must have the driver's versions, but node {facts['address']} has"
                f" {', '.join(found)}. Hint: install the same versions on all nodes."
            )


def own_versions() -> dict[str, str]:
    """Return the versions of this process, to compare with the nodes' versions."""
    versions = {name: metadata.version(name) for name in COMPARED}
    return {"Python": platform.python_version(), **versions}


def version_differences(own: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return a phrase for each version different from the driver's."""
    return [
        f"{name} {theirs.get(name, 'none')} instead of {version}"
        for name, version in own.items()
        if _public(name, theirs.get(name, "none")) != _public(name, version)
    ]


def _public(name: str, version: str) -> str:
    """Return the part of a version to compare: no build kind, no bug-fix release of Python."""
    if name == "Python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]


def make_node_watch() -> Callable[[int], None]:
    """Return a thread's function for actors, defined here to travel by value."""

    def end_with_node(raylet: int) -> None:
        """End this process, to free its resources, when the node's raylet ends.

        Ray itself does not see that a raylet has ended which nobody has waited for, as where the
        first process of a container does not.
        """
        import os
        import time

        while os.getppid() == raylet:
            time.sleep(1.0)
        # Without exit handlers, which could wait for the raylet that is gone.
        os._exit(1)

    return end_with_node


def is_ray_dataset(value: Any) -> bool:
    """Tell whether a value is a data set of Ray Data; this loads nothing."""
    data = sys.modules.get("ray.data")
    return data is not None and isinstance(value, data.Dataset)


class RayShards:
    """Shards of a Ray data set for the workers of a generation.

    The parts have equally many rows. The driver keeps this object until the workers have ended, as
    Ray ends the readers of the data when nobody refers to them.

    Args:
        dataset: The data set.
        num_workers: How many workers there are.
    """

    def __init__(self, dataset: Any, num_workers: int) -> None:
        ray = import_ray()
        self._iterators: Any = dataset.streaming_split(num_workers, equal=True)
        self._pickled = [ray.cloudpickle.dumps(each) for each in self._iterators]
        context = ray.get_runtime_context()
        self._address, self._namespace = context.gcs_address, context.namespace

    def __getstate__(self) -> dict[str, Any]:
        # Iterators stay with the driver; workers load theirs from Ray's own pickled form.
        return {**vars(self), "_iterators": None}

    def of_rank(self, rank: int) -> Any:
        """Return a rank's shard, after connecting this process to Ray."""
        return join_ray(self._address, self._namespace).cloudpickle.loads(self._pickled[rank])


def dealt(data: Any, num_workers: int) -> Any:
    """Return a run's data, with each Ray data set split into shards for the workers."""
    if is_ray_dataset(data):
        return RayShards(data, num_workers)
    if isinstance(data, Mapping):
        return {name: dealt(each, num_workers) for name, each in data.items()}
    if isinstance(data, (list, tuple)) and _has_ray_data(data):
        parts = [dealt(each, num_workers) for each in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data


def check_ray_data(data: Any, cluster: str) -> None:
    """Check a run's Ray data sets: workers must be on Ray; warn of the differences.

    Raises:
        TypeError: The workers are not on a Ray cluster.
    """
    if not _has_ray_data(data):
        return
    if cluster != "ray":
        raise TypeError(
            "A Ray data set must be read by workers on its Ray cluster, but those of this trainer"
            ' are on this machine without Ray. Hint: Trainer(cluster="ray"); or'
            " `dataset.write_parquet(path)` and `paceline.data.read(path)`, which also has an exact"
            " order; or `dataset.take_all()` if it is small."
        )
    logger.warning(
        "Ray splits this data set: its order can differ from run to run, each worker gets equally"
        " many rows, so that up to one row per worker is left out, and a run that goes on from a"
        " checkpoint begins its epoch anew. Hint: `paceline.data.read` has an exact order."
    )


def _has_ray_data(data: Any) -> bool:
    if isinstance(data, Mapping):
        return any(map(_has_ray_data, data.values()))
    if isinstance(data, (list, tuple)):
        # Samples can be many, and none of them is a data set then.
        return bool(data) and any(map(_has_ray_data, data[:2]))
    return is_ray_dataset(data)
