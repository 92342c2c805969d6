"""A pool of workers on the nodes of a Ray cluster."""

import os
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from paceline._training.workers.channels import Listener, ListenerAddress
from paceline._training.workers.process_pools import ProcessPool, check_at_least
from paceline._training.workers.processes.leftover_processes import GROUP_VARIABLE
from paceline._training.workers.processes.rank_environment import THREADS_VARIABLE, NodeLayout
from paceline._training.workers.processes.worker_process import WorkerProcess
from paceline._training.workers.processes.worker_program import CHANNEL_VARIABLE
from paceline._training.workers.ray.cluster import (
    RayConnection,
    Resources,
    added_up,
    check_versions,
    given_gpus,
)
from paceline._training.workers.ray.host_process import HostOrder
from paceline._training.workers.ray.hosts import (
    LACK_OF_MEMORY,
    HostActor,
    RayGroup,
    RayGroupWorker,
    log_lack_of_memory,
)
from paceline._training.workers.ray.placement import RayHosts
from paceline._training.workers.ray.script_sources import ScriptSources, pack_script_directory
from paceline._training.workers.worker_failures import WorkerStartError
from paceline._training.workers.worker_generation import Generation

# Prefixes of driver variables that travel to other nodes, with access to object stores.
_TRAVELLING = (
    "PACELINE_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUBLAS_", "AWS_", "AZURE_STORAGE_",
    "GOOGLE_",
)  # fmt: skip
# The token may open all of a master; the driver alone reports to one.
_STAYING = (GROUP_VARIABLE, CHANNEL_VARIABLE, "PACELINE_TOKEN")
_LOOK_INTERVAL_S = 0.05
# The longest that actors, interpreters and their libraries may take to load.
_START_S = 120.0


class _Host(NamedTuple):
    """Host of a worker: its actor, its node's facts, and whether the node has the sources."""

    actor: Any
    facts: Mapping[str, Any]
    has_sources: bool
    origin: HostActor | None


class _Place(NamedTuple):
    """Host of a worker, its rank there, and the layout of the nodes."""

    host: _Host
    local_rank: int
    layout: NodeLayout


