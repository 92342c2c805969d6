"""Feed of an experiment's events as lines of text; free of I/O, so tests can read the lines."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any

from paceline._base.journal_records import decode_value
from paceline._base.progress_display import format_duration
from paceline._cluster.messages.states import FULLY_TRAINED, STOPPED_BY_SEARCH
from paceline.cli import _console_output as console
from paceline.config._fields_and_problems import split_length

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import Experiment as ExperimentData
    from paceline._cluster.messages.experiment_models import Trial as TrialData
    from paceline._cluster.messages.master_models import Event

# How one of a time metric is called.
_UNITS = {"batches": "batch", "epochs": "epoch", "records": "record", "steps": "step"}
# Validations come as events of their own; timings and system metrics are for charts and `paceline
# trial metrics`.
_UNSHOWN_GROUPS = ("validation", "profiling", "system")
_STATE_WORDS = {"COMPLETED": "completed", "CANCELED": "canceled", "ERROR": "failed"}
_ENDING_WORDS = {
    "STOPPING_CANCELED": "is being canceled",
    "STOPPING_KILLED": "is being killed",
    "STOPPING_ERROR": "failed; its trials are being stopped",
}
_INVALID_HP = "invalid_hp"
_ALERT_STYLES = {"warn": "yellow", "error": "red", "debug": "dim"}
_STATE_STYLES = {"COMPLETED": "green", "CANCELED": "yellow", "ERROR": "red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedLine:
    """Line of the feed about an event; `seconds` counts from the start.

    `failed_trial_id` names the trial whose last words belong below the line.
    """

    seconds: float
    text: str
    style: str = ""
    failed_trial_id: int | None = None

    def __str__(self) -> str:
        minutes, seconds = divmod(max(int(self.seconds), 0), 60)
        return f"{minutes:>2}:{seconds:02} {self.text}"


@dataclass(kw_only=True, slots=True)
class _TrialView:
    hparams: dict[str, Any] = field(default_factory=dict)
    steps_completed: int = 0
    place: str = ""
    has_trained_all: bool = False
    num_attempts: int = 0
    has_ended: bool = False
    is_running: bool = False
    is_announced: bool = False


class EventFeed:
    """State of a single experiment, built from its events.

    Args:
        experiment: The experiment.
        is_from_now: Whether times count from the first event instead of the experiment's creation.

    Attributes:
        started_at: The moment from which times count; None before the first event if that is it.
        progress: The part of the search that is done, from 0 to 1 inclusive.
        best_trial_id: The trial with the best searched metric so far.
    """

    def __init__(self, experiment: "ExperimentData", *, is_from_now: bool = False) -> None:
        searcher = experiment.config.get("searcher", {})
        self.started_at = None if is_from_now else experiment.created_at
        self._metric = experiment.metric
        self._time_metric: str | None = searcher.get("time_metric")
        self._max_time: float = searcher.get("max_time") or inf
        self._sign = 1.0 if experiment.smaller_is_better else -1.0
        self._is_single = experiment.searcher == "single"
        self._length = split_length(searcher.get("max_length"))
        self._trials: dict[int, _TrialView] = {}
        self._is_paused = False
        self._told_errors: set[str] = set()
        self._best = inf
        self._best_value: Any = None
        self.progress = experiment.progress
        # Time and progress at the beginning of the first trial that was seen, and now.
        self._paces = ((0.0, self.progress), (0.0, self.progress))
        self.best_trial_id: int | None = None

    def handle(self, event: "Event") -> Iterator[FeedLine]:
        """Process an event and yield the feed lines about the event."""
        if self.started_at is None:
            self.started_at = event.time
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            yield from handler(event, event.time - self.started_at)

    def adopt(self, trial: "TrialData") -> None:
        """Add a trial created before the first event."""
        view = self._trials.setdefault(trial.id, _TrialView())
        view.hparams, view.steps_completed = trial.hparams, trial.steps_completed
        view.num_attempts, view.is_running = trial.num_attempts, trial.is_running
        view.has_ended = view.is_announced = trial.state.is_terminal
        self._note_best(trial.id, decode_value(trial.best_metric))

    def has_told(self, error: str) -> bool:
        """Return whether an error's reason was in a line already."""
        return any(told in error for told in self._told_errors)

    def summary(self) -> str:
        """Return the experiment's progress as a single line."""
        trials = self._trials.values()
        num_ended = sum(trial.has_ended for trial in trials)
        num_running = sum(trial.is_running for trial in trials)
        parts = [f"{self.progress:4.0%}"]
        if (left_s := self._left_s()) is not None:
            parts.append(f"{format_duration(ceil(left_s))} left")
        if self._is_single:
            return " · ".join(parts)
        parts.append(f"{num_ended}/{len(trials)} ended")
        if num_running:
            parts.append(f"{num_running} running")
        if self.best_trial_id is not None:
            best = console.format_number(self._best_value)
            parts.append(f"best {self._metric} {best} (trial {self.best_trial_id})")
        return " · ".join(parts)

    def _left_s(self) -> float | None:
        """Return the seconds until the end, at the speed since the first trial began."""
        (began, before), (now, progress) = self._paces
        gained, seconds = progress - before, now - began
        is_known = gained > 0 and seconds > 0 and progress < 1
        return seconds * (1 - progress) / gained if is_known else None

    @property
    def is_running(self) -> bool:
        """Whether a trial runs."""
        return any(trial.is_running for trial in self._trials.values())

    def trial_ids(self) -> list[int]:
        """Return the ids of the trials seen so far."""
        return sorted(self._trials)

    def _trial(self, event: "Event") -> _TrialView:
        assert event.trial_id is not None
        return self._trials.setdefault(event.trial_id, _TrialView())

    def _name(self, event: "Event") -> str:
        return "" if self._is_single else f"trial {event.trial_id:<4} "

    def _on_trial_created(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        trial = self._trial(event)
        trial.hparams = event.data.get("hparams", {})
        name = f"trial {event.trial_id:<4} "
        yield FeedLine(
            seconds=seconds, text=f"{name}created   {console.format_values(trial.hparams)}".rstrip()
        )

    def _on_attempt_started(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        trial = self._trial(event)
        trial.is_running = True
        trial.num_attempts += 1
        self._note_pace(event.time)
        # Every trial starts once; only a second start is worth a line in a search.
        if self._is_single or trial.num_attempts > 1:
            numbers, num_nodes = event.data.get("slots", []), event.data.get("num_nodes", 1)
            slots = f"slot{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            if num_nodes > 1:
                slots = f"{num_nodes} nodes"
            elif event.data.get("node"):
                slots += f" of {event.data['node']}"
            number = event.data.get("number", trial.num_attempts)
            text = f"{self._name(event)}attempt {number} started on {slots}"
            yield FeedLine(seconds=seconds, text=text, style="dim")

    def _on_workers_restarted(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        text = f"{self._name(event)}workers started again: {event.data.get('cause')}"
        yield FeedLine(seconds=seconds, text=text, style="yellow")

    def _on_attempt_ended(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        self._trial(event).is_running = False
        end = event.data.get("exit") or {}
        code, signal = end.get("code"), end.get("signal")
        # A trial that was asked to leave or end does not fail by doing so.
        if end.get("outcome") in ("completed", "preempted", "invalid_hp") or not (code or signal):
            return
        if self._trial(event).is_announced:
            return
        how = f"signal {signal}" if signal else f"exit code {code}"
        said = end.get("error") or end.get("detail")
        self._told_errors.add(said or how)
        # First line only: the output shown above has the other lines of the error.
        detail = f": {said.partition(chr(10))[0]}" if said else ""
        number = event.data.get("number", self._trial(event).num_attempts)
        text = f"{self._name(event)}attempt {number} ended with {how}{detail}"
        yield FeedLine(seconds=seconds, text=text, style="red", failed_trial_id=event.trial_id)

    def _on_alert(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        data = event.data
        text = console.alert_text(data.get("title"), data.get("description"))
        style = _ALERT_STYLES.get(str(data.get("level")), "")
        yield FeedLine(seconds=seconds, text=f"{self._name(event)}alert: {text}", style=style)

    def _on_metrics(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        trial = self._trial(event)
        steps = int(event.data.get("steps_completed", 0))
        trial.steps_completed = max(trial.steps_completed, steps)
        group = event.data.get("group")
        is_of_chief = event.data.get("rank", 0) == 0
        if self._is_single and is_of_chief and group not in _UNSHOWN_GROUPS:
            metrics = event.data.get("metrics", {})
            text = f"{group} {self._reached(metrics, steps)}: {console.format_values(metrics)}"
            yield FeedLine(seconds=seconds, text=text, style="cyan")

    def _on_validation(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        trial = self._trial(event)
        metrics = decode_value(event.data.get("metrics", {}))
        steps = int(event.data.get("steps_completed", 0))
        trial.steps_completed = max(trial.steps_completed, steps)
        trial.place = self._place(metrics, steps)
        trial.has_trained_all = self._is_full_length(metrics)
        is_best = self._note_best(event.trial_id, metrics.get(self._metric))
        if self._is_single:
            text = f"validation {self._reached(metrics, steps)}: {console.format_values(metrics)}"
            yield FeedLine(seconds=seconds, text=text, style="bold cyan")
            return
        shown = {self._metric: metrics[self._metric]} if self._metric in metrics else {}
        rest = {k: v for k, v in metrics.items() if k not in (self._metric, self._time_metric)}
        text = f"{self._name(event)}{trial.place:<9} {console.format_values({**shown, **rest})}"
        if is_best:
            text += "  best"
        yield FeedLine(seconds=seconds, text=text, style="bold" if is_best else "")

    def _on_trial_state(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        trial = self._trial(event)
        state, reason = str(event.data.get("state")), event.data.get("reason")
        is_search = reason in (STOPPED_BY_SEARCH, FULLY_TRAINED)
        has_ended = state in _STATE_WORDS
        if state == "ACTIVE":
            trial.has_ended = trial.is_announced = False
        if has_ended:
            trial.has_ended, trial.is_running = True, False
        # Trials stopped by the search: the decision is the printed event; the exit comes later.
        if trial.is_announced or not (has_ended or is_search):
            return
        trial.is_announced = True
        where = f" at {trial.place}" if trial.place else ""
        word, style = _STATE_WORDS.get(state, ""), _STATE_STYLES.get(state, "")
        error = event.data.get("error")
        detail = error or (None if state == "COMPLETED" else reason)
        if error and self.has_told(error):
            detail = None
        text = f"{word:<9}{where}" + (f" ({detail})" if detail else "")
        if is_search and trial.has_trained_all:
            style, text = "green", f"completed{where}"
        elif reason == _INVALID_HP:
            style, text = "yellow", f"refused  {where} by its code (InvalidHP)"
        elif is_search:
            style, text = "yellow", f"stopped  {where} by the search"
        yield FeedLine(
            seconds=seconds, text=f"trial {event.trial_id:<4} {text}".rstrip(), style=style
        )

    def _on_checkpoint(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        if self._is_single:
            steps = event.data.get("steps_completed")
            text = f"checkpoint {event.data.get('uuid')} after batch {steps}"
            yield FeedLine(seconds=seconds, text=text, style="dim")

    def _on_progress(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        self.progress = float(event.data.get("progress") or 0.0)
        self._note_pace(event.time)
        yield from ()

    def _on_experiment_state(self, event: "Event", seconds: float) -> Iterator[FeedLine]:
        state = str(event.data.get("state"))
        was_paused, self._is_paused = self._is_paused, state == "PAUSED"
        if self._is_paused:
            text = f"paused; `paceline e activate {event.experiment_id}` goes on"
        elif state == "ACTIVE" and was_paused:
            text = "active again"
        elif state in _ENDING_WORDS:
            text = _ENDING_WORDS[state]
        else:
            return
        yield FeedLine(seconds=seconds, text=f"experiment {text}", style="bold")

    def _note_pace(self, now: float) -> None:
        first = self._paces[0] if self._paces[0][0] else (now, self.progress)
        self._paces = (first, (now, self.progress))

    def _place(self, metrics: dict[str, Any], steps: int) -> str:
        """Return the position of a trial: in the search's unit if reported, else in batches."""
        if self._time_metric is not None and self._time_metric in metrics:
            unit = _UNITS.get(self._time_metric, self._time_metric)
            return f"{unit} {console.format_number(metrics[self._time_metric])}"
        return f"batch {steps}"

    def _reached(self, metrics: dict[str, Any], steps: int) -> str:
        """Return the progress of the only trial, with its total length where known."""
        unit, length = self._length or ("", 0)
        if unit == "batches":
            return f"after batch {steps} of {length}"
        more = f", {metrics[unit]} of {length} {unit}" if unit in metrics else ""
        return f"after batch {steps}{more}"

    def _is_full_length(self, metrics: dict[str, Any]) -> bool:
        time = metrics.get(self._time_metric or "")
        return isinstance(time, (int, float)) and time >= self._max_time

    def _note_best(self, trial_id: int | None, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            return False
        if self._sign * value >= self._best:
            return False
        self._best, self._best_value, self.best_trial_id = self._sign * value, value, trial_id
        return True
