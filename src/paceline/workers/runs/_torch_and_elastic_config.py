"""Settings of the workers of train functions: how they meet, and how they come and go."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.workers._elastic_size import ElasticLimits

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
        capacity: Tells how many workers could run at the moment, those that run included, where
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
