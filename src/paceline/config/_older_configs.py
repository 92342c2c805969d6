"""The section of older configs for what are arguments of the trainer today."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.config._config_problems import refused
from paceline.config._ignored_fields import without_effect
from paceline.config._section_base import Count, NonNegative, Section, Text

_ONE_PIECE = "gradients are reduced in one piece"
_WITHOUT_EFFECT = {
    "average_training_metrics": "training metrics are always averaged, over all ranks",
    "gradient_compression": "gradients are reduced as they are",
    "tensor_fusion_threshold": _ONE_PIECE,
    "tensor_fusion_cycle_time": _ONE_PIECE,
    "auto_tune_tensor_fusion": _ONE_PIECE,
    "grad_updates_size_file": "sizes of gradients are not recorded",
}


def _check_precision(value: Any) -> Any:
    if value in ("O2", "O3"):
        raise refused(
            "is not offered, as weights stay in full precision",
            "'O0' or 'O1'",
            hint="use O1, which computes in 16 bits where that is safe.",
        )
    return value


def _ignored(name: str) -> Any:
    return without_effect(_WITHOUT_EFFECT[name])


class Optimizations(Section):
    """How gradients are aggregated, and settings of other ways to reduce them."""

    aggregation_frequency: Count = Field(
        default=1, description="Global batches per optimizer step."
    )
    average_aggregated_gradients: bool = Field(
        default=True,
        description="Whether the gradient of several batches is their mean, not their sum.",
    )
    mixed_precision: Annotated[Literal["O0", "O1"], BeforeValidator(_check_precision)] = Field(
        default="O0",
        description="Precision of a trainer: O0 is fp32, O1 is fp16 with a scaled loss.",
    )
    average_training_metrics: bool | None = _ignored("average_training_metrics")
    gradient_compression: bool | None = _ignored("gradient_compression")
    tensor_fusion_threshold: NonNegative | None = _ignored("tensor_fusion_threshold")
    tensor_fusion_cycle_time: NonNegative | None = _ignored("tensor_fusion_cycle_time")
    auto_tune_tensor_fusion: bool | None = _ignored("auto_tune_tensor_fusion")
    grad_updates_size_file: Text | None = _ignored("grad_updates_size_file")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each setting that is given but has no effect."""
        return tuple(
            f"`optimizations.{name}` has no effect: {reason}."
            for name, reason in _WITHOUT_EFFECT.items()
            if getattr(self, name) is not None
        )
