"""Base class of search methods and its parts; random search, grid search, the single trial."""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from paceline._base.arguments_and_errors import PicklableError, Rng
from paceline.search._hyperparameter_kinds import SpaceError
from paceline.search._hyperparameter_space import Space


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


class ExitReason(str, Enum):
    """Return why a trial ended."""

    COMPLETED = "completed"
    ERROR = "error"
    CANCELED = "canceled"
    INVALID_HP = "invalid_hp"


class Started(msgspec.Struct, frozen=True, tag="started", kw_only=True):
    """Begin the search; the first input, given once."""


class Reported(msgspec.Struct, frozen=True, tag="reported", kw_only=True, omit_defaults=True):
    """Input: a validation result of a trial.

    `time` is the trial's absolute training time, in the unit of the search's time metric. A
    report at a time that is not finite changes nothing.
    `metric` is the searched metric as the trial reported it; a value that is not finite ranks
    behind every finite number. `others` has the values of the other objectives in their order.
    """

    request_id: str
    time: float
    metric: float
    others: tuple[float, ...] = ()


class Progressed(msgspec.Struct, frozen=True, tag="progressed", kw_only=True):
    """Input: a trial's own progress from 0 to 1."""

    request_id: str
    progress: float


class Exited(msgspec.Struct, frozen=True, tag="exited", kw_only=True):
    """Input: the final exit of a trial, and the reason; an error can be a want of memory."""

    request_id: str
    reason: ExitReason
    is_out_of_memory: bool = False


class Proposed(msgspec.Struct, frozen=True, tag="proposed", kw_only=True):
    """Input: the hyperparameters of a trial, as asked for by the search.

    `hparams` of None means the search's own draw at random. With `is_fallback` it stands in for an
    answer that was wrong, late or missing; `why` says which. `note` is the sampler's, as JSON.
    """

    request_id: str
    hparams: dict[str, Any] | None
    by: str
    why: str = ""
    is_fallback: bool = False
    note: Any = None


class Limited(msgspec.Struct, frozen=True, tag="limited", kw_only=True):
    """Input: what the search may use from now on, before `Started` or at any later time.

    Attributes:
        max_trials: How many trials it may create; those that refuse their hyperparameters do not
            count. More than the method has makes the method create more.
        max_slot_hours: How many hours its trials may hold slots, in sum.
        max_wall_time: How many seconds it may take.
        target: The value of the metric at which it ends.
        max_failures: At how many failed trials it ends.
        best: The best value of the metric so far, for a search that was told none; None for nothing
            new.
    """

    max_trials: int | None = None
    max_slot_hours: float | None = None
    max_wall_time: float | None = None
    target: float | None = None
    max_failures: int | None = None
    best: float | None = None


class Spent(msgspec.Struct, frozen=True, tag="spent", kw_only=True):
    """Input: what the search has taken since its beginning; less than before changes nothing.

    Attributes:
        wall_s: Seconds in which it was active.
        slot_s: Seconds for which its trials held slots, in sum.
    """

    wall_s: float
    slot_s: float = 0.0


class Recalled(msgspec.Struct, frozen=True, tag="recalled", kw_only=True):
    """Input: ended trials from before the search, from which its sampler learns.

    Attributes:
        source: Where they are from, for people.
        trials: Of each the hyperparameters, the best finite value of the metric, and its time.
    """

    source: str
    trials: list[tuple[dict[str, Any], float, float]]


class Create(msgspec.Struct, frozen=True, tag="create", kw_only=True):
    """Ask for a new trial with these hyperparameters.

    With `parent`, it starts from the latest checkpoint of that trial, and counts its time from its
    own beginning.
    """

    request_id: str
    trial_seed: int
    hparams: dict[str, Any]
    parent: str | None = None


class Train(msgspec.Struct, frozen=True, tag="train", kw_only=True):
    """Operation: set the absolute length of a trial's next training."""

    request_id: str
    length: int


