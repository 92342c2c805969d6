"""Base class of search methods: configs, plans, rungs as shown, arithmetic of lengths."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from paceline._base.arguments_and_errors import Rng
from paceline._base.exceptions import PicklableError
from paceline.search._hyperparameter_kinds import SpaceError
from paceline.search._hyperparameter_space import Space
from paceline.search._search_messages import Create, ExitReason, Operation


class SearchMethodError(PicklableError, RuntimeError):
    """Raised when a search method's code fails or returns an invalid result."""


@contextmanager
def method_errors(
    name: str, part: str, *, expected: type[Exception] = SpaceError
) -> Iterator[None]:
    """Turn unexpected errors into an error naming the search method and its running part.

    Args:
        name: The name of the method.
        part: The part of the method that is about to run.
        expected: Exceptions that this part may raise by design; they pass unchanged.

    Raises:
        SearchMethodError: If the code inside raises anything else.
    """
    try:
        yield
    except (expected, SearchMethodError):
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SearchMethodError(
            f"The search method `{name}` failed in `{part}`: {what} "
            f"({Path(at.filename).name}, line {at.lineno}).\n"
            "Hint: mend the method; `paceline.testing.check_search_method` tries all its parts."
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketPlan:
    """Plan of a bracket in a halving search."""

    units: tuple[int, ...]
    """The absolute training time at each rung."""
    trials: int
    concurrent: int
    divisor: Fraction
    """At each rung one of `divisor` trials continues."""

    @property
    def rungs(self) -> int:
        """Return the number of rungs."""
        return len(self.units)


class Decision(str, Enum):
    """Decision about a trial at a rung."""

    CONTINUED = "continued"
    STOPPED = "stopped"
    FINISHED = "finished"
    """It has trained to the top rung."""
    PAUSED = "paused"
    """It waits at the rung, and continues once it is among the best."""
    FAILED = "failed"
    """It ended on its way to the rung and ranks last there."""
    WAITING = "waiting"
    """It is training towards the rung."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """State of a rung when a trial arrived and was decided on; later ones change nothing of it."""

    order: int
    """How many trials had arrived, this one included."""
    rank: int
    """The trial's rank among them, from 1."""
    num_kept: int
    """How many of them could continue."""
    cutoff: float | None
    """The metric of the last one that could; None if so many had no finite one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RungEntry:
    """Trial at a rung, for display."""

    request_id: str
    metric: float | None
    """The metric as reported; None if the trial is waiting or failed."""
    decision: Decision
    arrival: Arrival | None = None
    """None if it is waiting or failed, or was decided on by an earlier version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RungView:
    """Rung for display: ranked entries first, the best in front, then the waiting entries."""

    units: int
    """The absolute training time at which the rung decides."""
    entries: tuple[RungEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BracketView:
    """Bracket of a halving search, for display."""

    max_trials: int
    max_concurrent_trials: int
    num_created: int
    num_invalid: int
    rungs: tuple[RungView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialView:
    """State of a trial as known to the search, for display."""

    request_id: str
    is_stopped: bool
    """The search needs no more training of it."""
    exit_reason: ExitReason | None
    """None while the trial has not ended."""
    progress: float
    """From 0 to 1, as the trial reports; 1 once it has ended."""


class TrialMaker:
    """Makes trials from a space and a random stream, with draws in the promised order."""

    __slots__ = ("_rng", "space")

    def __init__(self, space: Space, rng: Rng) -> None:
        self.space = space
        self._rng = rng

    def sampled(self) -> Create:
        """Make a trial with random hyperparameters."""
        return self._make(self.space.sample(self._rng))

    def at_grid_point(self, index: int) -> Create:
        """Make a trial for a point of the grid."""
        return self._make(self.space.grid_point(index))

    def changed(
        self, hparams: dict[str, Any], *, parent: str, resample: float, spread: float
    ) -> Create:
        """Make a trial from the checkpoint of `parent`, near these hyperparameters.

        Args:
            hparams: The hyperparameters of the parent.
            parent: Its request id.
            resample: The probability that a hyperparameter is drawn anew.
            spread: How far any other is moved, up or down, as a share of its range.
        """
        shares = []
        for share in self.space.encode(hparams):
            step = spread if self._rng.integer(0, 1) else -spread
            is_new, drawn = self._rng.real() < resample, self._rng.real()
            shares.append(drawn if is_new else min(max(share + step, 0.0), 1.0))
        return self._make(self.space.decode(shares), parent)

    def one_of(self, values: Sequence[str]) -> str:
        """Return a value, drawn at random."""
        return values[self._rng.integer(0, len(values) - 1)]

    def _make(self, hparams: dict[str, Any], parent: str | None = None) -> Create:
        return Create(
            request_id=self._rng.request_id(),
            trial_seed=self._rng.trial_seed(),
            hparams=hparams,
            parent=parent,
        )


class SearchMethod(ABC):
    """Search method: decides on the creation and the stop of trials.

    Implementations override all abstract methods. They hold plain state, are called from one
    thread, and may rely on `Search` for this: `start` comes once and first; every request id is
    one that the method created; a trial's report comes neither after its stop nor after its exit;
    a trial exits once.
    """

    @abstractmethod
    def start(self) -> list[Operation]:
        """Return the operations to create the first trials."""

    @abstractmethod
    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Process a validation report of a training trial."""

    def reported_several(
        self, request_id: str, time: float, losses: tuple[float, ...]
    ) -> list[Operation]:
        """Process a validation report of a training trial of a search of several objectives.

        `losses` has the value of each, negated where larger ones are better. By default a method
        compares no trials.
        """
        return []

    @abstractmethod
    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Process a trial's exit; `is_stopped` is True if the method stopped the trial before."""

    @abstractmethod
    def num_trials(self, num_invalid: int) -> int:
        """Return the number of trials in the search, including the trials yet to create.

        Trials with invalid hyperparameters do not count: `num_invalid` ended so far, and a method
        that makes no others in their place subtracts them.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""

    @abstractmethod
    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot of a method with the same configuration.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """

    def resize(self, max_trials: int) -> list[Operation]:
        """Have the search create more or fewer trials than configured, `max_trials` in all.

        Return the operations to create those that can run at once. It may be called before `start`,
        for fewer trials, and when all trials have ended. By default nothing changes: a search then
        has at most as many trials as configured.
        """
        return []

    def proposed(self, request_id: str, hparams: dict[str, Any]) -> None:
        """Note that a trial got other hyperparameters than the method drew for it."""
        return

    def trained_share(self, time: float) -> float:
        """Return `time` as part of a trial's full length.

        It is 0 for methods that do not know how long their trials train.
        """
        return 0.0

    def brackets(self) -> tuple[BracketView, ...]:
        """Return a view of the brackets; methods without rungs have none."""
        return ()


def check_same_setup(name: str, ours: object, theirs: object) -> None:
    """Refuse a snapshot taken under another configuration.

    Raises:
        ValueError: If the two differ.
    """
    if ours != theirs:
        raise ValueError(
            f"A search's snapshot must come from the same configuration, where `{name}` is "
            f"{ours!r}, but got {theirs!r}.\n"
            "Hint: restore with the configuration and hyperparameters that the search began with."
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """Metric of a search of several objectives."""

    metric: str
    smaller_is_better: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig(ABC):
    """Configuration of a search method as plain data; each method has a subclass.

    Attributes:
        metric: The validation metric that is searched for.
        smaller_is_better: Whether smaller values of the metric are better.
        objectives: All objectives if there are several, that of `metric` first.
        kind: The name of the method.
    """

    metric: str
    smaller_is_better: bool = True
    objectives: tuple[Objective, ...] = ()

    kind: ClassVar[str]

    @property
    def waits_at_targets(self) -> bool:
        """Return whether a trial that has trained to its length pauses until it gets a longer."""
        return False

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics of a complete report."""
        return tuple(each.metric for each in self.objectives) or (self.metric,)

    def signed(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return losses for values of all objectives, or values for losses."""
        ways = [each.smaller_is_better for each in self.objectives] or [self.smaller_is_better]
        return tuple(v if way else -v for v, way in zip(values, ways, strict=True))

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(
                f"`metric` must name a validation metric, but got {self.metric!r}.\n"
                'Hint: write for example `metric: "validation_loss"`.'
            )

    @abstractmethod
    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method; `maker` makes its trials."""

    @abstractmethod
    def num_planned(self, space: Space) -> int:
        """Return how many trials the search will have, for its preview."""

    def bracket_plans(self) -> tuple[BracketPlan, ...]:
        """Return the brackets of the search; methods without rungs have none."""
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


def as_fraction(number: float) -> Fraction:
    """Return the number as written: 1.1 means 11/10, not its nearest binary float."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(float(number)))


def floor_log(number: int, base: Fraction, at_most: int) -> int:
    """Return the largest k <= `at_most` with base**k <= number, for number >= 1 and base > 1."""
    exponent = 0
    power = base
    while exponent < at_most and power <= number:
        exponent += 1
        power *= base
    return exponent


def floor_power(base: Fraction, exponent: int, at_most: int) -> int:
    """Return base**exponent rounded down, but no more than `at_most`."""
    power = Fraction(1)
    for _ in range(exponent):
        power *= base
        if power >= at_most:
            return at_most
    return min(int(power), at_most)


def keep_count(num_entries: int, divisor: Fraction) -> int:
    """Return the number of a rung's entries good enough to continue, at least 1."""
    return max(num_entries * divisor.denominator // divisor.numerator, 1)


def rung_units(num_rungs: int, max_time: int, divisor: Fraction) -> tuple[int, ...]:
    """Return the absolute training time of each rung's decision, shortest first."""
    units = []
    # Exact: rounding errors of floats could shift a rung by a unit.
    time = Fraction(max_time)
    for _ in range(num_rungs):
        units.append(max(int(time), 1))
        if time >= 1:
            time /= divisor
    return tuple(reversed(units))
