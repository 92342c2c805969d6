"""Preview of a search, and its simulation: what it trains, how long it takes, how good it gets."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from paceline._base.arguments_and_errors import Rng
from paceline.search import _search_messages as messages
from paceline.search import _search_method as base
from paceline.search._hyperparameter_kinds import SpaceError
from paceline.search._hyperparameter_space import Space, parse_space
from paceline.search._samplers import Ask, Sampler, answers, asking
from paceline.search._search import Search


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the searched metric of a trial.

    Attributes:
        hparams: The trial's hyperparameters.
        points: Times in the unit of the search, rising, and the values there.
        seconds_per_unit: How long a unit takes.
    """

    hparams: dict[str, Any]
    points: list[tuple[float, float]]
    seconds_per_unit: float = 1.0

    def at(self, time: float) -> float:
        """Return the value of the newest point up to a time; the first one before it."""
        index = bisect_right(self.points, time, key=lambda point: point[0])
        return self.points[max(index, 1) - 1][1]


Curves = Callable[[messages.Create], Curve]


def nearest_curves(space: Space, curves: Sequence[Curve]) -> Curves:
    """Return a function giving trials the curve of the nearest hyperparameters.

    Raises:
        ValueError: There is no curve with points of the space.
    """
    known = []
    for curve in curves:
        with suppress(SpaceError):
            if curve.points:
                known.append((space.encode(space.check(curve.hparams)), curve))
    if not known:
        raise ValueError(
            "`curves` must have a trial with hyperparameters of the config's space, but got"
            f" {len(curves)} without. Hint: take curves of a search of the same hyperparameters."
        )

    def of(create: messages.Create) -> Curve:
        place = space.encode(create.hparams)
        return min(known, key=lambda one: math.dist(place, one[0]))[1]

    return of


def imaginary_curves(length: float, *, smaller_is_better: bool) -> Curves:
    """Return what gives each trial a curve that falls to a level of its own, drawn by its seed."""

    def of(create: messages.Create) -> Curve:
        rng, sign = Rng(create.trial_seed), 1.0 if smaller_is_better else -1.0
        level, speed = rng.real(), 2.0 + 6.0 * rng.real()
        times = [length * part / 20 for part in range(1, 21)]
        points = [
            (time, sign * (level + (1.0 - level) * math.exp(-speed * time / length)))
            for time in times
        ]
        return Curve(hparams=create.hparams, points=points)

    return of


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsResult:
    """Use of a simulated search, in seconds of its curves, and the best values by time."""

    wall_s: float
    slot_s: float
    """The seconds for which trials held slots, in sum."""
    trained: dict[int, int]
    """How many trials trained for how long, in the unit of the search."""
    best: tuple[tuple[float, float], ...]
    """Each time a value was better than all before: the second, and the value."""

    def best_at(self, time_s: float) -> float | None:
        """Return the best value up to a time."""
        index = bisect_right(self.best, time_s, key=lambda one: one[0])
        return self.best[index - 1][1] if index else None


@dataclass(slots=True)
class _Trial:
    create: messages.Create
    curve: Curve
    target: int = 0
    trained: int = 0
    is_stopped: bool = False
    is_paused: bool = False
    is_resuming: bool = False

    def next_report(self, unit: float) -> int:
        """Return the time of the next point of the curve, at most the target."""
        index = bisect_right(self.curve.points, self.trained * unit, key=lambda point: point[0])
        if index == len(self.curve.points):
            return self.target
        return min(math.ceil(self.curve.points[index][0] / unit), self.target)


class Simulated(Protocol):
    """Search run by `simulate_slots`."""

    @property
    def asks(self) -> Sequence[messages.Create]: ...

    def apply(self, input: messages.Input) -> list[messages.Operation]: ...