class RayPool(ProcessPool):
    """Warm workers on the nodes of a Ray cluster, each held by an actor in a placement group.

    The cluster that this process is connected to is joined, or the one that ``RAY_ADDRESS`` names;
    else Ray is started on this machine until `shutdown`. Each worker is a process of its own beside
    its actor, which gets the environment of its node with `environment`; it ends with its actor,
    and so with this process. The workers connect to this process over TCP. The directory of the
    driver's script is sent to nodes that lack it.

    In a process that itself runs in a placement group, such as a Ray Tune trial, the workers take
    the free bundles of that group instead of a new one.

    Args:
        num_workers: The number of workers.
        cpus_per_worker: The CPUs that Ray sets aside for each.
        gpus_per_worker: The GPUs that Ray gives each, also parts of one; by default one if the
            cluster has any.
        resources_per_worker: Further resources of Ray by their names.
        preload: Modules that workers need at once.
        placement_timeout_s: How long to wait for resources that others use at the moment, and for
            nodes that an autoscaler may add, in seconds.
        strategy: How Ray spreads the workers over nodes: "PACK", "SPREAD", "STRICT_PACK" or
            "STRICT_SPREAD".
        options: Those of `ProcessPool`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: A number is out of range.
    """

    needs_reservation = True

    def __init__(
        self,
        num_workers: int,
        *,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = None,
        resources_per_worker: Resources | None = None,
        preload: Sequence[str] = (),
        placement_timeout_s: float = 60.0,
        strategy: str = "PACK",
        **options: Any,
    ) -> None:
        super().__init__(num_workers, **options)
        check_at_least("cpus_per_worker", cpus_per_worker, 0)
        check_at_least("gpus_per_worker", gpus_per_worker, 0)
        self._gpus_per_worker = gpus_per_worker
        self._bundle = {"CPU": float(cpus_per_worker), **(resources_per_worker or {})}
        self._preload = tuple(preload)
        self.placement_timeout_s = placement_timeout_s
        self._strategy = strategy
        self._connection: RayConnection | None = None
        self._has_run = False
        self._made_hosts: RayHosts | None = None
        self._working: list[tuple[HostActor, RayGroupWorker]] = []

    def capacity(self) -> int:
        """Return how many workers could run at this moment; see `WorkerPool.capacity`."""
        return self._hosts().capacity()

    def leaving_ranks(self) -> Sequence[int]:
        """Return the ranks on nodes drained by Ray; see `WorkerPool.leaving_ranks`."""
        if self._connection is None or not self.is_alive:
            return []
        leaving = self._connection.known_leaving()
        return [worker.process.rank for host, worker in self._working if host.node in leaving]

    def check_possible(self) -> None:
        """Check whether the cluster as a whole could run the workers.

        Raises:
            ResourcesError: It never can, with its present nodes and no autoscaler, or the placement
                group that this process runs in has too few free bundles.
        """
        self._hosts().check_possible(self._num_workers)

    @property
    def bundle(self) -> Resources:
        """Resources set aside by Ray for each worker."""
        self._connected()
        return {name: amount for name, amount in self._bundle.items() if amount}

    def reserve(self, num_workers: int) -> int:
        """Begin to create actors for more workers; see `WorkerPool.reserve`."""
        return self._hosts().reserve(num_workers)

    def request(self, num_workers: int) -> None:
        """Have an autoscaler add nodes for more workers; see `WorkerPool.request`."""
        self._hosts().request(num_workers)

    def cancel_reservation(self) -> None:
        """Give back actors without workers; see `WorkerPool.cancel_reservation`."""
        self._hosts().cancel()

    def shutdown(self, force: bool = False) -> None:
        """End the workers, and a Ray started by this pool; `force` kills workers at once."""
        super().shutdown(force)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ---- making a generation -------------------------------------------------------------

    def _connected(self) -> RayConnection:
        if self._connection is None:
            self._connection = connection = RayConnection()
            gpus = self._gpus_per_worker
            if gpus is None:
                given = given_gpus(connection.ray)
                there = added_up(connection.total(), ["GPU"])["GPU"] if given is None else given
                gpus = min(1.0, there)
            self._bundle["GPU"] = gpus
        return self._connection

    def _hosts(self) -> RayHosts:
        connection = self._connected()
        if self._made_hosts is None:
            order = self._sample_order()
            self._made_hosts = RayHosts(connection, self._bundle, self._strategy, order)
        for host, worker in self._working:
            host.is_lost = host.is_lost or worker.is_lost
        return self._made_hosts

    def _make_generation(self) -> Generation:
        ray = self._connected().ray
        sources = ScriptSources.of_driver()
        try:
            taken = self._take_hosts()
            deadline = time.monotonic() + _START_S
            hosts = self._ask_hosts(ray, taken, sources, deadline)
            places = _in_rank_order(ray, hosts, deadline)
            with closing(Listener(ray.util.get_node_ip_address())) as listener:
                return self._meet(ray, places, sources, listener, deadline)
        except (ray.exceptions.RayError, ConnectionError) as error:
            text = str(error).strip().splitlines()[-1]
            if isinstance(error, ray.exceptions.OutOfMemoryError):
                text = f"Ray has killed an actor, {LACK_OF_MEMORY}"
            raise WorkerStartError(f"The workers could not be started: {text}") from error

    def _take_hosts(self) -> list[HostActor]:
        hosts = self._hosts()
        if not self._has_run:
            hosts.check_possible(self._num_workers)
        return hosts.take(self._num_workers, self.placement_timeout_s)

    def _ask_hosts(
        self, ray: Any, taken: Sequence[HostActor], sources: ScriptSources, deadline: float
    ) -> list[_Host]:
        """Return the hosts: actors with their nodes' facts."""
        check_versions([host.facts for host in taken])
        asked = [host.actor.mark_of.remote(sources.directory) for host in taken]
        marks = _get(ray, asked, deadline)
        return [
            _Host(host.actor, host.facts, mark == sources.mark, host)
            for host, mark in zip(taken, marks, strict=True)
        ]

    def _meet(
        self,
        ray: Any,
        places: Sequence[_Place],
        sources: ScriptSources,
        listener: Listener,
        deadline: float,
    ) -> Generation:
        """Have the actors start the workers, and return them once they are connected."""
        archive = None
        if not all(place.host.has_sources for place in places):
            archive = ray.put(pack_script_directory(sources.directory))
        # Late import: the module loads journals and storages.
        from paceline._training.workers.ray.forwarded_storage import StorageRequests

        starting = []
        for rank, place in enumerate(places):
            host = place.host
            order = self._order(rank, place, listener.address, listener.key, sources.directory)
            starting.append(host.actor.start.remote(order, None if host.has_sources else archive))
        ends = _await_ends(ray, listener, starting, deadline)
        processes: list[WorkerProcess] = _get(ray, starting, deadline)
        workers = [
            RayGroupWorker(
                process,
                f"its node {_told_node(places, place)} or its Ray actor",
                ends[f"host {process.rank}"],
                partial(ray.kill, place.host.actor),
                partial(log_lack_of_memory, ray, place.host.actor, rank),
                StorageRequests,
            )
            for rank, (place, process) in enumerate(zip(places, processes, strict=True))
        ]
        self._has_run = True
        origins = [place.host.origin for place in places if place.host.origin is not None]
        self._working = list(zip(origins, workers, strict=True))
        return Generation(
            [ends[f"worker {rank}"] for rank in range(len(places))],
            lambda on_exit: RayGroup(workers, self._on_line, on_exit),
            self._settings,
        )

    def _order(
        self, rank: int, place: _Place, driver: ListenerAddress, key: bytes, directory: str
    ) -> HostOrder:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
        return HostOrder(
            rank=rank,
            world_size=self._num_workers,
            local_rank=place.local_rank,
            layout=place.layout,
            host_address=place.host.facts["address"],
            driver=driver,
            key=key,
            environment={**_travelling_environment(), **self._environment},
            flags=flags,
            beat_s=self._settings.tick_s,
            preload=self._preload,
            directory=directory,
        )

    def _sample_order(self) -> HostOrder:
        """Return a sample order, with the parts common to all orders."""
        listener = ListenerAddress("127.0.0.1", 0)
        facts = {"address": listener.host}
        place = _Place(
            _Host(None, facts, True, None), 0, NodeLayout(num_local_workers=1, master_port=0)
        )
        return self._order(0, place, listener, b"", "")

    def _release_after(self, error: BaseException) -> None:
        if type(error) is not WorkerStartError:
            self._release()
            return
        # A node was lost meanwhile; the others need not begin anew.
        hosts, self._working = self._hosts(), []
        hosts.keep_answering()

    def _release(self) -> None:
        self._working = []
        hosts, self._made_hosts = self._made_hosts, None
        if hosts is not None:
            hosts.release()


