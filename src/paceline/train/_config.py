"""Configuration classes of a `Trainer`, with their checks."""

from dataclasses import dataclass
from typing import Any

from paceline._argument_checks import one_of
from paceline.workers.runs import ElasticConfig as ElasticConfig
from paceline.workers.runs import TorchConfig as TorchConfig

_BACKENDS = ("torch", "pytorch", "horovod")
_ORDERS = ("max", "min")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStrategy:
    """Which checkpoints of a run to keep; the newest is always kept, as a run goes on from it.

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
    """Return the config of a backend that is given by name or by its config.

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