def simulate_slots(
    config: base.SearchConfig,
    hyperparameters: dict[str, Any],
    seed: int,
    curves: Curves,
    *,
    slots: int,
    unit: float = 1.0,
    ask: Ask | None = None,
    is_asking: bool = False,
) -> SlotsResult:
    """Run a search on imaginary trials, of which as many train at once as there are slots.

    Trials are placed in the order of their creation and keep their slot until they pause or end. A
    trial reports at each point of its curve and at each of its targets. Pauses take no time.

    Args:
        config: The search method.
        hyperparameters: The space.
        seed: The seed of the search.
        curves: Gives each trial its curve.
        slots: How many trials train at once, at least 1.
        unit: How many units of the curves a unit of the search is.
        ask: Asks a sampler; None for draws at random.
        is_asking: Whether the search asks for hyperparameters.

    Raises:
        ValueError: If the hyperparameters or the seed are not valid.
        SearchMethodError: If the search method fails.
    """
    search = Search(config, hyperparameters, seed, is_asking=is_asking)

    def answer() -> messages.Input:
        return answers(search, ask, "sampler")[0]

    return run_on_slots(config, search, answer, curves, slots=slots, unit=unit)


def run_on_slots(
    config: base.SearchConfig,
    search: Simulated,
    answer: Callable[[], messages.Input],
    curves: Curves,
    *,
    slots: int,
    unit: float = 1.0,
    most_s: float = math.inf,
    resume_units: float = 0.0,
) -> SlotsResult:
    """Run a search that has not started, until its end or for `most_s`; see `simulate_slots`.

    Args:
        config: The search method.
        search: The search, maybe another library's.
        answer: Returns the answer to the oldest ask of the search.
        curves: Gives each trial its curve.
        slots: How many trials train at once, at least 1.
        unit: How many units of the curves a unit of the search is.
        most_s: When the simulation ends at the latest.
        resume_units: How long a trial holds its slot after a pause before it trains, in units of
            its curve.

    Raises:
        ValueError: The search has several objectives, of which curves say nothing.
    """
    if config.objectives:
        raise ValueError(
            "A search on curves must have one objective, but got"
            f" {', '.join(config.metrics)}.\nHint: simulate it with `metric` alone."
        )
    run = _SlotsRun(config, search, answer, curves, slots, unit, resume_units)
    run.give(messages.Started())
    while (now := run.next_time()) is not None and now <= most_s:
        run.advance(now)
    run.now = run.now if now is None else most_s
    trained = Counter(trial.trained for trial in run.trials.values())
    return SlotsResult(
        wall_s=run.now,
        slot_s=run.slot_s - sum(end - run.now for end, _, _ in run.training),
        trained=dict(sorted(trained.items())),
        best=tuple(run.best),
    )


@dataclass(slots=True)
class _SlotsRun:
    config: base.SearchConfig
    search: Simulated
    answer: Callable[[], messages.Input]
    curves: Curves
    slots: int
    unit: float
    resume_units: float
    now: float = 0.0
    slot_s: float = 0.0
    """Up to the next reports of the trials that train."""
    trials: dict[str, _Trial] = field(default_factory=dict)
    waiting: deque[_Trial] = field(default_factory=deque)
    training: list[tuple[float, int, _Trial]] = field(default_factory=list)
    best: list[tuple[float, float]] = field(default_factory=list)
    num_segments: int = 0

    def give(self, given: messages.Input) -> None:
        inputs = deque([given])
        while inputs:
            for operation in self.search.apply(inputs.popleft()):
                if isinstance(operation, messages.Create):
                    trial = _Trial(operation, self.curves(operation))
                    self.trials[operation.request_id] = trial
                    self.waiting.append(trial)
                elif not isinstance(operation, messages.Shutdown):
                    inputs += self._change(self.trials[operation.request_id], operation)
            if self.search.asks:
                inputs.append(self.answer())

    def _change(
        self, trial: _Trial, operation: messages.Train | messages.Stop
    ) -> list[messages.Input]:
        was_paused, trial.is_paused = trial.is_paused, False
        if isinstance(operation, messages.Stop):
            trial.is_stopped = True
            return [_completed(trial)] if was_paused else []
        trial.target = operation.length
        if was_paused:
            trial.is_resuming = True
            self.waiting.append(trial)
        return []

    def next_time(self) -> float | None:
        """Let trials train in free slots; return when one reports next, None if none trains."""
        while self.waiting and len(self.training) < self.slots:
            self._train(self.waiting.popleft())
        return self.training[0][0] if self.training else None

    def _train(self, trial: _Trial) -> None:
        length = (trial.next_report(self.unit) - trial.trained) * self.unit
        length += self.resume_units if trial.is_resuming else 0.0
        trial.is_resuming = False
        seconds = length * trial.curve.seconds_per_unit
        self.slot_s, self.num_segments = self.slot_s + seconds, self.num_segments + 1
        heapq.heappush(self.training, (self.now + seconds, self.num_segments, trial))

    def advance(self, now: float) -> None:
        """Let the next trial report, then end, pause or train on."""
        self.now, (_, _, trial) = now, heapq.heappop(self.training)
        trial.trained = trial.next_report(self.unit)
        value, sign = trial.curve.at(trial.trained * self.unit), 1.0
        if not self.config.smaller_is_better:
            sign = -1.0
        if math.isfinite(value) and (not self.best or sign * (value - self.best[-1][1]) < 0):
            self.best.append((now, value))
        request_id = trial.create.request_id
        self.give(messages.Reported(request_id=request_id, time=trial.trained, metric=value))
        if trial.is_stopped or (trial.target <= trial.trained and not self.config.waits_at_targets):
            self.give(_completed(trial))
        elif trial.target <= trial.trained:
            trial.is_paused = True
        else:
            self._train(trial)