def _get(ray: Any, references: Sequence[Any], deadline: float) -> Any:
    return ray.get(list(references), timeout=max(0.001, deadline - time.monotonic()))


def _in_rank_order(ray: Any, hosts: Sequence[_Host], deadline: float) -> list[_Place]:
    """Return the places of all ranks, node by node, the driver's node first."""
    own_node = ray.get_runtime_context().get_node_id()
    counts = Counter(host.facts["node"] for host in hosts)
    ranked = sorted(
        hosts,
        key=lambda host: (
            host.facts["node"] != own_node,
            -counts[host.facts["node"]],
            host.facts["node"],
            host.facts["devices"],
        ),
    )
    nodes = list(dict.fromkeys(host.facts["node"] for host in ranked))
    # Port on the node of rank 0, where all ranks meet; its actor keeps it reserved.
    (port,) = _get(ray, [ranked[0].actor.reserve_port.remote()], deadline)
    numbers: Counter[str] = Counter()
    places = []
    for host in ranked:
        node = host.facts["node"]
        layout = NodeLayout(
            num_local_workers=counts[node],
            num_nodes=len(nodes),
            node_rank=nodes.index(node),
            master_address=ranked[0].facts["address"],
            master_port=port,
        )
        places.append(_Place(host, numbers[node], layout))
        numbers[node] += 1
    return places


def _told_node(places: Sequence[_Place], place: _Place) -> str:
    """Return the name of a place's node for errors, with its ranks if there are several."""
    facts = place.host.facts
    ranks = [rank for rank, p in enumerate(places) if p.host.facts["node"] == facts["node"]]
    told = f" (ranks {', '.join(map(str, ranks))})" if len(ranks) > 1 else ""
    return f"{facts['address']}{told}"


def _await_ends(
    ray: Any, listener: Listener, starting: Sequence[Any], deadline: float
) -> dict[str, socket.socket]:
    """Return the sockets of all workers and hosts, by name."""
    ends: dict[str, socket.socket] = {}
    try:
        while len(ends) < 2 * len(starting):
            met = listener.accept(_LOOK_INTERVAL_S)
            if met is not None:
                ends[met[0]] = met[1]
                continue
            # An actor that failed raises here.
            ray.get(ray.wait(list(starting), num_returns=len(starting), timeout=0)[0])
            if time.monotonic() > deadline:
                raise WorkerStartError("The workers must connect in time, but did not.")
    except BaseException:
        for end in ends.values():
            end.close()
        raise
    return ends


def _travelling_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_TRAVELLING) or name == THREADS_VARIABLE) and name not in _STAYING
    }
