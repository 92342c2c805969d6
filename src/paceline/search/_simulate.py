"""Run a search on imaginary trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.search._inputs_and_operations import (
    Create,
    Exited,
    ExitReason,
    Input,
    Operation,
    Reported,
    Started,
    Stop,
    Train,
)
from paceline.search._method_config import SearchConfig
from paceline.search._search import Search


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """Tell what happened in a simulated search."""

    inputs: tuple[Input, ...]
    operations: tuple[tuple[Operation, ...], ...]
    """What followed from each input."""
    progress: tuple[float, ...]
    """The search's progress after each input."""
    trained: dict[str, int]
    """How long each trial trained, by request id in the order of creation."""

    def counts(self) -> dict[int, int]:
        """Return how many trials trained for how long, the shortest time first."""
        return dict(sorted(Counter(self.trained.values()).items()))


@dataclass(slots=True)
class _ImaginaryTrial:
    create: Create
    target: int = 0
    trained: int = 0
    is_stopped: bool = False


@dataclass(slots=True)
class _Simulator:
    search: Search
    max_inputs: int
    inputs: list[Input] = field(default_factory=list)
    operations: list[tuple[Operation, ...]] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    trials: dict[str, _ImaginaryTrial] = field(default_factory=dict)
    running: list[_ImaginaryTrial] = field(default_factory=list)

    def give(self, input: Input) -> None:
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
            if isinstance(operation, Create):
                trial = self.trials[operation.request_id] = _ImaginaryTrial(operation)
                self.running.append(trial)
            elif isinstance(operation, Train):
                self.trials[operation.request_id].target = operation.length
            elif isinstance(operation, Stop):
                self.trials[operation.request_id].is_stopped = True

    def result(self) -> SimulationResult:
        return SimulationResult(
            inputs=tuple(self.inputs),
            operations=tuple(self.operations),
            progress=tuple(self.progress),
            trained={request_id: trial.trained for request_id, trial in self.trials.items()},
        )


def simulate(
    config: SearchConfig,
    hyperparameters: dict[str, Any],
    seed: int,
    metric_of: Callable[[Create, int], float],
    *,
    exit_of: Callable[[Create, int], ExitReason | None] | None = None,
    report_every: int | None = None,
    max_inputs: int = 1_000_000,
) -> SimulationResult:
    """Run a search on imaginary trials that take turns.

    In its turn a trial trains to its next target, or for `report_every` units of time if that is
    less, and reports `metric_of(create, time)`. Then it ends if the search has stopped it or has
    set no further target, or if `exit_of(create, time)` gives a reason. A trial created during a
    round has its first turn in the same round.

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
    simulator = _Simulator(Search(config, hyperparameters, seed), max_inputs)
    simulator.give(Started())
    while simulator.running:
        remaining = []
        # The list grows while it is walked through: `give` appends new trials.
        for trial in simulator.running:
            request_id = trial.create.request_id
            step = trial.target if report_every is None else report_every
            trial.trained = min(trial.trained + step, trial.target)
            metric = metric_of(trial.create, trial.trained)
            simulator.give(Reported(request_id=request_id, time=trial.trained, metric=metric))
            reason = exit_of(trial.create, trial.trained) if exit_of else None
            if reason is None and (trial.is_stopped or trial.target == trial.trained):
                reason = ExitReason.COMPLETED
            if reason is None:
                remaining.append(trial)
            else:
                simulator.give(Exited(request_id=request_id, reason=reason))
        simulator.running = remaining
    return simulator.result()