def _completed(trial: _Trial) -> messages.Exited:
    return messages.Exited(request_id=trial.create.request_id, reason=messages.ExitReason.COMPLETED)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRow:
    """Say how many trials train for how long."""

    trials: int
    units: int | None
    """The absolute training time in units of the time metric; None means to completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """Preview of a search's training, assuming reports of its trials strictly in sequence."""

    brackets: tuple[base.BracketPlan, ...]
    rows: tuple[PreviewRow, ...]
    """Sorted by training time, the shortest first."""


def preview(config: base.SearchConfig, hyperparameters: dict[str, Any]) -> Preview:
    """Return a preview of the training in a search.

    Raises:
        SpaceError: If the hyperparameters are not valid, or lack counts for a grid.
        SearchMethodError: If the search method fails.
    """
    # A method that cannot even be made has no preview.
    Search(config, hyperparameters, seed=0)
    with base.method_errors(config.kind, "num_planned"):
        trials = config.num_planned(parse_space(hyperparameters))
    with base.method_errors(config.kind, "bracket_plans"):
        plans = config.bracket_plans()
    if not plans:
        return Preview(brackets=(), rows=(PreviewRow(trials=trials, units=None),))
    counts: Counter[int] = Counter()
    for plan in plans:
        counts.update(_trials_by_units(plan))
    rows = (PreviewRow(trials=counts[units], units=units) for units in sorted(counts))
    return Preview(brackets=plans, rows=tuple(row for row in rows if row.trials))


def _trials_by_units(plan: base.BracketPlan) -> Counter[int]:
    counts: Counter[int] = Counter()
    arriving = plan.trials
    for units in plan.units[:-1]:
        going_on = base.keep_count(arriving, plan.divisor)
        counts[units] += arriving - going_on
        arriving = going_on
    counts[plan.units[-1]] += arriving
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Result of a simulated search: inputs, operations and progress."""

    inputs: tuple[messages.Input, ...]
    operations: tuple[tuple[messages.Operation, ...], ...]
    """The operations that followed from each input."""
    progress: tuple[float, ...]
    """The search's progress after each input."""
    trained: dict[str, int]
    """How long each trial trained, by request id in the order of creation."""

    def counts(self) -> dict[int, int]:
        """Return how many trials trained for how long, the shortest time first."""
        return dict(sorted(Counter(self.trained.values()).items()))


@dataclass(slots=True)
class _ImaginaryTrial:
    create: messages.Create
    target: int = 0
    trained: int = 0
    is_stopped: bool = False


