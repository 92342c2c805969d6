"""Which machines the workers of a trainer run on."""

from typing import TYPE_CHECKING, Any

from paceline.core import launched_place
from paceline.train._current import is_pool_worker
from paceline.train._storage_requests import StorageRequests
from paceline.workers import LocalPool, RayPool, WorkerPool, import_ray, is_ray_connected

if TYPE_CHECKING:
    from paceline.train._group import GroupSettings
    from paceline.train._output import WorkerOutput

_CLUSTERS = ("auto", "local", "ray")


def chosen_cluster(cluster: Any) -> str:
    """Return "joined", "local" or "ray" for what `Trainer` was given.

    Raises:
        ImportError: Ray is wanted and not installed.
        ValueError: The cluster is unknown.
    """
    if cluster not in _CLUSTERS:
        names = ", ".join(map(repr, _CLUSTERS))
        raise ValueError(f"`cluster` must be one of {names}, but got {cluster!r}.")
    if cluster == "auto" and launched_place() is not None and not is_pool_worker():
        return "joined"
    if cluster == "auto":
        cluster = "ray" if is_ray_connected() else "local"
    if cluster == "ray":
        import_ray()
    return str(cluster)


def make_pool(settings: "GroupSettings", num_workers: int, output: "WorkerOutput") -> WorkerPool:
    """Return a pool of workers on the cluster that the settings name.

    Raises:
        ResourcesError: The Ray cluster can never run so many workers.
    """
    if settings.cluster == "local":
        return LocalPool(
            num_workers,
            environment=settings.environment,
            on_line=output,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            collective_timeout_s=settings.config.timeout_s,
            threads_per_worker=settings.cpus_per_worker,
            capacity=settings.capacity,
            preload=["paceline.train._worker"],
        )
    pool = RayPool(
        num_workers,
        cpus_per_worker=1 if settings.cpus_per_worker is None else settings.cpus_per_worker,
        gpus_per_worker=settings.gpus_per_worker,
        resources_per_worker=settings.resources_per_worker,
        environment=settings.environment,
        on_line=output,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        collective_timeout_s=settings.config.timeout_s,
        threads_per_worker=settings.cpus_per_worker,
        preload=["paceline.train._worker"],
        make_handler=StorageRequests,
    )
    pool.check_possible()
    return pool
