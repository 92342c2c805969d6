"""State of a search: its trials, what it may use and has used, and what samplers are told."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any

import msgspec

from paceline.search import _search_messages as messages
from paceline.search._hyperparameter_space import Space
from paceline.search._samplers import Observation

SPENT_INTERVAL_S = 60.0
"""How often a search with a limit of time is told the time."""


@dataclass(slots=True)
class SearchedTrial:
    """Trial from the point of view of its search."""

    is_stopped: bool = False
    exit_reason: messages.ExitReason | None = None
    progress: float = 0.0
    reached: float = 0.0
    """The least progress, by the trial's reports."""
    is_cut: bool = False
    """Stopped by a limit, of which the method does not know."""
    is_out_of_memory: bool = False
    point: tuple[float, ...] = ()
    """Its losses in a search of several objectives; see `newer_point`."""


@dataclass(slots=True)
class Budget:
    """Budget of a search: its limits and the used amounts.

    Attributes:
        limits: The limits.
        wall_s: Seconds in which it was active.
        slot_s: Seconds for which its trials held slots, in sum.
        num_trials: The trials created, without those that refused their hyperparameters.
        num_failed: The failed trials.
        best: The best finite value of the metric; None before the first.
    """

    limits: messages.Limited = field(default_factory=messages.Limited)
    wall_s: float = 0.0
    slot_s: float = 0.0
    num_trials: int = 0
    num_failed: int = 0
    best: float | None = None

    def used(self) -> dict[str, float | None]:
        """Return the used amounts by the names of the limits."""
        return {
            "max_trials": self.num_trials,
            "max_slot_hours": self.slot_s / 3600,
            "max_wall_time": self.wall_s,
            "target": self.best,
            "max_failures": self.num_failed,
        }

    def reached(self, smaller_is_better: bool) -> str | None:
        """Return the name of a limit reached, the reason to end running trials too; else None."""
        for name, used in self.used().items():
            limit = getattr(self.limits, name)
            if limit is None or used is None or name == "max_trials":
                continue
            if used <= limit if name == "target" and smaller_is_better else used >= limit:
                return name
        return None

    def has_room(self) -> bool:
        """Return whether another trial may be created."""
        most = self.limits.max_trials
        return most is None or self.num_trials < most


@dataclass(slots=True)
class _Observed:
    """Facts about a trial for samplers."""

    hparams: dict[str, Any]
    note: Any = None
    loss: float | None = None
    time: float = 0.0


def _state_of(trial: SearchedTrial) -> str:
    if trial.is_out_of_memory:
        return "out_of_memory"
    if trial.is_stopped:
        return "completed" if trial.reached >= 1 else "stopped"
    if trial.exit_reason is None:
        return "running"
    return {
        messages.ExitReason.COMPLETED: "completed",
        messages.ExitReason.INVALID_HP: "invalid",
    }.get(trial.exit_reason, "failed")


class Observations:
    """Trials of a search as samplers see them.

    Args:
        trials: The trials of the search by request id, kept up to date by the search.
    """

    def __init__(self, trials: Mapping[str, SearchedTrial]) -> None:
        self._trials = trials
        self._earlier: list[Observation] = []
        self._observed: dict[str, _Observed] = {}
        self._ended: dict[str, Observation] = {}

    def all(self) -> list[Observation]:
        """Return earlier trials, then those with their hyperparameters, in order."""
        return self._earlier + [
            self._ended.get(request_id) or self._observation(request_id, seen)
            for request_id, seen in self._observed.items()
        ]

    def add(self, request_id: str, hparams: dict[str, Any], note: Any) -> None:
        """Add a trial with its hyperparameters, and the sampler's note on the trial."""
        self._observed[request_id] = _Observed(hparams, note)

    def note_report(self, request_id: str, time: float, loss: float, *, is_best: bool) -> None:
        """Note a report; with `is_best`, its loss replaces any earlier loss."""
        seen = self._observed.get(request_id)
        if seen is None:
            return
        seen.time = time
        if math.isfinite(loss) and (seen.loss is None or loss < seen.loss or is_best):
            seen.loss = loss

    def recall(self, given: messages.Recalled, space: Space, sign: int) -> None:
        """Add the trials of an earlier search with finite values and fitting hyperparameters."""
        for number, (hparams, value, time) in enumerate(given.trials, 1):
            with suppress(ValueError, TypeError, LookupError):
                if not math.isfinite(value):
                    continue
                seen = Observation(
                    id=f"{given.source}, {number}",
                    hparams=space.check(hparams),
                    state="completed",
                    loss=sign * value,
                    time=time,
                    is_earlier=True,
                )
                self._earlier.append(seen)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON-able data."""
        return {
            "earlier": msgspec.to_builtins(self._earlier),
            "observed": [[key, *astuple(seen)] for key, seen in self._observed.items()],
        }

    def load(self, snapshot: Mapping[str, Any]) -> None:
        """Take a state back; the state of a search without a sampler has no observations."""
        self._earlier = msgspec.convert(snapshot.get("earlier", []), list[Observation])
        self._observed = {key: _Observed(*seen) for key, *seen in snapshot.get("observed", ())}

    def _observation(self, request_id: str, seen: _Observed) -> Observation:
        trial = self._trials[request_id]
        made = Observation(
            id=request_id,
            hparams=seen.hparams,
            state=_state_of(trial),
            loss=seen.loss,
            time=seen.time,
            note=seen.note,
            losses=trial.point,
        )
        # Nothing of an ended trial changes any more, and there are many of them.
        if trial.exit_reason is not None:
            self._ended[request_id] = made
        return made


def check_method_state(state: Any) -> None:
    """Refuse a method's state unless all of it is JSON.

    Raises:
        ValueError: It is none; the message names the place.
    """
    try:
        # NaN and infinity are no JSON, so a stored snapshot could not be read again.
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(_why_no_json(state, "snapshot()") or str(error)) from error


def _why_no_json(value: Any, where: str) -> str | None:
    """Return the place of a non-JSON value and the requirement there; None if all is JSON."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        reasons = (_why_no_json(item, f"{where}[{key!r}]") for key, item in items)
        return next(filter(None, reasons), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"`{where}` must be a finite number, but got {value}"
    if value is None or isinstance(value, (str, int, float)):
        return None
    return f"`{where}` must be JSON, but got a {type(value).__name__}"
