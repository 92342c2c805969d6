"""Settings for the start of a trainer's workers: cluster, resources, checks of this machine."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

from paceline._base.arguments_and_errors import one_of
from paceline._base.gpus import CUDA_VARIABLE, names_in_variable, num_visible_gpus
from paceline._base.process_and_network import num_cores
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.processes.worker_process import OnLine
from paceline._training.workers.ray.cluster import check_no_client, import_ray, is_ray_connected
from paceline._training.workers.ray.pool import RayPool
from paceline._training.workers.worker_failures import ResourcesError
from paceline._training.workers.worker_pools import WorkerPool

logger = logging.getLogger(__name__)


# How many workers for each core are more than a test would have.
_CROWD = 4
# Most workers per core: more cannot be started in a bearable time.
_MOST = 16
_NAMES = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}


class WorkerResources(NamedTuple):
    """Resources of each worker.

    Attributes:
        cpus: Its cores; None to share them.
        gpus: Its GPUs; None for one if there are any.
        others: What else it needs of a Ray cluster.
    """

    cpus: int | None = None
    gpus: float | None = None
    others: Mapping[str, float] = MappingProxyType({})

    def check_backend(self, backend: str | None) -> None:
        """Check whether the workers can meet by a backend of torch.distributed.

        Raises:
            ValueError: They are to share GPUs, which NCCL refuses.
        """
        if backend == "nccl" and self.gpus is not None and 0 < self.gpus < 1:
            raise ValueError(
                "`gpus_per_worker` must be a whole number with the backend NCCL, which knows no"
                f" workers that share a GPU, but got {self.gpus!r}. Hint: TorchConfig(backend="
                '"gloo").'
            )

    def check_machine(self, num_workers: int) -> None:
        """Check whether this machine can run so many workers.

        Raises:
            ValueError: They want a resource that machines do not have.
            ResourcesError: They want more than there is.
        """
        for name in self.others:
            raise ValueError(
                f"`resources_per_worker` must name resources of this machine, CPU or GPU, but got"
                f" {name!r}."
            )
        self.check_cores(num_workers)
        _check_available("GPU(s)", "gpus_per_worker", num_workers, self.gpus or 0, num_visible_gpus)

    def check_cores(self, num_workers: int, name: str = "cpus_per_worker") -> None:
        """Check whether this machine has the cores for so many workers.

        Args:
            num_workers: How many workers.
            name: The argument that gives the cores of each.

        Raises:
            ResourcesError: They want more than there are.
        """
        if self.cpus is None:
            check_crowd(num_workers)
        if self.cpus is None and num_workers > _CROWD * num_cores():
            logger.warning(
                "%d workers are to share %d CPU core(s), so each gets little time. Hint: fewer"
                " workers; `%s` makes it an error.",
                num_workers,
                num_cores(),
                name,
            )
        _check_available("CPU core(s)", name, num_workers, self.cpus or 0, num_cores)

    def capacity(self) -> int:
        """Return how many workers fit on this machine; `sys.maxsize` if they ask for nothing."""
        fitting = [sys.maxsize]
        if self.cpus:
            fitting.append(num_cores() // self.cpus)
        if self.gpus:
            fitting.append(int(num_visible_gpus() // self.gpus))
        return min(fitting)


def most_startable() -> int:
    """Return how many processes this machine can start in a bearable time."""
    return _MOST * num_cores()


def check_crowd(num_workers: int) -> None:
    """Check whether this machine can start so many processes in a bearable time.

    Raises:
        ResourcesError: There are far more than its cores.
    """
    most = most_startable()
    if num_workers > most:
        raise ResourcesError(
            f"At most {_MOST} workers for each CPU core can be started, which is {most} on this"
            f" machine with {num_cores()} core(s), but {num_workers} are asked for. Hint: fewer"
            " workers, or a cluster with more cores."
        )


@dataclass(slots=True, kw_only=True)
class WorkerSettings:
    """Settings for the start of a trainer's workers.

    Attributes:
        num_workers: How many were asked for.
        cluster: "joined" for the processes of an outer launcher, "local" or "ray".
        resources: The resources of each.
        environment: Variables for them.
        heartbeat_timeout_s: How long one may give no sign of life, in seconds.
    """

    num_workers: int
    cluster: str = "local"
    resources: WorkerResources = field(default_factory=WorkerResources)
    environment: Mapping[str, str] = field(default_factory=dict)
    heartbeat_timeout_s: float = 30.0

    def make_pool(
        self,
        num_workers: int,
        *,
        timeout_s: float,
        preload: Sequence[str],
        on_line: OnLine | None = None,
        strategy: str = "PACK",
    ) -> WorkerPool:
        """Return a pool of workers on this machine or on the Ray cluster.

        Args:
            num_workers: How many workers.
            timeout_s: How long ranks may wait for each other, in seconds.
            preload: Modules that workers need at once.
            on_line: Gets each output line.
            strategy: How Ray spreads the workers over nodes.

        Raises:
            ResourcesError: The Ray cluster can never run so many workers, and adds no nodes.
        """
        resources = self.resources
        common: dict[str, Any] = {
            "environment": self.environment,
            "on_line": on_line,
            "heartbeat_timeout_s": self.heartbeat_timeout_s,
            "collective_timeout_s": timeout_s,
            "threads_per_worker": resources.cpus,
            "preload": preload,
        }
        if self.cluster == "local":
            return LocalPool(num_workers, capacity=resources.capacity, **common)
        pool = RayPool(
            num_workers,
            cpus_per_worker=1 if resources.cpus is None else resources.cpus,
            gpus_per_worker=resources.gpus,
            resources_per_worker=resources.others,
            strategy=strategy,
            **common,
        )
        pool.check_possible()
        return pool

    def ray_bundles(self, num_workers: int) -> list[dict[str, float]]:
        """Return the resources a Ray cluster has to set aside for each worker, by Ray's names.

        Raises:
            ImportError: Ray is not installed.
            ResourcesError: The cluster can never run them.
        """
        settings = replace(self, cluster="ray")
        pool = settings.make_pool(num_workers, timeout_s=1.0, preload=())
        assert isinstance(pool, RayPool)
        try:
            return [dict(pool.bundle) for _ in range(num_workers)]
        finally:
            pool.shutdown()

    def num_concurrent(self) -> int:
        """Return how many groups of so many workers have room at once, at least 1.

        Workers of this machine that share its cores count as if each had one.
        """
        num_workers = max(1, self.num_workers)
        if self.cluster == "ray":
            pool = self.make_pool(num_workers, timeout_s=1.0, preload=())
            try:
                return max(1, pool.capacity() // num_workers)
            finally:
                pool.shutdown()
        cpus, gpus = self.resources.cpus or 1, self.resources.gpus
        if gpus is None and num_visible_gpus():
            gpus = 1.0
        return max(1, self.resources._replace(cpus=cpus, gpus=gpus).capacity() // num_workers)

    def own_devices(self, index: int) -> dict[str, str]:
        """Return the variable to give a local group GPUs apart from those of other groups.

        Args:
            index: The number of the group, from 0, among those that run at once.
        """
        if self.cluster != "local" or not num_visible_gpus():
            return {}
        names = names_in_variable() or [str(number) for number in range(num_visible_gpus())]
        each = self.num_workers * (1.0 if self.resources.gpus is None else self.resources.gpus)
        return {CUDA_VARIABLE: ",".join(names[int(index * each) : ceil((index + 1) * each)])}


def chosen_cluster(cluster: Any, *, can_join: bool = False) -> str:
    """Return "joined", "local" or "ray" for a trainer's argument `cluster`.

    Args:
        cluster: The argument.
        can_join: Whether "auto" is "joined", as an outer launcher has started this process.

    Raises:
        ImportError: Ray is wanted and not installed.
        NotOfferedError: This process is a Ray client, or ``RAY_ADDRESS`` is for one.
        ValueError: The cluster is unknown.
    """
    try:
        one_of("auto", "local", "ray")("cluster", cluster)
    except ValueError as error:
        if ":" not in str(cluster):
            raise
        raise ValueError(
            f'{error} Hint: cluster="ray" takes the Ray cluster that RAY_ADDRESS names, such as'
            " RAY_ADDRESS=HEAD:6379, in a script on a node of it."
        ) from None
    if cluster == "auto" and can_join:
        return "joined"
    if cluster == "auto":
        cluster = "ray" if is_ray_connected() else "local"
    if cluster == "ray":
        check_no_client(import_ray())
    return str(cluster)


def checked_resources(
    cpus: int | None, gpus: float | None, more: Mapping[str, float] | None
) -> WorkerResources:
    """Return the resources of each worker.

    Args:
        cpus: The cores of each; None to share them.
        gpus: The GPUs of each; None for one if there are any.
        more: The same by the names of Ray, "CPU" and "GPU", and others.

    Raises:
        TypeError: A number is none.
        ValueError: A resource is given twice, or below 0.
    """
    given: dict[str, Any] = {"CPU": cpus, "GPU": gpus}
    for name, amount in (more or {}).items():
        if given.get(name) not in (None, amount):
            raise ValueError(
                f"`resources_per_worker[{name!r}]` and `{_NAMES[name]}` must agree, but got"
                f" {amount!r} and {given[name]!r}. Hint: give one of them."
            )
        given[name] = amount
    for name, amount in given.items():
        if amount is not None and (
            isinstance(amount, bool) or not isinstance(amount, (int, float))
        ):
            argument = _NAMES.get(name, f"resources_per_worker[{name!r}]")
            raise TypeError(f"`{argument}` must be a number, but got {amount!r}.")
    cpus, gpus = given.pop("CPU"), given.pop("GPU")
    if cpus is not None and (cpus < 1 or cpus != int(cpus)):
        raise ValueError(f"`cpus_per_worker` must be an integer of at least 1, but got {cpus!r}.")
    if gpus is not None and gpus < 0:
        raise ValueError(f"`gpus_per_worker` must be at least 0, but got {gpus!r}.")
    return WorkerResources(None if cpus is None else int(cpus), gpus, given)


def _check_available(
    unit: str, name: str, num_workers: int, amount: float, num_available: Any
) -> None:
    wanted = num_workers * amount
    if not wanted:
        return
    available = num_available()
    if wanted > available:
        raise ResourcesError(
            f"{num_workers} worker(s) with `{name}`={amount:g} need {wanted:g} {unit}, but this"
            f" machine has {available}. Hint: fewer workers, or less for each."
        )
