"""Base class of the configurations of search methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.search._bracket_views import BracketPlan
from paceline.search._hyperparameter_space import Space
from paceline.search._method_base import SearchMethod, TrialMaker


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig(ABC):
    """The configuration of a search method, as plain data; one subclass for each method.

    Attributes:
        metric: The validation metric that is searched for.
        smaller_is_better: Whether smaller values of it are better.
        kind: The name of the method.
    """

    metric: str
    smaller_is_better: bool = True

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(
                f"`metric` must name a validation metric, but got {self.metric!r}.\n"
                'Hint: write for example `metric: "validation_loss"`.'
            )

    @abstractmethod
    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method, which makes its trials by `maker`."""

    @abstractmethod
    def num_planned(self, space: Space) -> int:
        """Return how many trials the search will have, for its preview."""

    def bracket_plans(self) -> tuple[BracketPlan, ...]:
        """Return the brackets that the search will run; methods without rungs have none."""
        return ()


def check_integer(name: str, value: Any, *, least: int) -> None:
    """Raise a ValueError unless a field is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, but got {value!r}.\n"
            f"Hint: set `searcher.{name}` to {least} or more."
        )


def check_optional_length(value: int | None) -> None:
    """Raise a ValueError unless `max_length` is None or a length."""
    if value is not None:
        check_integer("max_length", value, least=1)
