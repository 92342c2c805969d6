"""Section `searcher`: the base of the sections of all methods; checks of the space searched."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from paceline.config import _fields_and_problems as fields

if TYPE_CHECKING:
    from paceline.search._samplers import SamplerSpec
    from paceline.search._search_messages import Limited
    from paceline.search._search_method import SearchConfig


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


class SamplerSection(fields.Section):
    """Where the hyperparameters of new trials come from; a name alone is the short form."""

    name: fields.Text = Field(
        default="random",
        description="`random`, `grid`, `sobol`, `tpe`, `optuna`, `external` for programs "
        "that answer over the API, or the name of an entry point of an installed package.",
    )
    of: Literal["tpe", "gp", "cmaes", "nsgaii"] | None = Field(
        default=None, description="Sampler of Optuna; `tpe` by default."
    )
    options: fields.JsonMap = Field(
        default={}, description="Further arguments of the sampler's class."
    )
    timeout: fields.PositiveSeconds = Field(
        default=60.0,
        description="Seconds that an answer may take; then the trial is drawn at random.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise fields.refused(
                "must be a sampler",
                "`random`, `grid`, `sobol`, `tpe`, `optuna`, `external` or an installed one",
            )
        return value

    @model_validator(mode="after")
    def _check_use(self) -> "SamplerSection":
        if self.of is None and not self.options:
            return self
        from paceline.search._samplers import OWN_SAMPLERS

        is_own = self.name in (*OWN_SAMPLERS, EXTERNAL)
        if (self.of is not None and self.name != "optuna") or (is_own and self.options):
            raise fields.refused(
                f"must not have `{'options' if self.options else 'of'}`, as the sampler"
                f" `{self.name}` has no use for it",
                hint="`of` is for the sampler `optuna`.",
            )
        return self


AnySampler = Annotated[
    SamplerSection, BeforeValidator(_expand_sampler, json_schema_input_type=str | SamplerSection)
]


def sampler_field(name: str | None) -> Any:
    """Return the field `sampler` of a method whose default sampler has this name."""
    return Field(
        default=None if name is None else SamplerSection(name=name),
        description="Where the hyperparameters of new trials come from; null is at random.",
    )


class SearchLimits(fields.Section):
    """What a search may use; it ends at the first limit that it reaches."""

    max_trials: fields.Count | None = Field(
        default=None, description="Trials that the search creates, whatever its method plans."
    )
    max_slot_hours: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Hours for which trials hold slots, in sum; then running ones are stopped.",
    )
    max_wall_time: fields.PositiveSeconds | None = Field(
        default=None,
        description="Seconds in which the experiment is active, without its pauses; then running "
        "trials are stopped.",
    )
    target: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Value of the metric at which the search ends; running trials are stopped.",
    )
    max_failures: fields.Count | None = Field(
        default=None,
        description="Failed trials at which the search ends in an error; running trials are "
        "stopped.",
    )

    def as_input(self) -> "Limited":
        """Return the limits as an input of the search."""
        from paceline.search._search_messages import Limited

        return Limited(**self.model_dump())


class ObjectiveSection(fields.Section):
    """Metric of a search that looks at several."""

    metric: fields.Text = Field(description="Validation metric.")
    smaller_is_better: bool = Field(
        default=True, description="Whether smaller values of the metric are better."
    )


def searcher_schema(schema: dict[str, Any], section: type["Searcher"]) -> None:
    # The first objective names the metric as well.
    """Adjust the JSON schema of a searcher section."""
    if section.takes_objectives:
        schema["required"].remove("metric")
        schema["anyOf"] = [fields.given_schema("metric"), fields.given_schema("objectives")]


class Searcher(fields.Section):
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

    model_config = {"json_schema_extra": searcher_schema}
    wants_reports: ClassVar[bool] = False
    has_rungs: ClassVar[bool] = False
    can_reopen: ClassVar[bool] = False
    needs_counts: ClassVar[bool] = False
    clones_trials: ClassVar[bool] = False
    takes_objectives: ClassVar[bool] = False

    name: str = Field(description="Search method.")
    metric: fields.Text = Field(description="Validation metric that is searched for.")
    smaller_is_better: bool = Field(
        default=True, description="Whether smaller values of the metric are better."
    )
    objectives: list[ObjectiveSection] = Field(
        default=[],
        max_length=8,
        description="Several metrics in the place of `metric`: trials are compared by all of them, "
        "and the best ones are a Pareto front. The first one is shown where there is room for one.",
    )
    source_trial_id: fields.Count | None = Field(
        default=None, description="Trial whose latest checkpoint every trial starts from."
    )
    source_checkpoint_uuid: fields.Text | None = Field(
        default=None, description="Checkpoint that every trial starts from."
    )
    stop_timeout: fields.Seconds = Field(
        default=30.0,
        description="Seconds that a trial stopped by the search may take to end by itself.",
    )

    sampler: AnySampler | None = sampler_field(None)
    points_to_evaluate: list[fields.JsonMap] = Field(
        default=[],
        max_length=1000,
        description="Hyperparameters of the first trials; those left out come from a draw.",
    )
    warm_start_from: list[fields.Count | fields.Text] = Field(
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
            raise fields.refused(
                "must not be given, as this method compares trials by one metric alone"
            )
        if len(set(names)) < max(len(names), 2):
            raise fields.refused(
                "must be two or more different metrics",
                hint="`searcher.metric` is for a single one.",
            )
        first = (info.data.get("metric"), info.data.get("smaller_is_better"))
        if first != (value[0].metric, value[0].smaller_is_better):
            raise fields.refused(
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
            raise fields.refused(
                f"must not {'have' if info.field_name == 'limits' else 'be'} {what} with several"
                " objectives",
                hint="it is for one metric: leave out one of the two.",
            )
        return value

    @field_validator("sampler")
    @classmethod
    def _check_sampler_of_several(cls, value: Any, info: ValidationInfo) -> Any:
        if value and value.of == "cmaes" and info.data.get("objectives"):
            raise fields.refused(
                "must not be CMA-ES with several objectives",
                "`of: tpe`, `of: nsgaii` or `of: gp`",
            )
        return value

    @field_validator("warm_start_from")
    @classmethod
    def _check_learns(cls, value: Any, info: ValidationInfo) -> Any:
        sampler = info.data.get("sampler")
        if value and (sampler is None or sampler.name in ("random", "grid", "sobol")):
            raise fields.refused(
                "must not be given without a sampler that learns",
                hint="add for example `sampler: tpe`.",
            )
        return value

    @field_validator("sampler", "points_to_evaluate")
    @classmethod
    def _check_draws(cls, value: Any) -> Any:
        if value and cls.needs_counts:
            raise fields.refused(
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
            raise fields.refused("must not be given together with `searcher.source_trial_id`")
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


_MAX_GRID_POINTS = 100_000
_SENTENCE = re.compile(
    r"^`(?P<path>[^`]+)` (?P<message>.*?)(?:, but (?:it is missing|got .*))?\.$", re.DOTALL
)


def check_hyperparameter_space(value: Any, info: ValidationInfo) -> Any:
    """Refuse a space unfit for a search; a field validator to run after the searcher's."""
    if not isinstance(value, dict):
        return value
    space, problems = fields.copy_json_map(value)
    reported = {problem.path for problem in problems}
    for names, node in _hyperparameter_leaves(space, ()):
        problem = _leaf_problem(names, node)
        if problem is not None and problem.path not in reported:
            problems.append(problem)
    searcher = info.data.get("searcher")
    if not problems and searcher is not None:
        if searcher.needs_counts or searcher.sampler_name == "grid":
            problems = _grid_problems(space)
        problems = problems or _point_problems(space, searcher.points_to_evaluate)
    if problems:
        raise fields.refused_parts(problems)
    return space


