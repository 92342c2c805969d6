"""Read-only views of a search that is planned or runs, for user interfaces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from paceline.search._inputs_and_operations import ExitReason


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketPlan:
    """Say how one bracket of a halving search will run."""

    units: tuple[int, ...]
    """The absolute training time at each rung."""
    trials: int
    concurrent: int
    divisor: Fraction
    """At each rung one of `divisor` trials goes on."""

    @property
    def rungs(self) -> int:
        """Return the number of rungs."""
        return len(self.units)


class Decision(str, Enum):
    """Say what became of a trial at a rung."""

    CONTINUED = "continued"
    STOPPED = "stopped"
    FINISHED = "finished"
    """It has trained to the top rung."""
    FAILED = "failed"
    """It ended on its way to the rung and ranks last there."""
    WAITING = "waiting"
    """It is training towards the rung."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RungEntry:
    """Show one trial at one rung."""

    request_id: str
    metric: float | None
    """The metric as reported; None if the trial is waiting or failed."""
    decision: Decision


@dataclass(frozen=True, kw_only=True, slots=True)
class RungView:
    """Show one rung: ranked entries first, the best in front, then those that wait."""

    units: int
    """The absolute training time at which the rung decides."""
    entries: tuple[RungEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketView:
    """Show one bracket of a halving search."""

    max_trials: int
    max_concurrent_trials: int
    num_created: int
    num_invalid: int
    rungs: tuple[RungView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialView:
    """Show what a search knows about one trial."""

    request_id: str
    is_stopped: bool
    """The search wants no more of it."""
    exit_reason: ExitReason | None
    """None while the trial has not ended."""
    progress: float
    """From 0 to 1, as the trial tells; 1 once it has ended."""
