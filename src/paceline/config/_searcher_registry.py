"""Searcher sections of all methods, and the registry with those of packages with entry points."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from paceline.config import _fields_and_problems as fields
from paceline.config._searcher_section import AnySampler, Searcher, sampler_field, searcher_schema

if TYPE_CHECKING:
    from paceline.search._search_method import SearchConfig

logger = logging.getLogger(__name__)


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

    max_length: fields.MaxLength | None = Field(
        default=None,
        description="Length of the operation that a trial gets; an integer counts batches.",
    )

    @property
    def length(self) -> int | None:
        """Return the maximum training length of a trial, None if not configured."""
        parts = fields.split_length(self.max_length)
        return parts[1] if parts else None

    @property
    def length_unit(self) -> str | None:
        """Return the unit of `length`."""
        parts = fields.split_length(self.max_length)
        return parts[0] if parts else None


class SingleSearcher(_WholeTrials):
    """Single trial; ranges among the hyperparameters are sampled once."""

    name: Literal["single"] = Field(default="single", description="Search method.")

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._grid_random_single import SingleConfig

        return SingleConfig(**self._of(), max_length=self.length)


class RandomSearcher(_WholeTrials):
    """Trials with hyperparameters drawn at random."""

    takes_objectives = True

    name: Literal["random"] = Field(default="random", description="Search method.")
    max_trials: fields.Count = Field(description="Trials that the search creates.")
    max_concurrent_trials: fields.NonNegative = Field(
        default=16, description="Trials that run at once; 0 is no limit."
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._grid_random_single import RandomConfig

        common = self._of("max_trials", "max_concurrent_trials")
        return RandomConfig(**common, max_length=self.length)


class GridSearcher(_WholeTrials):
    """Grid search: a trial for each point spanned by the hyperparameters."""

    needs_counts = True
    takes_objectives = True

    name: Literal["grid"] = Field(default="grid", description="Search method.")
    max_concurrent_trials: fields.NonNegative = Field(
        default=16, description="Trials that run at once; 0 is no limit."
    )

    def search_config(self) -> "SearchConfig":
        """Return the search method's own configuration."""
        from paceline.search._grid_random_single import GridConfig

        return GridConfig(**self._of("max_concurrent_trials"), max_length=self.length)


def _halving_schema(schema: dict[str, Any], section: type["Searcher"]) -> None:
    searcher_schema(schema, section)
    # Required fields unless the length replaces them: a default of null would make them optional.
    for name in ("time_metric", "max_time"):
        schema["properties"][name].pop("default", None)
    schema["oneOf"] = [
        fields.given_schema("time_metric", "max_time"),
        fields.given_schema("max_length"),
    ]