@dataclass(slots=True)
class _Simulator:
    search: Search
    max_inputs: int
    ask: Ask
    inputs: list[messages.Input] = field(default_factory=list)
    operations: list[tuple[messages.Operation, ...]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    trials: dict[str, _ImaginaryTrial] = field(default_factory=dict)
    running: list[_ImaginaryTrial] = field(default_factory=list)

    def give(self, input: messages.Input) -> None:
        if len(self.inputs) >= self.max_inputs:
            raise RuntimeError(
                f"A simulated search must end within {self.max_inputs} inputs, but it has not.\n"
                "Hint: trials with invalid hyperparameters are replaced without end; "
                "or raise `max_inputs`."
            )
        operations = self.search.apply(input)
        self.inputs.append(input)
        self.operations.append(tuple(operations))
        self.progress.append(self.search.progress())
        for operation in operations:
            if isinstance(operation, messages.Create):
                trial = self.trials[operation.request_id] = _ImaginaryTrial(operation)
                self.running.append(trial)
            elif isinstance(operation, messages.Train):
                self.trials[operation.request_id].target = operation.length
            elif isinstance(operation, messages.Stop):
                self.trials[operation.request_id].is_stopped = True
        if self.search.asks:
            self.give(answers(self.search, self.ask, "sampler")[0])

    def result(self) -> SimulationResult:
        return SimulationResult(
            inputs=tuple(self.inputs),
            operations=tuple(self.operations),
            progress=tuple(self.progress),
            trained={request_id: trial.trained for request_id, trial in self.trials.items()},
        )


def simulate(
    config: base.SearchConfig,
    hyperparameters: dict[str, Any],
    seed: int,
    metric_of: Callable[[messages.Create, int], float | Sequence[float]],
    *,
    exit_of: Callable[[messages.Create, int], messages.ExitReason | None] | None = None,
    report_every: int | None = None,
    max_inputs: int = 1_000_000,
    sampler: Sampler | None = None,
) -> SimulationResult:
    """Run a search on imaginary trials taking turns.

    In its turn a trial trains to its next target, or for `report_every` units of time if that is
    less, and reports `metric_of(create, time)`, for several objectives a value for each. Then it
    ends if the search has stopped it or has set no further target, or if `exit_of(create, time)`
    gives a reason. A trial created during a round has its first turn in the same round. Without a
    `sampler`, hyperparameters are drawn at random.

    Raises:
        ValueError: If the hyperparameters or the seed are not valid, or `report_every` is less
            than 1.
        SearchMethodError: If the search method fails.
        RuntimeError: If the search has not ended after `max_inputs` inputs.
    """
    if report_every is not None and report_every < 1:
        raise ValueError(
            f"`report_every` must be at least 1, but got {report_every}.\n"
            "Hint: leave it out for one report at each target."
        )
    search = Search(config, hyperparameters, seed, is_asking=sampler is not None)
    simulator = _Simulator(search, max_inputs, asking(sampler, search.space, seed))
    simulator.give(messages.Started())
    num_before = 0
    while simulator.running:
        if num_before == len(simulator.inputs):
            raise RuntimeError(
                "A simulated search must decide about its trials, but all of them wait for it.\n"
                "Hint: a method whose trials wait promotes or stops some once none trains."
            )
        num_before = len(simulator.inputs)
        remaining = []
        # The list grows while it is walked through: `give` appends new trials.
        for trial in simulator.running:
            request_id = trial.create.request_id
            if config.waits_at_targets and trial.trained == trial.target and not trial.is_stopped:
                remaining.append(trial)
                continue
            step = trial.target if report_every is None else report_every
            trial.trained = min(trial.trained + step, trial.target)
            given = metric_of(trial.create, trial.trained)
            metric, *others = given if isinstance(given, Sequence) else [given]
            simulator.give(
                messages.Reported(
                    request_id=request_id, time=trial.trained, metric=metric, others=tuple(others)
                )
            )
            reason = exit_of(trial.create, trial.trained) if exit_of else None
            is_there = trial.target == trial.trained and not config.waits_at_targets
            if reason is None and (trial.is_stopped or is_there):
                reason = messages.ExitReason.COMPLETED
            if reason is None:
                remaining.append(trial)
            else:
                simulator.give(messages.Exited(request_id=request_id, reason=reason))
        simulator.running = remaining
    return simulator.result()