def _hyperparameter_leaves(
    node: dict[str, Any], names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, child in node.items():
        if isinstance(child, dict) and "type" not in child:
            yield from _hyperparameter_leaves(child, (*names, name))
        else:
            yield (*names, name), child


def _leaf_problem(names: tuple[str, ...], node: Any) -> fields.Problem | None:
    from paceline.search._hyperparameter_kinds import SpaceError
    from paceline.search._hyperparameter_space import parse_space

    # The search stops at the first error, so each leaf goes there alone, inside its own groups.
    alone: Any = node
    for name in reversed(names):
        alone = {name: alone}
    try:
        parse_space(alone)
    except SpaceError as e:
        return _hyperparameter_problem_of(e.path, str(e), alone)
    return None


def _hyperparameter_problem_of(path: str, text: str, space: dict[str, Any]) -> fields.Problem:
    sentence, _, hint = text.partition("\nHint: ")
    match = _SENTENCE.match(sentence)
    if match is None:
        message = f"is not valid: {sentence}"
    elif path.startswith(f"{match['path']}."):
        message = f"is not allowed, as `{match['path']}` {match['message']}"
    else:
        path, message = match["path"], match["message"]
    return fields.Problem(
        path=path, value=_hyperparameter_at(space, path), message=message, hint=hint
    )


def _hyperparameter_at(space: Any, path: str) -> Any:
    value = space
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict):
            value = value.get(part, fields.MISSING)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return fields.MISSING
    return value


def _point_problems(space: dict[str, Any], points: list[dict[str, Any]]) -> list[fields.Problem]:
    from paceline._base.arguments_and_errors import Rng
    from paceline.search._hyperparameter_kinds import SpaceError
    from paceline.search._hyperparameter_space import parse_space
    from paceline.search._samplers import merged

    parsed, problems = parse_space(space), []
    for index, point in enumerate(points):
        try:
            parsed.check(merged(parsed.sample(Rng(0)), point))
        except (SpaceError, TypeError) as error:
            what = str(error).partition("\n")[0]
            message = f"must not have `searcher.points_to_evaluate[{index}]` outside: {what}"
            problems.append(fields.Problem(path="", value=point, message=message))
    return problems


def _grid_problems(space: dict[str, Any]) -> list[fields.Problem]:
    from paceline.search._hyperparameter_space import parse_space

    problems = [
        fields.Problem(
            path=fields.join_path(*names, "count"),
            value=fields.MISSING,
            message="is required by a grid search",
            allowed="an integer >= 1, the number of values to try",
        )
        for names, node in _hyperparameter_leaves(space, ())
        if isinstance(node, dict)
        and node["type"] in ("int", "double", "log")
        and node.get("count") is None
    ]
    if not problems:
        num_points = parse_space(space).grid_size()
        if num_points > _MAX_GRID_POINTS:
            raise fields.refused(
                f"must not span a grid of more than {_MAX_GRID_POINTS} points, which has "
                f"{num_points if num_points < 10**15 else f'10^{int(math.log10(num_points))}'}",
                hint="lower the counts, or use the searcher `random`.",
            )
    return problems
