"""Settings of a trainer's workers, from its arguments."""

from importlib.util import find_spec
from typing import Any

from paceline.core import NotOfferedError, launched_place
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
    uses_horovod: bool = False,
) -> GroupSettings:
    """Return how workers are started and set up; see `Trainer` for the arguments.

    Raises:
        ImportError: Ray or Horovod is wanted, but not installed.
        NotOfferedError: Horovod is to work on a Ray cluster.
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
    if uses_horovod:
        _check_horovod(cluster)
    return GroupSettings(
        functions=_WORKER_FUNCTIONS,
        preload=_FUNCTIONS_USE,
        num_workers=0 if limits is None else limits.num_asked_for,
        limits=limits,
        elastic=elastic,
        uses_horovod=uses_horovod,
        config=config,
        resources=resources,
        cluster=cluster,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


def _check_horovod(cluster: str) -> None:
    if cluster == "ray":
        raise NotOfferedError(
            '`backend="horovod"` is not offered on a Ray cluster. Hint: cluster="local", or the'
            ' backend "torch", which computes the same.'
        )
    if find_spec("horovod") is None:
        raise ImportError(
            '`backend="horovod"` needs Horovod, but it is not installed. Hint: docs/backends.md'
            " shows how to build it."
        )