class Stop(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """Operation: stop a trial, since the search needs no more of its results."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", kw_only=True):
    """Operation: end the search, after the end of all its trials."""

    failure: bool
    cancel: bool


Input = Started | Reported | Progressed | Exited | Proposed | Limited | Spent | Recalled
Operation = Create | Train | Stop | Shutdown


def encode_search_float(number: float) -> float | str:
    """Encode a float for JSON, a format without NaN and infinities."""
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def message_to_json(message: Input | Operation) -> str:
    """Encode an input or an operation as JSON with NaN and infinities preserved."""
    fields = msgspec.to_builtins(message)
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = encode_search_float(value)
        elif name == "others":
            fields[name] = [*map(encode_search_float, value)]
    return msgspec.json.encode(fields).decode()


def input_from_json(text: str | bytes) -> Input:
    """Decode an input encoded by `message_to_json`.

    Raises:
        msgspec.ValidationError: If the text is JSON but no input.
        msgspec.DecodeError: If the text is not JSON.
    """
    # Only lax decoding turns the strings "nan", "inf" and "-inf" back into floats.
    decoded: Input = msgspec.json.decode(text, type=Input, strict=False)
    return decoded


def operation_from_json(text: str | bytes) -> Operation:
    """Decode an operation encoded by `message_to_json`.

    Raises:
        msgspec.ValidationError: If the text is JSON but no operation.
        msgspec.DecodeError: If the text is not JSON.
    """
    decoded: Operation = msgspec.json.decode(text, type=Operation)
    return decoded


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GridConfig(SearchConfig):
    """Configuration of a grid search: a trial for each point."""

    max_concurrent_trials: int = 16
    """0 runs all trials at once."""
    max_length: int | None = None

    kind: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        check_optional_length(self.max_length)

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return GridMethod(
            maker,
            max_concurrent_trials=self.max_concurrent_trials,
            length=self.max_length or 1,
        )

    def num_planned(self, space: Space) -> int:
        """Return the number of grid points."""
        return space.grid_size()


class GridMethod(SearchMethod):
    """Grid search: creates a trial for each grid point, from the last point to the first."""

    def __init__(self, maker: TrialMaker, *, max_concurrent_trials: int, length: int) -> None:
        self._maker = maker
        self._size = maker.space.grid_size()
        self._num_initial = min(self._size, max_concurrent_trials or self._size)
        self._length = length
        self._num_left = self._size

    def start(self) -> list[Operation]:
        """Return the operations to create the first trials."""
        operations: list[Operation] = []
        for _ in range(self._num_initial):
            operations += self._create()
        return operations

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Do nothing: a grid search compares no trials."""
        return []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Create the next point's trial; the point of a failed trial is not tried again."""
        return self._create() if self._num_left else []

    def num_trials(self, num_invalid: int) -> int:
        """Return the number of grid points without the invalid ones."""
        return self._size - num_invalid

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {"size": self._size, "num_left": self._num_left}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another grid.
        """
        check_same_setup("grid size", self._size, snapshot["size"])
        self._num_left = snapshot["num_left"]

    def _create(self) -> list[Operation]:
        self._num_left -= 1
        create = self._maker.at_grid_point(self._num_left)
        return [create, Train(request_id=create.request_id, length=self._length)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleConfig(SearchConfig):
    """Configuration of a search with a single trial."""

    max_length: int | None = None
    """The trial's length if it works by operations; None stands for 1."""

    kind: ClassVar[str] = "single"

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_optional_length(self.max_length)

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method: a random search for a single trial without a replacement."""
        return RandomMethod(
            maker,
            max_trials=1,
            max_concurrent_trials=1,
            length=self.max_length or 1,
            is_invalid_replaced=False,
        )

    def num_planned(self, space: Space) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomConfig(SearchConfig):
    """Train trials with hyperparameters drawn at random."""

    max_trials: int
    max_concurrent_trials: int = 16
    """0 runs all trials at once."""
    max_length: int | None = None

    kind: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_integer("max_trials", self.max_trials, least=1)
        check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        check_optional_length(self.max_length)

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return RandomMethod(
            maker,
            max_trials=self.max_trials,
            max_concurrent_trials=self.max_concurrent_trials,
            length=self.max_length or 1,
            is_invalid_replaced=True,
        )

    def num_planned(self, space: Space) -> int:
        """Return the configured number."""
        return self.max_trials


class RandomMethod(SearchMethod):
    """Random search: creates a new random trial whenever a trial ends, up to the total."""

    def __init__(
        self,
        maker: TrialMaker,
        *,
        max_trials: int,
        max_concurrent_trials: int,
        length: int,
        is_invalid_replaced: bool,
    ) -> None:
        self._maker = maker
        self._max_trials = max_trials
        self._planned = max_trials
        self._num_concurrent = max_concurrent_trials
        self._length = length
        self._is_invalid_replaced = is_invalid_replaced
        self._num_counted = 0
        self._num_running = 0

    def start(self) -> list[Operation]:
        """Return the operations to create the first trials."""
        return self._fill()

    def resize(self, max_trials: int) -> list[Operation]:
        """Create more or fewer trials; a single trial stays alone."""
        if not self._is_invalid_replaced:
            return []
        self._max_trials = max_trials
        return self._fill()

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Do nothing: a random search compares no trials."""
        return []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Create the next trial; a trial with invalid hyperparameters does not count."""
        if reason is ExitReason.INVALID_HP and self._is_invalid_replaced:
            self._num_counted -= 1
        self._num_running -= 1
        return self._create() if self._num_counted < self._max_trials else []

    def num_trials(self, num_invalid: int) -> int:
        """Return the configured number: trials with invalid hyperparameters are replaced."""
        return max(self._max_trials, self._num_counted)

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {
            "max_trials": self._planned,
            "resized_to": self._max_trials,
            "num_counted": self._num_counted,
            "num_running": self._num_running,
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """
        check_same_setup("max_trials", self._planned, snapshot["max_trials"])
        self._num_counted = snapshot["num_counted"]
        # Snapshots of earlier versions lack both; their searches ran as many trials as they may.
        self._max_trials = snapshot.get("resized_to", self._planned)
        most = min(self._num_concurrent or self._planned, self._planned)
        self._num_running = snapshot.get("num_running", most)

    def _fill(self) -> list[Operation]:
        operations: list[Operation] = []
        most = self._num_concurrent or self._max_trials
        while self._num_running < most and self._num_counted < self._max_trials:
            operations += self._create()
        return operations

    def _create(self) -> list[Operation]:
        self._num_counted += 1
        self._num_running += 1
        create: Create = self._maker.sampled()
        return [create, Train(request_id=create.request_id, length=self._length)]
