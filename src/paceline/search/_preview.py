"""Preview of a search."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from paceline.search._bracket_views import BracketPlan
from paceline.search._exact_division import keep_count
from paceline.search._hyperparameter_space import parse_space
from paceline.search._method_config import SearchConfig
from paceline.search._method_errors import method_errors
from paceline.search._search import Search


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRow:
    """Say how many trials train for how long."""

    trials: int
    units: int | None
    """The absolute training time in units of the time metric; None means to completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """Say what a search would train if its trials reported one after another."""

    brackets: tuple[BracketPlan, ...]
    rows: tuple[PreviewRow, ...]
    """Sorted by training time, the shortest first."""


def preview(config: SearchConfig, hyperparameters: dict[str, Any]) -> Preview:
    """Return what a search would train.

    Raises:
        SpaceError: If the hyperparameters are not valid, or lack counts for a grid.
        SearchMethodError: If the search method fails.
    """
    # A method that cannot even be made has no preview.
    Search(config, hyperparameters, seed=0)
    with method_errors(config.kind, "num_planned"):
        trials = config.num_planned(parse_space(hyperparameters))
    with method_errors(config.kind, "bracket_plans"):
        plans = config.bracket_plans()
    if not plans:
        return Preview(brackets=(), rows=(PreviewRow(trials=trials, units=None),))
    counts: Counter[int] = Counter()
    for plan in plans:
        counts.update(_trials_by_units(plan))
    rows = (PreviewRow(trials=counts[units], units=units) for units in sorted(counts))
    return Preview(brackets=plans, rows=tuple(row for row in rows if row.trials))


def _trials_by_units(plan: BracketPlan) -> Counter[int]:
    counts: Counter[int] = Counter()
    arriving = plan.trials
    for units in plan.units[:-1]:
        going_on = keep_count(arriving, plan.divisor)
        counts[units] += arriving - going_on
        arriving = going_on
    counts[plan.units[-1]] += arriving
    return counts
