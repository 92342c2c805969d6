"""Experiment config: the frozen model.

Its sections are hyperparameters, resources, reproducibility and profiling.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import WithJsonSchema

from paceline.config import _fields_and_problems as fields
from paceline.config._entrypoint_command import (
    check_entrypoint,
    default_name_by_entrypoint,
    reference_problems,
    trial_class,
)
from paceline.config._environment_and_secrets import Environment, Notify
from paceline.config._searcher_registry import AnySearcher, on_new_methods

if TYPE_CHECKING:
    from paceline.search._search_method import SearchConfig
from paceline.config._checkpoint_storage_section import AnyStorage
from paceline.config._searcher_section import check_hyperparameter_space


class SlotRange(fields.Section):
    """How many slots an elastic trial may run on; each of its attempts gets as many as are free."""

    min: fields.Count = Field(description="The fewest slots that a trial can run on.")
    max: fields.Count = Field(description="The most slots that a trial can use.")

    @field_validator("max")
    @classmethod
    def _check_max(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min")
        if least is not None and value < least:
            raise fields.refused("must be at least `min`", f"an integer >= {least}")
        return value


def _check_slots(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        raise fields.refused(
            "must be at least 1",
            "an integer >= 1",
            hint="leave it out; without GPUs, a slot is a core of the CPU.",
        )
    return value


def _slot_kind(value: Any) -> str:
    return "range" if isinstance(value, (dict, SlotRange)) else "number"


class Resources(fields.Section):
    """How many slots trials and the experiment may hold."""

    slots_per_trial: Annotated[
        Annotated[fields.Count, Tag("number")] | Annotated[SlotRange, Tag("range")],
        Discriminator(_slot_kind),
        BeforeValidator(_check_slots),
    ] = Field(
        default=1,
        description="Slots that each trial runs on, or the fewest and the most as `min` and `max`.",
    )
    max_slots: fields.Count | None = Field(
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
    interactive: bool = Field(
        default=False,
        description="Whether somebody works with the trials while they run; pools may put such "
        "trials first in some hours.",
    )
    start_timeout: fields.PositiveSeconds = Field(
        default=300.0,
        description="Seconds in which all nodes of a trial must have begun; otherwise it gives its "
        "slots back and is tried again later.",
    )

    @property
    def fewest_slots(self) -> int:
        """Smallest number of slots for a trial to run on."""
        given = self.slots_per_trial
        return given.min if isinstance(given, SlotRange) else given

    @property
    def most_slots(self) -> int:
        """Largest number of slots usable by a trial."""
        given = self.slots_per_trial
        return given.max if isinstance(given, SlotRange) else given

    @field_validator("max_slots")
    @classmethod
    def _check_max_slots(cls, value: int | None, info: ValidationInfo) -> int | None:
        per_trial = info.data.get("slots_per_trial")
        least = per_trial.min if isinstance(per_trial, SlotRange) else per_trial
        if value is not None and least is not None and value < least:
            raise fields.refused(
                "must be at least `resources.slots_per_trial`, or no trial could ever start",
                f"an integer >= {least}",
            )
        return value


class LogPolicy(fields.Section):
    """What follows if a line of a trial's output has a text; `*` in it is any text.

    Parts are looked for one after the other, so that no pattern takes longer than to read the line.
    """

    pattern: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Text that a line must have; `*` in it stands for any text."
    )
    action: Literal["alert", "no_retry", "exclude_node"] = Field(
        description="Only an alert; or no restart if the attempt fails; or no more attempts of the "
        "trial on that node."
    )

    def matches(self, line: str) -> bool:
        """Return whether a line has the text."""
        place = 0
        for part in self.pattern.split("*"):
            place = line.find(part, place)
            if place < 0:
                return False
            place += len(part)
        return True


class Idle(fields.Section):
    """Limits on trials that hold slots without use, or report nothing."""

    silent_after: fields.Age | None = Field(
        default=None, description="Time without a report of a trial, after which there is an alert."
    )
    unused_after: fields.Age | None = Field(
        default=None,
        description="Time without use of the slots by a trial, after which there is an alert.",
    )
    pause_after: fields.Age | None = Field(
        default=None,
        description="Time after the alert, after which the experiment is paused; null is never.",
    )

    @model_validator(mode="after")
    def _check_pause(self) -> "Idle":
        if self.pause_after and not (self.silent_after or self.unused_after):
            hint = "give `idle.unused_after` or `idle.silent_after`."
            raise fields.refused("`pause_after` has no effect without an alert", hint=hint)
        return self


class Interactive(fields.Section):
    """Mark of a JupyterLab, a shell or a TensorBoard on slots; `paceline notebook` makes one."""

    kind: Literal["notebook", "shell", "tensorboard"] = Field(
        description="What runs: its owner opens it with `paceline open`."
    )
    idle_timeout: fields.Age = Field(
        default=3600.0,
        description="Time without use, after which it ends; its slots are free then.",
    )


class Reproducibility(fields.Section):
    """Settings repeated exactly when a search is run again."""

    experiment_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="Seed of the search, from which each trial's seed is drawn; "
        "null draws one at submission.",
    )


class Profiling(fields.Section):
    """Profiled part of the training."""

    enabled: bool = Field(
        default=False, description="Record the times of the parts of each step on each rank."
    )
    begin_on_batch: fields.NonNegative = Field(
        default=0, description="First batch that is profiled."
    )
    end_after_batch: fields.NonNegative | None = Field(
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
            raise fields.refused(
                "must not lie before `profiling.begin_on_batch`", f"an integer >= {begin}"
            )
        return value


_ENTRYPOINT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ]
}


class ExperimentConfig(fields.Section):
    """Complete configuration of an experiment, apart from its code."""

    name: fields.Text = Field(
        default="experiment",
        description="Name of the experiment; the default is the entrypoint's script.",
    )
    description: str = Field(default="", description="Free text.")
    labels: list[fields.Text] = Field(default=[], description="Labels to find the experiment by.")
    data: fields.JsonMap = Field(
        default={}, description="Free-form map that the training code can read as `user_data`."
    )
    searcher: AnySearcher = Field(description="How trials are chosen and stopped.")
    # The next two are checked against those before them, so the order matters.
    hyperparameters: Annotated[dict[str, Any], BeforeValidator(check_hyperparameter_space)] = Field(
        default={}, description="Names and values, ranges or nested maps of them."
    )
    entrypoint: Annotated[
        str | list[str], BeforeValidator(check_entrypoint), WithJsonSchema(_ENTRYPOINT_SCHEMA)
    ] = Field(
        description="Command to run, a string for the shell or a list, in which "
        "`${hparams.name}` is filled in; or a trial class as `module:Class`.",
    )
    resources: Resources = Field(default=Resources(), description="Slots to run on.")
    max_restarts: fields.NonNegative = Field(
        default=5, description="How often a trial that fails is started again."
    )
    checkpoint_policy: Literal["best", "all", "none"] = Field(
        default="best", description="Which checkpoints a trainer saves by itself."
    )
    checkpoint_storage: AnyStorage | None = Field(
        default=None,
        description="Where checkpoints go; a path or file:// URL alone is a directory, null is "
        "the master's default location.",
    )
    reproducibility: Reproducibility = Field(
        default=Reproducibility(), description="Seed of the search."
    )
    environment: Environment = Field(
        default=Environment(), description="Interpreter, variables and directory to run with."
    )
    profiling: Profiling = Field(default=Profiling(), description="What is profiled.")
    notify: Notify = Field(
        default=Notify(), description="Messages about the experiment by channels of the master."
    )
    idle: Idle = Field(
        default=Idle(), description="When idle trials give an alert, and are paused."
    )
    log_policies: Annotated[list[LogPolicy], Field(max_length=20)] = Field(
        default=[], description="What follows from lines of the output, such as errors of a GPU."
    )
    interactive: Interactive | None = Field(
        default=None, description="For a notebook, a shell or a TensorBoard; null for training."
    )
    preemption_timeout: fields.PositiveSeconds = Field(
        default=600.0, description="Seconds that a preempted trial may take to save and end."
    )
    debug: bool = Field(default=False, description="Log in detail.")
    min_validation_period: fields.Period | None = Field(
        default=None, description="When a trainer validates; an integer counts batches, 0 is never."
    )
    min_checkpoint_period: fields.CheckpointPeriod | None = Field(
        default=None,
        description="When a trainer stores a checkpoint; an integer counts batches, 0 is never, "
        "`continuous` begins the next one when the last one is stored.",
    )
    checkpoint_bytes_per_hour: fields.NumBytes | None = Field(
        default=None,
        description="How many bytes of continuous checkpoints a trial stores in an hour at most; "
        "null is no limit.",
    )
    memory_checkpoints: bool | fields.PositiveSeconds | None = Field(
        default=None,
        description="Whether a trainer copies its state to shared memory between checkpoints: "
        "true, seconds, or a share of the time below 1.",
    )
    scheduling_unit: fields.Count | None = Field(
        default=None, description="Batches between a trainer's reports of training metrics."
    )
    perform_initial_validation: bool = Field(
        default=False, description="Whether a trainer validates before the first batch."
    )
    optimizations: fields.Optimizations = Field(
        default=fields.Optimizations(), description="How a trainer aggregates gradients."
    )
    records_per_epoch: fields.NonNegative | None = fields.without_effect(
        "the data set tells its own length"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_after_entrypoint(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name") is not None:
            return data
        return {**data, "name": default_name_by_entrypoint(data.get("entrypoint"))}

    @field_validator("labels")
    @classmethod
    def _drop_repeated_labels(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(value))

    @field_validator("entrypoint")
    @classmethod
    def _check_references(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        space = info.data.get("hyperparameters")
        problems = reference_problems(value, space) if space is not None else []
        if problems:
            raise fields.refused_parts(problems)
        return value

    @field_validator("entrypoint")
    @classmethod
    def _check_length(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        searcher = info.data.get("searcher")
        if searcher is None or trial_class(value) is None:
            return value
        if searcher.length_unit not in fields.UNITS:
            raise fields.refused(
                "in the form `module:Class` needs a searcher that tells how long to train",
                hint="give `searcher.max_length`, for example {epochs: 8}.",
            )
        return value

    @model_validator(mode="after")
    def _check_interactive(self) -> "ExperimentConfig":
        if self.interactive is None:
            return self
        problems = [
            fields.Problem(path=path, value=value, message=f"must be {wanted} with `interactive`")
            for path, value, wanted, is_right in (
                ("searcher.name", self.searcher.name, "`single`", self.searcher.name == "single"),
                ("max_restarts", self.max_restarts, "0", self.max_restarts == 0),
            )
            if not is_right
        ]
        if problems:
            raise fields.refused_parts(problems)
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each accepted setting without effect."""
        found = []
        if self.records_per_epoch is not None:
            found.append(
                "`records_per_epoch` has no effect: an epoch is as long as the data set is."
            )
        if getattr(self.searcher, "stop_once", None) is not None:
            found.append("`searcher.stop_once` has no effect: a stopped trial never continues.")
        if self.checkpoint_bytes_per_hour and self.min_checkpoint_period != fields.CONTINUOUS:
            found.append(
                "`checkpoint_bytes_per_hour` has no effect without `min_checkpoint_period:"
                " continuous`."
            )
        found.extend(self.optimizations.warnings)
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return the resolved config as plain data, loadable as an equal config."""
        return self.model_dump(mode="json")

    @property
    def deletes_while_running(self) -> bool:
        """Whether checkpoints not kept are deleted before the experiment has ended."""
        storage = self.checkpoint_storage
        has_rule = storage is not None and (storage.save_age or storage.save_bytes)
        return bool(has_rule) or self.min_checkpoint_period == fields.CONTINUOUS

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration.

        Raises:
            paceline.search.SearchMethodError: The code of the search method fails.
        """
        from paceline.search._search_method import method_errors

        with method_errors(self.searcher.name, "search_config"):
            return self.searcher.search_config()


on_new_methods(lambda: ExperimentConfig.model_rebuild(force=True))
