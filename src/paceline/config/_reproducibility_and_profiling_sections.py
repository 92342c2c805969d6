"""The sections `reproducibility` and `profiling`."""

from typing import Annotated

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
)

from paceline.config._config_problems import refused
from paceline.config._section_base import (
    NonNegative,
    Section,
)


class Reproducibility(Section):
    """What a search repeats when it is run again."""

    experiment_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="Seed of the search, from which each trial's seed is drawn; "
        "null draws one at submission.",
    )


class Profiling(Section):
    """Which part of the training is profiled."""

    enabled: bool = Field(
        default=False, description="Record the times of the parts of each step on each rank."
    )
    begin_on_batch: NonNegative = Field(default=0, description="First batch that is profiled.")
    end_after_batch: NonNegative | None = Field(
        default=None, description="Last batch that is profiled; null is the end of the training."
    )
    sync_timings: bool = Field(
        default=True,
        description="Measure the work of the GPU; otherwise the launch of the work.",
    )

    @field_validator("end_after_batch")
    @classmethod
    def _check_end(cls, value: int | None, info: ValidationInfo) -> int | None:
        begin = info.data.get("begin_on_batch")
        if value is not None and begin is not None and value < begin:
            raise refused(
                "must not lie before `profiling.begin_on_batch`", f"an integer >= {begin}"
            )
        return value
