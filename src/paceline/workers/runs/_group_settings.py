"""Settings of the workers of a trainer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.workers._elastic_size import ElasticLimits
from paceline.workers._worker_resources import WorkerSettings
from paceline.workers.runs._torch_and_elastic_config import ElasticConfig, TorchConfig


@dataclass(slots=True, kw_only=True)
class GroupSettings(WorkerSettings):
    """Settings for the start and the set-up of workers.

    Of a pair of numbers of workers, `num_workers` is the most, or the least if that is no bound; it
    is 0 for functions that run in the driver's process.

    Attributes:
        functions: The module of the functions that they call.
        limits: How many there may be; None if `num_workers` is 0.
        config: How they meet.
        preload: Modules besides that they need at once.
        elastic: How to deal with workers that come and go.
        uses_horovod: Whether they meet in Horovod as well.
        hook: Called by each of them before anything else.
    """

    functions: str
    limits: ElasticLimits | None
    config: TorchConfig
    preload: Sequence[str] = ()
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    uses_horovod: bool = False
    hook: Callable[[], Any] | None = None
