"""Settings of a trainer's workers, from its arguments."""

from typing import Any

from paceline.core import launched_place
from paceline.train._config import ElasticConfig, TorchConfig
from paceline.train._trainer_arguments import trainer_worker_limits
from paceline.workers import WorkerResources, chosen_cluster
from paceline.workers.runs import GroupSettings, is_pool_worker

# By its name, as it loads torch.
_WORKER_FUNCTIONS = "paceline.engine.train_functions._train_function_jobs"
# What train functions use: each new worker would load it otherwise, before its first batch.
_FUNCTIONS_USE = ("paceline.train",)


def chosen_settings(
    num_workers: Any,
    config: TorchConfig,
    resources: WorkerResources,
    *,
    cluster: str,
    heartbeat_timeout_s: float,
    elastic: ElasticConfig,
) -> GroupSettings:
    """Return how workers are started and set up; see `Trainer` for the arguments.

    Raises:
        ImportError: Ray is wanted, but not installed.
        ResourcesError: The workers want more than this machine has.
        TypeError: A value has another type.
        ValueError: A value is unknown or out of range.
    """
    limits = trainer_worker_limits(num_workers, elastic)
    if not heartbeat_timeout_s > 0:
        raise ValueError(f"`heartbeat_timeout_s` must be above 0, but got {heartbeat_timeout_s!r}.")
    resources.check_backend(config.backend)
    can_join = launched_place() is not None and not is_pool_worker()
    cluster = chosen_cluster(cluster, can_join=can_join)
    if cluster == "local":
        resources.check_machine(0 if limits is None else limits.least)
    return GroupSettings(
        functions=_WORKER_FUNCTIONS,
        preload=_FUNCTIONS_USE,
        num_workers=0 if limits is None else limits.num_asked_for,
        limits=limits,
        elastic=elastic,
        config=config,
        resources=resources,
        cluster=cluster,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
