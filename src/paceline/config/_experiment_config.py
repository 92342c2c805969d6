"""The experiment config: one frozen model that checks everything when it is made."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import WithJsonSchema

from paceline.config._config_problems import refused, refused_parts
from paceline.config._entrypoint_command import (
    check_entrypoint,
    default_name_by_entrypoint,
    reference_problems,
    trial_class,
)
from paceline.config._environment_section import Environment
from paceline.config._hyperparameters_section import check_hyperparameter_space
from paceline.config._ignored_fields import without_effect
from paceline.config._json_maps import JsonMap
from paceline.config._lengths_and_periods import (
    CONTINUOUS,
    UNITS,
    CheckpointPeriod,
    NumBytes,
    Period,
)
from paceline.config._method_registry import AnySearcher, on_new_methods
from paceline.config._older_configs import Optimizations
from paceline.config._reproducibility_and_profiling_sections import Profiling, Reproducibility
from paceline.config._resources_section import Resources
from paceline.config._section_base import Count, NonNegative, PositiveSeconds, Section, Text
from paceline.config._storage_section import AnyStorage

if TYPE_CHECKING:
    from paceline.search import SearchConfig

_ENTRYPOINT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ]
}


class ExperimentConfig(Section):
    """Everything that an experiment is made of besides its code."""

    name: Text = Field(
        default="experiment",
        description="Name of the experiment; the default is the entrypoint's script.",
    )
    description: str = Field(default="", description="Free text.")
    labels: list[Text] = Field(default=[], description="Labels to find the experiment by.")
    data: JsonMap = Field(
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
    max_restarts: NonNegative = Field(
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
    preemption_timeout: PositiveSeconds = Field(
        default=600.0, description="Seconds that a preempted trial may take to save and end."
    )
    debug: bool = Field(default=False, description="Log in detail.")
    min_validation_period: Period | None = Field(
        default=None, description="When a trainer validates; an integer counts batches, 0 is never."
    )
    min_checkpoint_period: CheckpointPeriod | None = Field(
        default=None,
        description="When a trainer stores a checkpoint; an integer counts batches, 0 is never, "
        "`continuous` begins the next one when the last one is stored.",
    )
    checkpoint_bytes_per_hour: NumBytes | None = Field(
        default=None,
        description="How many bytes of continuous checkpoints a trial stores in an hour at most; "
        "null is no limit.",
    )
    scheduling_unit: Count | None = Field(
        default=None, description="Batches between a trainer's reports of training metrics."
    )
    perform_initial_validation: bool = Field(
        default=False, description="Whether a trainer validates before the first batch."
    )
    optimizations: Optimizations = Field(
        default=Optimizations(), description="How a trainer aggregates gradients."
    )
    records_per_epoch: NonNegative | None = without_effect("the data set tells its own length")

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
            raise refused_parts(problems)
        return value

    @field_validator("entrypoint")
    @classmethod
    def _check_length(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        searcher = info.data.get("searcher")
        if searcher is None or trial_class(value) is None:
            return value
        if searcher.length_unit not in UNITS:
            raise refused(
                "in the form `module:Class` needs a searcher that tells how long to train",
                hint="give `searcher.max_length`, for example {epochs: 8}.",
            )
        return value

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each setting that is accepted but has no effect."""
        found = []
        if self.records_per_epoch is not None:
            found.append(
                "`records_per_epoch` has no effect: an epoch is as long as the data set is."
            )
        if getattr(self.searcher, "stop_once", None) is not None:
            found.append("`searcher.stop_once` has no effect: a stopped trial never goes on.")
        if self.checkpoint_bytes_per_hour and self.min_checkpoint_period != CONTINUOUS:
            found.append(
                "`checkpoint_bytes_per_hour` has no effect without `min_checkpoint_period:"
                " continuous`."
            )
        found.extend(self.optimizations.warnings)
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return the resolved config as plain data, from which an equal config can be loaded."""
        return self.model_dump(mode="json")

    @property
    def deletes_while_running(self) -> bool:
        """Whether checkpoints that are not kept are deleted before the experiment has ended."""
        storage = self.checkpoint_storage
        has_rule = storage is not None and (storage.save_age or storage.save_bytes)
        return bool(has_rule) or self.min_checkpoint_period == CONTINUOUS

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration.

        Raises:
            paceline.search.SearchMethodError: The code of the search method fails.
        """
        from paceline.search import method_errors

        with method_errors(self.searcher.name, "search_config"):
            return self.searcher.search_config()


on_new_methods(lambda: ExperimentConfig.model_rebuild(force=True))
