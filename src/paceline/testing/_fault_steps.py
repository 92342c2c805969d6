"""Faults: kinds of interruptions and their points."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.testing._errors import FaultMissedError
from paceline.testing._run_results import RunFacts

FaultKind = Literal["kill", "preempt", "pause"]

# A kill right behind a checkpoint would show little: what is lost must be trained again.
MIN_REPLAYED_STEPS = 3

_SIGNALS = {"kill": "KILL", "preempt": "TERM", "pause": "STOP"}
_BATCH, _REPORT = "engine.batch", "core.report"
# By then a checkpoint that is being stored in the background is there.
_BEFORE_KILL_S = 0.5
_GOOD_PART = 0.6


@dataclass(frozen=True, slots=True)
class Fault:
    """One interruption of a run, at a step or at a fault point.

    A step is a batch where Paceline trains, and for a script with a loop of its own what it
    reports as `steps_completed`. Without a step and a point a step is chosen that lies about 60 %
    into the run, for a kill at least three steps after a checkpoint.

    Attributes:
        kind: "kill" (SIGKILL), "preempt" (SIGTERM) or "pause" (the word of a master's runner).
        step: Interrupt when so many steps are completed.
        point: Interrupt at this point of `paceline.faults` instead.
        count: Interrupt when the point is reached for the `count`-th time.
        rank: The rank that it hits. By default a kill hits the last one, SIGTERM all of them; a
            pause is always the chief's.

    Raises:
        ValueError: A value is not allowed, or both `step` and `point` are given.
    """

    kind: FaultKind
    step: int | None = None
    point: str | None = None
    count: int = 1
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"`kind` must be one of {', '.join(get_args(FaultKind))}, but got {self.kind!r}."
            )
        if self.step is not None and self.point is not None:
            raise ValueError(
                "A fault must come at a step or at a point, but got"
                f" step={self.step} and point={self.point!r}."
            )
        for name, value, least in (("step", self.step, 0), ("count", self.count, 1)):
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
        if self.kind == "pause" and self.rank:
            raise ValueError(f"A pause must be the chief's, but got rank={self.rank}.")

    def __str__(self) -> str:
        if self.point is not None:
            times = f":{self.count}" if self.count > 1 else ""
            return f"{self.kind} at {self.point}{times}"
        return f"{self.kind} at {'a step of choice' if self.step is None else f'step {self.step}'}"


def fault_variable(fault: Fault, straight: RunFacts, num_workers: int) -> str:
    """Return what `PACELINE_FAULT` must be for a fault.

    Raises:
        FaultMissedError: The straight run does not get there.
    """
    if fault.point is not None:
        return _variable_of_fault(fault, fault.point, fault.count, num_workers)
    step = _chosen_step(fault, straight) if fault.step is None else fault.step
    if step >= straight.steps_completed:
        raise FaultMissedError(
            f"The fault must come before the script ends, but step {step} is not below its"
            f" {straight.steps_completed} steps."
        )
    if _BATCH in straight.points:
        return _variable_of_fault(fault, _BATCH, step + 1, num_workers)
    count = next(
        (number for number, done in enumerate(straight.reported_steps, 1) if done >= step), None
    )
    if count is None:
        raise FaultMissedError(
            "A script with a loop of its own is interrupted at one of its reports, but none comes"
            f" at step {step} or later. Hint: report metrics at every step or every few."
        )
    return _variable_of_fault(fault, _REPORT, count, num_workers)


def _variable_of_fault(fault: Fault, point: str, count: int, num_workers: int) -> str:
    rank = fault.rank
    if rank is None and fault.kind == "kill" and point.startswith("engine."):
        rank = num_workers - 1
    if fault.kind == "pause":
        rank = 0
    text = f"{point}:{count},signal={_SIGNALS[fault.kind]}"
    if rank is not None:
        text += f",rank={rank}"
    if fault.kind == "kill" and fault.point is None:
        text += f",after={_BEFORE_KILL_S}"
    return text


def _chosen_step(fault: Fault, straight: RunFacts) -> int:
    """Return a step about 60 % into the run at which a fault tells something."""
    wanted = max(1, round(straight.steps_completed * _GOOD_PART))
    if fault.kind != "kill":
        return min(wanted, straight.steps_completed - 1)
    stops = _possible_stops(straight)
    replayed = {stop: stop - _last(straight.checkpoint_steps, stop) for stop in stops}
    # The first checkpoint may still be in the making when the second one begins.
    first = straight.checkpoint_steps[min(1, len(straight.checkpoint_steps) - 1)]
    good = [stop for stop in stops if replayed[stop] >= MIN_REPLAYED_STEPS]
    for choice in ([stop for stop in good if stop > first], good):
        if choice:
            return min(choice, key=lambda stop: abs(stop - wanted))
    # Checkpoints are that close to each other: the best there is.
    return max(stops, key=lambda stop: (replayed[stop], -abs(stop - wanted)), default=wanted)


def _possible_stops(straight: RunFacts) -> Collection[int]:
    """Return the steps behind the first checkpoint at which a fault can come."""
    end, first = straight.steps_completed, straight.checkpoint_steps[0]
    stops: Sequence[int] = (
        range(end) if _BATCH in straight.points else sorted(set(straight.reported_steps))
    )
    return [stop for stop in stops if first <= stop < end]


def _last(steps: Sequence[int], before: int) -> int:
    return max(step for step in steps if step <= before)