class _Timed(Searcher):
    model_config = {"json_schema_extra": _halving_schema}
    wants_reports = True
    takes_objectives = True

    max_trials: fields.Count = Field(description="Trials that the search creates.")
    max_length: fields.MaxLength | None = Field(
        default=None,
        exclude=True,
        description="Shorter form of the next two: `{epochs: 8}` is time metric `epochs` and "
        "maximum 8; an integer counts batches.",
    )
    time_metric: fields.Text = Field(
        default=None,
        validate_default=True,
        description="Key of every validation report that tells how long the trial has trained.",
    )
    max_time: fields.Count = Field(
        default=None,
        validate_default=True,
        description="Time, in units of the time metric, that the best trials train to.",
    )
    max_concurrent_trials: fields.NonNegative = Field(
        default=16, description="Trials that run at once; 0 derives it from the rungs."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_length(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("time_metric") is not None or data.get("max_time") is not None:
            return data
        parts = fields.split_length(data.get("max_length"))
        if parts is None:
            return data
        rest = {key: value for key, value in data.items() if key != "max_length"}
        return {**rest, "time_metric": parts[0], "max_time": parts[1]}

    @field_validator("max_length")
    @classmethod
    def _check_one_form(cls, value: Any) -> Any:
        # A length that stands alone has been expanded before, so this one has company.
        if value is not None:
            raise fields.refused(
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
        raise fields.refused(
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

    sampler: AnySampler | None = sampler_field("tpe")
    divisor: float = Field(
        default=4.0, gt=1, allow_inf_nan=False, description="One of so many trials passes a rung."
    )
    stop_once: bool | None = fields.without_effect("a stopped trial never continues")

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
    num_rungs: fields.Count = Field(
        description="Rungs, each `divisor` times as long as the one before."
    )

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
    max_rungs: fields.Count = Field(default=5, description="Most rungs of a bracket.")
    bracket_rungs: list[fields.Count] = Field(
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
    max_rungs: fields.Count = Field(default=5, description="Most rungs of a bracket.")

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
    sampler: AnySampler | None = sampler_field("tpe")
    min_time: fields.Count = Field(default=1, description="Time before which no trial is stopped.")
    min_others: fields.Count = Field(
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
    interval: fields.Count = Field(description="Time between two comparisons of a trial.")
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


ENTRY_POINTS = "paceline.search_methods"
"""The group of entry points: each names a method and refers to a `Searcher`."""
_OWN = (
    SingleSearcher,
    RandomSearcher,
    GridSearcher,
    AsyncHalvingSearcher,
    AdaptiveAshaSearcher,
    HyperbandSearcher,
    MedianStoppingSearcher,
    PbtSearcher,
)


class _Registry:
    """The sections of all methods, by name; methods of other packages from the first query on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[str, type[Searcher]] = {
            str(one.model_fields["name"].default): one for one in _OWN
        }
        self._has_all = False
        self.on_new: list[Callable[[], object]] = []

    @property
    def sections(self) -> Mapping[str, type[Searcher]]:
        return self._sections

    def load(self) -> bool:
        # Several threads may meet an unknown method at once.
        with self._lock:
            if self._has_all:
                return False
            self._has_all = True
            found = {}
            for point in entry_points(group=ENTRY_POINTS):
                if point.name in self._sections or point.name in found:
                    logger.warning(
                        "The search method %r of %s is ignored, as there is one of that name.",
                        point.name,
                        point.value,
                    )
                elif (section := _loaded_method(point)) is not None:
                    found[point.name] = section
            if found:
                self._sections = self._sections | found
                for tell in self.on_new:
                    tell()
            return bool(found)


_registry = _Registry()


def searcher_sections() -> Mapping[str, type[Searcher]]:
    """Return the known search methods' sections by method name."""
    return _registry.sections


def load_search_methods() -> bool:
    """Look once for the search methods of installed packages; tell whether there are new ones."""
    return _registry.load()


def on_new_methods(tell: Callable[[], object]) -> None:
    """Have a function called once methods of other packages are known."""
    _registry.on_new.append(tell)


def searcher_section(name: str) -> type[Searcher]:
    """Return the section of a search method.

    It is `MissingSearcher` for a method that is not installed here any more.
    """
    if name not in _registry.sections:
        load_search_methods()
    return _registry.sections.get(name, MissingSearcher)


def _loaded_method(point: EntryPoint) -> type[Searcher] | None:
    """Return a method's section; None with a warning if unusable."""
    try:
        section = point.load()
        if not (isinstance(section, type) and issubclass(section, Searcher)):
            raise TypeError(f"it must be a subclass of `Searcher`, but is {section!r}")
        name = section.model_fields["name"].default
        if name != point.name:
            raise ValueError(
                f"the default of its field `name` must be {point.name!r}, but is {name!r}"
            )
        if get_args(section.model_fields["name"].annotation) != (name,):
            raise TypeError(f"its field `name` must have the type `Literal[{name!r}]`")
        # Union of the section alone: its other faults show here, not in the config of all sections.
        either: Any = section | SingleSearcher
        TypeAdapter(Annotated[either, Field(discriminator="name")])
    except Exception as error:
        # A package that is broken must not keep others from being used.
        logger.warning(
            "The search method %r (%s) cannot be loaded: %s: %s",
            point.name,
            point.value,
            type(error).__name__,
            error,
        )
        return None
    return section


class _OneOfThem:
    """Makes a field take the section of any known method, chosen by its name."""

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        union: Any = reduce(or_, _registry.sections.values())
        return handler.generate_schema(Annotated[union, Field(discriminator="name")])


AnySearcher = Annotated[Searcher, _OneOfThem()]
