"""Check of a search method against the master's assumptions, for any behaviour of trials."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.config._searcher_section import Searcher
from paceline.search._preview_and_simulation import preview
from paceline.search._search import Search, replay
from paceline.search._search_messages import (
    Create,
    Exited,
    ExitReason,
    Input,
    Limited,
    Operation,
    Progressed,
    Reported,
    Shutdown,
    Spent,
    Started,
    Stop,
    Train,
)
from paceline.search._search_method import SearchConfig, SearchMethodError, method_errors

T = TypeVar("T")

_SPACE = {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0, "count": 3}}
# Few values, so that ties are common.
METRICS = (0.1, 0.2, 0.3, 0.4, float("nan"), float("inf"), float("-inf"))
_LIMITS = (
    *(Limited(), Limited(max_trials=1), Limited(max_trials=1, target=0.1)),
    *(Limited(max_failures=2), Limited(max_wall_time=3.0), Limited(max_slot_hours=0.001)),
)
_MAX_INVALID = 3
_MAX_STEPS = 60
_MAX_TRIALS = 10_000


@dataclass
class SearchMethodDrive:
    """Drives a search by choices until the end.

    Attributes:
        search: The search.
        choose: Returns one of the values it is given.
        has_limits: Whether limits change and time passes as well.
    """

    search: Search
    choose: Callable[[Sequence[Any]], Any]
    has_limits: bool = False
    inputs: list[Input] = field(default_factory=list)
    operations: list[list[Operation]] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    num_invalid: int = 0

    def give(self, given: Input) -> None:
        """Apply an input and carry out the resulting operations."""
        operations = self.search.apply(given)
        self.inputs.append(given)
        self.operations.append(operations)
        for operation in operations:
            if isinstance(operation, Create):
                self.running.append(operation.request_id)
            elif isinstance(operation, Train):
                self.targets[operation.request_id] = operation.length
            elif isinstance(operation, Stop):
                self.stopped.add(operation.request_id)

    def step(self) -> None:
        """Give the search a single event of a chosen trial."""
        request_id = self.choose(self.running)
        limits = ("limits",) if self.has_limits else ()
        action = self.choose(("report", "early", "skip", "progress", "exit", *limits))
        if action == "limits":
            spent = float(len(self.inputs)) * self.choose((1.0, 0.0, -1.0, float("nan")))
            self.give(self.choose((*_LIMITS, Spent(wall_s=spent, slot_s=spent))))
        elif action == "progress":
            progress = self.choose((0.5, 1.0, -1.0, 2.0, float("nan")))
            self.give(Progressed(request_id=request_id, progress=progress))
        elif action == "exit" or request_id in self.stopped:
            reasons = list(ExitReason)
            if self.num_invalid == _MAX_INVALID:
                reasons.remove(ExitReason.INVALID_HP)
            reason = self.choose(reasons)
            self.num_invalid += reason is ExitReason.INVALID_HP
            self.running.remove(request_id)
            self.give(Exited(request_id=request_id, reason=reason))
        else:
            factor = {"report": 1, "early": 0.5, "skip": 5}[action]
            time = self.targets.get(request_id, 1) * factor
            metric, *others = (self.choose(METRICS) for _ in self.search.metrics)
            self.give(
                Reported(request_id=request_id, time=time, metric=metric, others=tuple(others))
            )

    def run(self, max_steps: int = 400) -> None:
        """Give up to `max_steps` events; then end all trials, so the search has to end."""
        self.give(Started())
        for _ in range(max_steps):
            if not self.running:
                return
            self.step()
        while self.running and len(self.targets) < _MAX_TRIALS:
            self.give(Exited(request_id=self.running.pop(0), reason=ExitReason.COMPLETED))

    def of_kind(self, kind: type[T]) -> list[T]:
        """Return all operations of a kind, in order."""
        return [one for group in self.operations for one in group if isinstance(one, kind)]


def check_search_method(
    searcher: Searcher, hyperparameters: dict[str, Any] | None = None, *, num_runs: int = 50
) -> None:
    """Check a search method against the master's assumptions.

    Each run drives the search with trials that exist only in memory: they report, skip reports,
    fail, refuse their hyperparameters or end at random. The search must end once its trials have;
    it must do the same when its inputs are repeated, and when it is stored and restored between
    any two of them.

    Args:
        searcher: The method's section, for example ``MedianStopping(metric="loss", max_trials=6)``.
        hyperparameters: The space; by default a learning rate from 0 to 1.
        num_runs: Number of runs. They are the same in every call.

    Raises:
        paceline.search.SearchMethodError: The method fails, or breaks one of these rules.
        paceline.search.SpaceError: The hyperparameters are not valid.
        ValueError: `num_runs` is less than 1.
    """
    if num_runs < 1:
        raise ValueError(f"`num_runs` must be at least 1, but got {num_runs}.\nHint: leave it out.")
    with method_errors(searcher.name, "search_config"):
        config = searcher.search_config()
    space = _SPACE if hyperparameters is None else hyperparameters
    preview(config, space)
    for seed in range(num_runs):
        choose = random.Random(seed).choice  # noqa: S311
        drive = SearchMethodDrive(Search(config, space, seed), choose, has_limits=seed % 2 == 1)
        drive.run(_MAX_STEPS)
        _check_end(drive, config)
        _check_repetition(drive, config, space, seed)
        _check_restoring(drive, config, space, seed)


def _check_end(drive: SearchMethodDrive, config: SearchConfig) -> None:
    if not drive.search.is_over or len(drive.of_kind(Shutdown)) != 1:
        raise _broken(config, f"end once its trials have, but it created {_MAX_TRIALS} of them")
    stops = [stop.request_id for stop in drive.of_kind(Stop)]
    if len(set(stops)) != len(stops):
        raise _broken(config, "stop a trial once, but stopped one again")


def _check_repetition(
    drive: SearchMethodDrive, config: SearchConfig, space: dict[str, Any], seed: int
) -> None:
    again = replay(config, space, seed, drive.inputs)
    for given, first, second in zip(drive.inputs, drive.operations, again, strict=True):
        if first != second:
            raise _broken(
                config,
                f"do the same when its inputs are repeated, but after {given} it returned {first}"
                f" and then {second}",
                "draw random numbers through the `TrialMaker` only, and read no clock.",
            )


def _check_restoring(
    drive: SearchMethodDrive, config: SearchConfig, space: dict[str, Any], seed: int
) -> None:
    search = Search(config, space, seed)
    hint = "`snapshot` must hold all that the method's other parts read, and `load` take it back."
    for given, expected in zip(drive.inputs, drive.operations, strict=True):
        stored = search.snapshot()
        search = Search.restore(config, space, json.loads(json.dumps(stored)))
        if search.snapshot() != stored:
            raise _broken(
                config, f"have the same state after `load`, but not before {given}",
                "keep to what JSON holds: strings as keys, lists instead of tuples and sets.",
            )  # fmt: skip
        found = search.apply(given)
        if found != expected:
            raise _broken(
                config,
                f"do the same after it was restored, but after {given} it returned {found} instead"
                f" of {expected}",
                hint,
            )


def _broken(config: SearchConfig, what: str, hint: str = "") -> SearchMethodError:
    text = f"The search method `{config.kind}` must {what}."
    return SearchMethodError(f"{text}\nHint: {hint}" if hint else text)
