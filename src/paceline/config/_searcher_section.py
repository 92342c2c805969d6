"""Section `searcher`: a model for each search method."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from paceline.config._fields_and_problems import (
    Count,
    JsonMap,
    MaxLength,
    NonNegative,
    PositiveSeconds,
    Seconds,
    Section,
    Text,
    given_schema,
    refused,
    split_length,
    without_effect,
)

if TYPE_CHECKING:
    from paceline.search._samplers import SamplerSpec
    from paceline.search._search_method import Limited, SearchConfig


REMOVED_SEARCHERS = {
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "sync_halving": "async_halving",
    "custom": "`random` with `sampler: external`, as in examples/own_search, or a plug-in",
}
"""The predecessor's searchers that are gone, and their replacements."""


BATCHES = "batches"
"""The unit of time where a search has no time metric, or a report lacks it."""


EXTERNAL = "external"
"""The sampler that is a program elsewhere, which answers over the API."""


def _expand_sampler(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class SamplerSection(Section):
    """Where the hyperparameters of new trials come from; a name alone is the short form."""

    name: Text = Field(
        default="random",
        description="`random`, `grid`, `sobol`, `optuna`, `external` for programs that answer over "
        "the API, or a sampler of an installed package, by the name of its entry point.",
    )
    of: Literal["tpe", "gp", "cmaes", "nsgaii"] | None = Field(
        default=None, description="Sampler of Optuna; `tpe` by default."
    )
    options: JsonMap = Field(default={}, description="Further arguments of the sampler's class.")
    timeout: PositiveSeconds = Field(
        default=60.0,
        description="Seconds that an answer may take; then the trial is drawn at random.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise refused(
                "must be a sampler",
                "`random`, `grid`, `sobol`, `optuna`, `external` or the name of an installed one",
            )
        return value

    @model_validator(mode="after")
    def _check_use(self) -> "SamplerSection":
        is_own = self.name in ("random", "grid", "sobol", EXTERNAL)
        if (self.of is not None and self.name != "optuna") or (is_own and self.options):
            raise refused(
                f"must not have `{'options' if self.options else 'of'}`, as the sampler"
                f" `{self.name}` has no use for it",
                hint="`of` is for the sampler `optuna`.",
            )
        return self


AnySampler = Annotated[
    SamplerSection, BeforeValidator(_expand_sampler, json_schema_input_type=str | SamplerSection)
]


class SearchLimits(Section):
    """What a search may use; it ends at the first limit that it reaches."""

    max_trials: Count | None = Field(
        default=None, description="Trials that the search creates, whatever its method plans."
    )
    max_slot_hours: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Hours for which trials hold slots, in sum; then running ones are stopped.",
    )
    max_wall_time: PositiveSeconds | None = Field(
        default=None,
        description="Seconds in which the experiment is active, without its pauses; then running "
        "trials are stopped.",
    )
    target: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Value of the metric at which the search ends; running trials are stopped.",
    )
    max_failures: Count | None = Field(
        default=None,
        description="Failed trials at which the search ends in an error; running trials are "
        "stopped.",
    )

    def as_input(self) -> "Limited":
        """Return the limits as an input of the search."""
        from paceline.search._search_method import Limited

        return Limited(**self.model_dump())


class ObjectiveSection(Section):
    """Metric of a search that looks at several."""

    metric: Text = Field(description="Validation metric.")
    smaller_is_better: bool = Field(
        default=True, description="Whether smaller values of the metric are better."
    )


def _searcher_schema(schema: dict[str, Any], section: type["Searcher"]) -> None:
    # The first objective names the metric as well.
    if section.takes_objectives:
        schema["required"].remove("metric")
        schema["anyOf"] = [given_schema("metric"), given_schema("objectives")]


