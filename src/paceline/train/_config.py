"""Configuration classes of a trainer and settings of its workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline._base.arguments_and_errors import one_of
from paceline._training.workers.workers import ElasticLimits, WorkerSettings

_COLLECTIVES = (None, "gloo", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConfig:
    """Settings of the process group.

    Attributes:
        backend: "gloo" or "nccl"; by default NCCL with GPUs, else gloo.
        init_method: "env" or "tcp": how they find each other; both lead to the same address.
        timeout_s: How long a collective call waits for other workers, in seconds.

    Raises:
        ValueError: A value is unknown or out of range.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.backend not in _COLLECTIVES:
            raise ValueError(f"`backend` must be 'gloo' or 'nccl', but got {self.backend!r}.")
        if self.init_method not in ("env", "tcp"):
            raise ValueError(f"`init_method` must be 'env' or 'tcp', but got {self.init_method!r}.")
        if not self.timeout_s > 0:
            raise ValueError(f"`timeout_s` must be above 0, but got {self.timeout_s!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Settings of an elastic group.

    Attributes:
        max_wait_s: How long to wait while fewer workers than the least number can run, in seconds.
        first_delay_s: After how many seconds to look again for the first time; each further delay
            is twice as long.
        longest_delay_s: The longest of these delays, in seconds.
        capacity: Returns how many workers could run at the moment, those that run included, where
            something else than the cluster decides it, such as a scheduler that lends slots. It
            is asked often, so it must return at once.
        num_shards: The shards of a global batch, which is also the most workers that a run can
            grow to. By default the most workers asked for; without a bound, as in
            `(4, math.inf)`, twice the workers of the first start, where more can ever run.

    Raises:
        TypeError: `num_shards` is no integer.
        ValueError: A value is out of range.
    """

    max_wait_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    capacity: Callable[[], int] | None = None
    num_shards: int | None = None

    def __post_init__(self) -> None:
        self.limits(1)
        if self.num_shards is None:
            return
        if not isinstance(self.num_shards, int) or isinstance(self.num_shards, bool):
            raise TypeError(f"`num_shards` must be an integer, but got {self.num_shards!r}.")
        if self.num_shards < 1:
            raise ValueError(f"`num_shards` must be at least 1, but got {self.num_shards}.")

    def limits(self, num_workers: Any) -> ElasticLimits:
        """Return the limits of a group.

        Args:
            num_workers: A number, or a pair of the least and the most.

        Raises:
            TypeError: It is neither.
            ValueError: It is out of range.
        """
        return ElasticLimits.of(
            num_workers,
            max_wait_s=self.max_wait_s,
            first_delay_s=self.first_delay_s,
            longest_delay_s=self.longest_delay_s,
        )


_BACKENDS = ("torch", "pytorch", "horovod")
_ORDERS = ("max", "min")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStrategy:
    """Policy for keeping checkpoints of a run; the newest always stays, for resuming.

    Attributes:
        num_to_keep: How many; None for all.
        checkpoint_score_attribute: The value by which the best are kept, from the state that is
            saved or else the last report; None keeps the newest.
        checkpoint_score_order: "max" if larger values are better, or "min".

    Raises:
        ValueError: A value is unknown or out of range.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and self.num_to_keep < 1:
            raise ValueError(
                f"`num_to_keep` must be at least 1, or None for all, but got {self.num_to_keep!r}."
            )
        if self.checkpoint_score_order not in _ORDERS:
            raise ValueError(
                "`checkpoint_score_order` must be 'max' or 'min', but got"
                f" {self.checkpoint_score_order!r}."
            )


def backend_config(backend: Any, config: TorchConfig | None) -> TorchConfig:
    """Return the config of a backend given by name or by its config.

    Raises:
        TypeError: A value has another type.
        ValueError: The backend is unknown.
    """
    if isinstance(backend, TorchConfig) and config is None:
        return backend
    one_of(*_BACKENDS)("backend", backend)
    if config is not None and not isinstance(config, TorchConfig):
        raise TypeError(
            f"`backend_config` must be a train.TorchConfig, but got {type(config).__name__}."
        )
    return config or TorchConfig()


@dataclass(slots=True, kw_only=True)
class TrainWorkerSettings(WorkerSettings):
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
