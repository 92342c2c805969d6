"""The `resources` section: slots, pools and priorities."""

from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from paceline.config._config_problems import refused
from paceline.config._section_base import (
    Count,
    PositiveSeconds,
    Section,
)


class SlotRange(Section):
    """How many slots an elastic trial may run on; each of its attempts gets as many as are free."""

    min: Count = Field(description="The fewest slots that a trial can run on.")
    max: Count = Field(description="The most slots that a trial can use.")

    @field_validator("max")
    @classmethod
    def _check_max(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min")
        if least is not None and value < least:
            raise refused("must be at least `min`", f"an integer >= {least}")
        return value


def _check_slots(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        raise refused(
            "must be at least 1",
            "an integer >= 1",
            hint="leave it out; without GPUs, a slot is a core of the CPU.",
        )
    return value


def _kind_of_slots(value: Any) -> str:
    return "range" if isinstance(value, (dict, SlotRange)) else "number"


class Resources(Section):
    """How many slots trials and the experiment may hold."""

    slots_per_trial: Annotated[
        Annotated[Count, Tag("number")] | Annotated[SlotRange, Tag("range")],
        Discriminator(_kind_of_slots),
        BeforeValidator(_check_slots),
    ] = Field(
        default=1,
        description="Slots that each trial runs on, or the fewest and the most as `min` and `max`.",
    )
    max_slots: Count | None = Field(
        default=None,
        description="Slots that all trials of the experiment may hold at once; null is no limit.",
    )

    pool: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None,
        validation_alias=AliasChoices("pool", "resource_pool"),
        description="Pool of nodes that the trials run on; null is the pool `default`.",
    )
    priority: Annotated[int, Field(ge=1, le=99)] | None = Field(
        default=None,
        description="Priority in pools with the policy `priority`: 1 is the most important one, 99 "
        "the least; null is 42.",
    )
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Share of the experiment in pools with the policy `fair_share`, in relation to "
        "the weights of others.",
    )
    allow_uneven: bool = Field(
        default=False,
        description="Whether a trial on several nodes may have more slots on one than on another.",
    )
    start_timeout: PositiveSeconds = Field(
        default=300.0,
        description="Seconds in which all nodes of a trial must have begun; otherwise it gives its "
        "slots back and is tried again later.",
    )

    @property
    def fewest_slots(self) -> int:
        """The fewest slots that a trial can run on."""
        given = self.slots_per_trial
        return given.min if isinstance(given, SlotRange) else given

    @property
    def most_slots(self) -> int:
        """The most slots that a trial can use."""
        given = self.slots_per_trial
        return given.max if isinstance(given, SlotRange) else given

    @field_validator("max_slots")
    @classmethod
    def _check_max_slots(cls, value: int | None, info: ValidationInfo) -> int | None:
        per_trial = info.data.get("slots_per_trial")
        least = per_trial.min if isinstance(per_trial, SlotRange) else per_trial
        if value is not None and least is not None and value < least:
            raise refused(
                "must be at least `resources.slots_per_trial`, or no trial could ever start",
                f"an integer >= {least}",
            )
        return value