class Searcher(Section):
    """Base of the searcher sections: the fields and properties common to all search methods.

    A subclass is the section of one method: its `name` is a literal with a default, its fields are
    the options of the method. `searcher_sections` finds the sections of other packages.

    Attributes:
        wants_reports: Whether the method judges trials by their reports, so that these must have
            the metric, and the time metric if the section has one.
        has_rungs: Whether the search has brackets and rungs to show.
        can_reopen: Whether a search that has ended may continue with the trials that did not
            complete.
        needs_counts: Whether ranges of hyperparameters must say how many values to try.
        clones_trials: Whether trials start from the checkpoints of others, which needs a master.
        takes_objectives: Whether the method can judge by several objectives at once, in
            `reported_several`.
    """

    model_config = {"json_schema_extra": _searcher_schema}
    wants_reports: ClassVar[bool] = False
    has_rungs: ClassVar[bool] = False
    can_reopen: ClassVar[bool] = False
    needs_counts: ClassVar[bool] = False
    clones_trials: ClassVar[bool] = False
    takes_objectives: ClassVar[bool] = False

    name: str = Field(description="Search method.")
    metric: Text = Field(description="Validation metric that is searched for.")
    smaller_is_better: bool = Field(
        default=True, description="Whether smaller values of the metric are better."
    )
    objectives: list[ObjectiveSection] = Field(
        default=[],
        max_length=8,
        description="Several metrics in the place of `metric`: trials are compared by all of them, "
        "and the best ones are a Pareto front. The first one is shown where there is room for one.",
    )
    source_trial_id: Count | None = Field(
        default=None, description="Trial whose latest checkpoint every trial starts from."
    )
    source_checkpoint_uuid: Text | None = Field(
        default=None, description="Checkpoint that every trial starts from."
    )
    stop_timeout: Seconds = Field(
        default=30.0,
        description="Seconds that a trial stopped by the search may take to end by itself.",
    )

    sampler: AnySampler | None = Field(
        default=None,
        description="Where the hyperparameters of new trials come from; at random by default.",
    )
    points_to_evaluate: list[JsonMap] = Field(
        default=[],
        max_length=1000,
        description="Hyperparameters of the first trials; those left out come from a draw.",
    )
    warm_start_from: list[Count | Text] = Field(
        default=[],
        max_length=100,
        description="Experiments whose ended trials the sampler learns from, by their ids; without "
        "a master CSV files.",
    )
    limits: SearchLimits | None = Field(
        default=None, description="What the search may use; they can be changed while it runs."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_first_objective(cls, data: Any) -> Any:
        given = data.get("objectives") if isinstance(data, dict) else None
        first = given[0] if isinstance(given, list) and given else None
        if not isinstance(first, dict) or not isinstance(first.get("metric"), str):
            return data
        is_smaller = first.get("smaller_is_better", True)
        named = {"metric": first["metric"], "smaller_is_better": is_smaller}
        return {**named, **data}

    @field_validator("objectives")
    @classmethod
    def _check_objectives(cls, value: list[ObjectiveSection], info: ValidationInfo) -> Any:
        names = [each.metric for each in value]
        if not value:
            return value
        if not cls.takes_objectives:
            raise refused("must not be given, as this method compares trials by one metric alone")
        if len(set(names)) < max(len(names), 2):
            raise refused(
                "must be two or more different metrics",
                hint="`searcher.metric` is for a single one.",
            )
        first = (info.data.get("metric"), info.data.get("smaller_is_better"))
        if first != (value[0].metric, value[0].smaller_is_better):
            raise refused(
                "must begin with `searcher.metric` and its `smaller_is_better`",
                hint="leave `metric` out: the first objective names it.",
            )
        return value

    @field_validator("warm_start_from", "limits")
    @classmethod
    def _check_single(cls, value: Any, info: ValidationInfo) -> Any:
        is_of_one = info.field_name == "warm_start_from" or (value and value.target is not None)
        if value and is_of_one and info.data.get("objectives"):
            what = "a `target`" if info.field_name == "limits" else "given"
            raise refused(
                f"must not {'have' if info.field_name == 'limits' else 'be'} {what} with several"
                " objectives",
                hint="it is for one metric: leave out one of the two.",
            )
        return value

    @field_validator("sampler")
    @classmethod
    def _check_sampler_of_several(cls, value: Any, info: ValidationInfo) -> Any:
        if value and value.of == "cmaes" and info.data.get("objectives"):
            raise refused(
                "must not be CMA-ES with several objectives",
                "`of: tpe`, `of: nsgaii` or `of: gp`",
            )
        return value

    @field_validator("warm_start_from")
    @classmethod
    def _check_learns(cls, value: Any, info: ValidationInfo) -> Any:
        sampler = info.data.get("sampler")
        if value and (sampler is None or sampler.name in ("random", "grid", "sobol")):
            raise refused(
                "must not be given without a sampler that learns",
                hint="add for example `sampler: {name: optuna, of: tpe}`.",
            )
        return value

    @field_validator("sampler", "points_to_evaluate")
    @classmethod
    def _check_draws(cls, value: Any) -> Any:
        if value and cls.needs_counts:
            raise refused(
                "must not be given, as a grid search draws nothing",
                hint="`{name: random, sampler: grid}` tries the points of a grid first.",
            )
        return value

    def sampler_spec(self) -> "SamplerSpec":
        """Return the sampler in the plain words of the search."""
        from paceline.search._samplers import SamplerSpec

        if self.sampler is None:
            return SamplerSpec()
        options: dict[str, Any] = self.sampler.options
        if self.sampler.name == "optuna":
            options = {"of": self.sampler.of or "tpe", **options}
            if self.objectives:
                options["num_objectives"] = len(self.objectives)
        return SamplerSpec(
            name=self.sampler.name,
            options=options,
            timeout_s=self.sampler.timeout,
        )

    @property
    def is_asking(self) -> bool:
        """Return whether hyperparameters are proposed, by a sampler or as points."""
        return self.sampler_name != "random" or bool(self.points_to_evaluate)

    @property
    def sampler_name(self) -> str:
        """Return the name of the sampler."""
        return "random" if self.sampler is None else self.sampler.name

    @field_validator("source_checkpoint_uuid")
    @classmethod
    def _check_one_source(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("source_trial_id") is not None:
            raise refused("must not be given together with `searcher.source_trial_id`")
        return value

    @property
    def length(self) -> int | None:
        """Return the maximum training length of a trial, None if not configured."""
        return None

    @property
    def length_unit(self) -> str | None:
        """Return the unit of `length`: a unit name, or the name of the time metric."""
        return None

    @property
    def waits_at_targets(self) -> bool:
        """Return whether a trial that has reached the length of its `Train` pauses for a longer."""
        return False

    @property
    def judged_metrics(self) -> list[str] | None:
        """Return the validation metrics needed by the search to judge a report, None if none.

        Samplers learn from the metric also where the method compares no trials.
        """
        if not (self.wants_reports or self.is_asking or self.objectives):
            return None
        return [*self.metrics, *([self.time_name] if self.time_name != BATCHES else [])]

    @property
    def metrics(self) -> list[str]:
        """Return the metrics of all objectives, `metric` first."""
        return [each.metric for each in self.objectives] or [self.metric]

    def signed(self, losses: Sequence[float]) -> list[float]:
        """Return the values of objectives for losses, which are smaller for better trials."""
        several = zip(losses, self.objectives, strict=True)
        return [loss if one.smaller_is_better else -loss for loss, one in several]

    @property
    def takes_reports(self) -> bool:
        """Whether the search is told the metric: to judge by it, or to end at a target."""
        has_target = self.limits is not None and self.limits.target is not None
        return has_target or self.judged_metrics is not None

    @property
    def time_name(self) -> str:
        """Return the metric measuring a trial's training time; batches by default."""
        return str(getattr(self, "time_metric", None) or BATCHES)

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        raise NotImplementedError(f"{type(self).__name__} must have a method `search_config`.")

    def _of(self, *names: str) -> dict[str, Any]:
        """Return fields that the method's configuration has under the same names."""
        from paceline.search._search_method import Objective

        several = [Objective(one.metric, one.smaller_is_better) for one in self.objectives]
        common = {"metric": self.metric, "smaller_is_better": self.smaller_is_better}
        return {**common, "objectives": tuple(several), **{n: getattr(self, n) for n in names}}


class MissingSearcher(Searcher):
    """Section of a search method not installed here, or with other fields by now.

    It keeps the known facts of the search, but makes no method. Whether the method wants reports is
    not known, so they are kept for it.
    """

    model_config = {"extra": "allow"}
    wants_reports = True
    takes_objectives = True

    def search_config(self) -> "SearchConfig":
        """Refuse.

        Raises:
            LookupError: Always.
        """
        raise LookupError("it is not installed, or does not take the search's configuration")


class _WholeTrials(Searcher):
    can_reopen = True

    max_length: MaxLength | None = Field(
        default=None,
        description="Length of the operation that a trial gets; an integer counts batches.",
    )

    @property
    def length(self) -> int | None:
        """Return the maximum training length of a trial, None if not configured."""
        parts = split_length(self.max_length)
        return parts[1] if parts else None

    @property
    def length_unit(self) -> str | None:
        """Return the unit of `length`."""
        parts = split_length(self.max_length)
        return parts[0] if parts else None


class SingleSearcher(_WholeTrials):
    """Single trial; ranges among the hyperparameters are sampled once."""

    name: Literal["single"] = Field(default="single", description="Search method.")

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._search_method import SingleConfig

        return SingleConfig(**self._of(), max_length=self.length)


class RandomSearcher(_WholeTrials):
    """Trials with hyperparameters drawn at random."""

    takes_objectives = True

    name: Literal["random"] = Field(default="random", description="Search method.")
    max_trials: Count = Field(description="Trials that the search creates.")
    max_concurrent_trials: NonNegative = Field(
        default=16, description="Trials that run at once; 0 is no limit."
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._search_method import RandomConfig

        common = self._of("max_trials", "max_concurrent_trials")
        return RandomConfig(**common, max_length=self.length)


class GridSearcher(_WholeTrials):
    """Grid search: a trial for each point spanned by the hyperparameters."""

    needs_counts = True
    takes_objectives = True

    name: Literal["grid"] = Field(default="grid", description="Search method.")
    max_concurrent_trials: NonNegative = Field(
        default=16, description="Trials that run at once; 0 is no limit."
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._search_method import GridConfig

        return GridConfig(**self._of("max_concurrent_trials"), max_length=self.length)


def _halving_schema(schema: dict[str, Any], section: type["Searcher"]) -> None:
    _searcher_schema(schema, section)
    # Required fields unless the length replaces them: a default of null would make them optional.
    for name in ("time_metric", "max_time"):
        schema["properties"][name].pop("default", None)
    schema["oneOf"] = [given_schema("time_metric", "max_time"), given_schema("max_length")]


class _Timed(Searcher):
    model_config = {"json_schema_extra": _halving_schema}
    wants_reports = True
    takes_objectives = True

    max_trials: Count = Field(description="Trials that the search creates.")
    max_length: MaxLength | None = Field(
        default=None,
        exclude=True,
        description="Shorter form of the next two: `{epochs: 8}` is time metric `epochs` and "
        "maximum 8; an integer counts batches.",
    )
    time_metric: Text = Field(
        default=None,
        validate_default=True,
        description="Key of every validation report that tells how long the trial has trained.",
    )
    max_time: Count = Field(
        default=None,
        validate_default=True,
        description="Time, in units of the time metric, that the best trials train to.",
    )
    max_concurrent_trials: NonNegative = Field(
        default=16, description="Trials that run at once; 0 derives it from the rungs."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_length(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("time_metric") is not None or data.get("max_time") is not None:
            return data
        parts = split_length(data.get("max_length"))
        if parts is None:
            return data
        rest = {key: value for key, value in data.items() if key != "max_length"}
        return {**rest, "time_metric": parts[0], "max_time": parts[1]}

    @field_validator("max_length")
    @classmethod
    def _check_one_form(cls, value: Any) -> Any:
        # A length that stands alone has been expanded before, so this one has company.
        if value is not None:
            raise refused(
                "must not be given together with `searcher.time_metric` or `searcher.max_time`",
                hint="keep one of the two forms.",
            )
        return value

    @field_validator("time_metric", "max_time", mode="before")
    @classmethod
    def _require_time(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            return value
        is_name = info.field_name == "time_metric"
        if "max_length" not in info.data:
            # The error about the length says enough; this value goes nowhere.
            return "batches" if is_name else 1
        raise refused(
            f"is required together with `searcher.{'max_time' if is_name else 'time_metric'}`",
            "the name of a number in every validation report" if is_name else "an integer >= 1",
            hint="or give `searcher.max_length` instead of both, for example {epochs: 8}.",
            is_missing=True,
        )

    @property
    def length(self) -> int:
        """Return the training time of the best trials."""
        return self.max_time

    @property
    def length_unit(self) -> str:
        """Return the name of the time metric."""
        return self.time_metric

    def _timed(self, *names: str) -> dict[str, Any]:
        return self._of("max_trials", "max_time", *names)


class _Halving(_Timed):
    has_rungs = True

    divisor: float = Field(
        default=4.0, gt=1, allow_inf_nan=False, description="One of so many trials passes a rung."
    )
    stop_once: bool | None = without_effect("a stopped trial never continues")

    def _common(self) -> dict[str, Any]:
        """Return the fields of all these methods' configurations."""
        # Rungs of an integral divisor are exact only if it comes as an integer.
        divisor = int(self.divisor) if self.divisor.is_integer() else self.divisor
        common = self._timed("max_concurrent_trials", "time_metric")
        return {"divisor": divisor, "promotes": self.waits_at_targets, **common}


class _AsyncHalving(_Halving):
    promotion: bool = Field(
        default=False,
        description="Trials pause at rungs, and resume once they are among the best, instead of "
        "being stopped.",
    )

    @property
    def waits_at_targets(self) -> bool:
        """Return whether trials pause."""
        return self.promotion


class AsyncHalvingSearcher(_AsyncHalving):
    """Trials stopped early at the rungs of a single bracket."""

    name: Literal["async_halving"] = Field(default="async_halving", description="Search method.")
    num_rungs: Count = Field(description="Rungs, each `divisor` times as long as the one before.")

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._adaptive_asha import AsyncHalvingConfig

        return AsyncHalvingConfig(**self._common(), num_rungs=self.num_rungs)


class AdaptiveAshaSearcher(_AsyncHalving):
    """Trials stopped early in several brackets, some stopping later than others."""

    name: Literal["adaptive_asha"] = Field(default="adaptive_asha", description="Search method.")
    mode: Literal["standard", "conservative", "aggressive"] = Field(
        default="standard", description="How early trials are stopped."
    )
    max_rungs: Count = Field(default=5, description="Most rungs of a bracket.")
    bracket_rungs: list[Count] = Field(
        default=[],
        description="Rungs of each bracket; when given, `mode` and `max_rungs` have no effect.",
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._adaptive_asha import AdaptiveAshaConfig, Mode

        return AdaptiveAshaConfig(
            **self._common(),
            mode=Mode(self.mode),
            max_rungs=self.max_rungs,
            bracket_rungs=tuple(self.bracket_rungs),
        )


class HyperbandSearcher(_Halving):
    """Trials that wait for one another at the rungs of brackets of every depth."""

    name: Literal["hyperband"] = Field(default="hyperband", description="Search method.")
    max_rungs: Count = Field(default=5, description="Most rungs of a bracket.")

    @property
    def waits_at_targets(self) -> bool:
        """Return True."""
        return True

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._adaptive_asha import HyperbandConfig

        return HyperbandConfig(**self._common(), max_rungs=self.max_rungs)


class MedianStoppingSearcher(_Timed):
    """Trials stopped when they are worse than the median of the others at the same time."""

    name: Literal["median_stopping"] = Field(
        default="median_stopping", description="Search method."
    )
    min_time: Count = Field(default=1, description="Time before which no trial is stopped.")
    min_others: Count = Field(
        default=3, description="Other trials that must have reported before one is stopped."
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._median_stopping import MedianStoppingConfig

        return MedianStoppingConfig(
            **self._timed("max_concurrent_trials", "min_time", "min_others")
        )


class PbtSearcher(_Timed):
    """Population based training: weak trials give way to changed copies of strong ones."""

    clones_trials = True

    name: Literal["pbt"] = Field(default="pbt", description="Search method.")
    interval: Count = Field(description="Time between two comparisons of a trial.")
    quantile: float = Field(
        default=0.25, gt=0, le=0.5, description="Share of the trials that is weak, or strong."
    )
    resample: float = Field(
        default=0.25, ge=0, le=1, description="Probability that a copy's value is drawn anew."
    )
    spread: float = Field(
        default=0.2, ge=0, le=1, description="How far any other is moved, as a share of its range."
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._population import PbtConfig

        return PbtConfig(**self._timed("interval", "quantile", "resample", "spread"))
