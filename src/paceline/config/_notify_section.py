"""Section `notify`: messages about an experiment, and their channels."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config._fields_and_problems import Age, Section, Text, refused

Topic = Literal["alert", "experiment_ended", "experiment_failed", "trial_ended", "trial_failed"]
AlertLevel = Literal["debug", "info", "warn", "error"]
_Limit = Annotated[float, Field(allow_inf_nan=False)]
_MAX_THRESHOLDS = 20


class Threshold(Section):
    """Limit on a metric; the first value of each trial beyond the limit gives a message."""

    metric: Text = Field(description="Name of the metric.")
    group: Text | None = Field(
        default=None, description="Group of the metric, such as `validation`; null is any group."
    )
    above: _Limit | None = Field(default=None, description="Largest value without a message.")
    below: _Limit | None = Field(default=None, description="Smallest value without a message.")

    @model_validator(mode="after")
    def _check_limit(self) -> "Threshold":
        if (self.above is None) == (self.below is None):
            raise refused("must have one limit", "`above` or `below`")
        return self


class Notify(Section):
    """Choice of messages about experiments, and of their channels."""

    to: list[Text] = Field(
        default=[], description="Channels of the master, by their names in its `notify.yaml`."
    )
    events: list[Topic] = Field(
        default=["alert", "experiment_ended", "experiment_failed"],
        description="Events that give a message. An experiment that is canceled has `ended`.",
    )
    alert_level: AlertLevel = Field(
        default="info", description="Least level of the alerts that give a message."
    )
    thresholds: Annotated[list[Threshold], Field(max_length=_MAX_THRESHOLDS)] = Field(
        default=[], description="Limits on metrics; each trial gives one message for each limit."
    )
    silent_after: Age | None = Field(
        default=None,
        description="Time without a report from a running trial, after which there is a message.",
    )
    gpu_idle_after: Age | None = Field(
        default=None,
        description="Time with all GPUs of a node below 5 %, after which there is a message; needs"
        " the system metrics of `core_context.profiler`.",
    )

    @field_validator("events", "thresholds", "silent_after", "gpu_idle_after")
    @classmethod
    def _check_channel(cls, value: object, info: ValidationInfo) -> object:
        # A resolved config names the default events even without a channel.
        default = cls.model_fields[str(info.field_name)].default
        if value != default and not info.data.get("to", True):
            raise refused("has no effect without a channel", hint="name one by `notify.to`.")
        return value
