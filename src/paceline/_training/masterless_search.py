"""Search without a master: trials waiting, running, pausing and ending, and outcomes."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline import core, faults
from paceline._base.journal_records import SearchInputTaken, decode_value, encode_metrics
from paceline.search import _search_messages as messages
from paceline.search._hyperparameter_space import Space
from paceline.search._samplers import Observation
from paceline.search._search import Search
from paceline.search._search_state import SPENT_INTERVAL_S

if TYPE_CHECKING:
    from paceline._training.masterless_search_trials import SearchJournal

logger = logging.getLogger(__name__)

faults.register("train.search.input")


@dataclass(slots=True, kw_only=True)
class TrialOutcome:
    """Outcome of a trial of a search.

    Attributes:
        number: Its number, from 1, in the order in which the search has created trials.
        config: The argument of the function.
        run_dir: Its run directory.
        state: "waiting", "running", "paused", "stopped" by the search, "completed", "failed",
            "diverged", if its loss was not finite (`NonFiniteError`),
            "invalid", if the function has refused its hyperparameters, or "canceled".
        value: The best value of the searched metric that it has reported; None before the first.
            With several objectives, that of the first one in `values`.
        values: With several objectives, the values of all at its newest report that no other report
            of it dominates; empty before the first one in which all are finite.
        metrics: Its last report.
        num_reports: How many reports it has made.
        time: How long it has trained, in units of the search's time metric.
        error: The exception that has ended it, for a failed trial of this process.
    """

    number: int
    config: dict[str, Any]
    run_dir: Path
    state: str = "waiting"
    value: float | None = None
    values: tuple[float, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    num_reports: int = 0
    time: float = 0.0
    error: BaseException | None = None


TRIALS_FOLDER = "trials"
_STATES = {
    messages.ExitReason.COMPLETED: "completed",
    messages.ExitReason.ERROR: "failed",
    messages.ExitReason.CANCELED: "canceled",
    messages.ExitReason.INVALID_HP: "invalid",
}


# Reports of a trial until a search without any value ends, as in a search of a master.
_MOST_UNMEASURED = 3


class MetricMissingError(ValueError):
    """Raised when a search ends as none of its trials has reported the searched metric."""


class NextMove(Enum):
    """Next action of a trial after a report."""

    GO_ON = "go on"
    PAUSE = "pause"
    """Its workers are for others, and it resumes later from its checkpoint."""
    END = "end"


@dataclass(slots=True, kw_only=True)
class SearchTrial:
    """Trial with its state shared by the search and the threads.

    Attributes:
        create: How the search has created it.
        result: Its public result.
        target: The length to which it is to train next, None if the search does not say.
        is_stopped: Whether the search wants no more reports.
        exit_reason: Why it has ended; None before.
        known: Encoded metrics by the number of their report, for a run that repeats some.
    """

    create: messages.Create
    result: TrialOutcome
    target: int | None = None
    is_stopped: bool = False
    exit_reason: messages.ExitReason | None = None
    known: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStanding:
    """Standing of a search at a moment.

    `fraction` is the completed part of the search; `best_value` is None before the first value;
    `failed` has the numbers of trials that have failed or diverged; `front` those of the best
    trials of a search of several objectives.
    """

    fraction: float
    num_trials: int
    num_ended: int
    num_running: int
    failed: tuple[int, ...] = ()
    best_value: float | None = None
    best_number: int = 0
    best_config: Mapping[str, Any] = field(default_factory=dict)
    front: tuple[int, ...] = ()


@dataclass(eq=False, repr=False)
class SearchRun:
    """Apply the events of trials to a search, and hand out the trials to run.

    Its methods may be called from several threads.

    Args:
        search: The search, new.
        journal: Gets all inputs, and replays the inputs of earlier attempts.
        metrics: The searched metric, or those of several objectives.
        time_name: The metric for how long a trial has trained.
        smaller_is_better: Whether smaller values of the metric are better.
        length: How long trials train at most; None if the search does not say.
        can_extend: Whether the search may extend trials that have trained to their length.
        is_single: Whether there is one trial only, which needs no metric to be chosen by.
        config: The part of each trial's config besides its hyperparameters.
        make_result: Makes a trial's public result: a subclass of `TrialOutcome`.
        answer: Returns an answer to the oldest of the search's asks, when a trial is to begin. It
            gets the space, the ask and the observations, and is called without the lock.
        first_inputs: Inputs of a new search before it starts.
    """

    search: Search
    journal: "SearchJournal"
    _: KW_ONLY
    make_result: Callable[..., TrialOutcome]
    metrics: Sequence[str]
    time_name: str
    smaller_is_better: bool
    length: int | None
    can_extend: bool
    is_single: bool
    config: Mapping[str, Any]
    answer: Callable[[Space, Sequence[messages.Create], list[Observation]], messages.Proposed]
    first_inputs: Sequence[messages.Input] = ()

    def __post_init__(self) -> None:
        self.trials: dict[str, SearchTrial] = {}
        # Seconds before this process, and its clock at the beginning; None while it replays.
        self._wall_before_s = 0.0
        self._since: float | None = None
        self._ready: deque[SearchTrial] = deque()
        self._running: dict[str, SearchTrial] = {}
        self._paused: dict[str, SearchTrial] = {}
        # Ids of the paused trials with their workers still held.
        self._holding: set[str] = set()
        self._changed = threading.Condition()
        # Threads without a trial.
        self._num_idle = 0
        self._is_closed = False
        self._is_asking = False
        self._num_invalid_in_a_row = 0

    @property
    def directory(self) -> Path:
        """Where the search and its trials are."""
        return self.journal.path

    @property
    def is_closed(self) -> bool:
        """Whether the search is given up for now."""
        return self._is_closed

    def standing(self) -> SearchStanding:
        """Return how far the search is, and its best trial."""
        with self._changed:
            results = [trial.result for trial in self.trials.values()]
            values = [r for r in results if r.value is not None and math.isfinite(r.value)]
            sign = 1 if self.smaller_is_better else -1
            best = min(values, key=lambda result: sign * (result.value or 0.0), default=None)
            return SearchStanding(
                fraction=self.search.progress(),
                num_trials=max(self.search.num_trials(), len(results)),
                num_ended=sum(t.exit_reason is not None for t in self.trials.values()),
                num_running=len(self._running),
                failed=tuple(r.number for r in results if r.state in ("failed", "diverged")),
                best_value=None if best is None else best.value,
                front=tuple(trial.result.number for trial in self._front()),
                best_number=0 if best is None else best.number,
                best_config={} if best is None else best.config,
            )

    def begin(self) -> None:
        """Replay earlier inputs, or start the search."""
        with self._changed:
            earlier = list(self.journal.earlier())
            for record in earlier:
                self._replay(record)
            if not earlier:
                for given in self.first_inputs:
                    self._take_input(given)
                self._take_input(messages.Started())
            self._wall_before_s, self._since = self.search.budget.wall_s, time.monotonic()
            for trial in list(self.trials.values()):
                if trial.exit_reason is not None:
                    continue
                is_at_target = self._is_at_target(trial)
                if trial.is_stopped or (is_at_target and not self.can_extend):
                    self._exit(trial, messages.ExitReason.COMPLETED)
                elif is_at_target:
                    self._ready.remove(trial)
                    trial.result.state = "paused"
                    self._paused[trial.create.request_id] = trial

    def close(self) -> None:
        """Have the threads end, as the search is given up for now."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def spend(self) -> None:
        """Tell the search the time that it has taken, if it has a limit of time."""
        with self._changed:
            used, limit = self.search.budget.wall_s, self.search.budget.limits.max_wall_time
            if limit is None or self._since is None or used >= limit or self.search.is_over:
                return
            wall_s = self._wall_before_s + time.monotonic() - self._since
            if wall_s >= limit or wall_s >= used + SPENT_INTERVAL_S:
                self._take_input(messages.Spent(wall_s=wall_s))

    # ---- called by the threads that run trials -------------------------------------------

    def next_trial(self) -> SearchTrial | None:
        """Wait for the next trial to run; None at the end of the search."""
        with self._changed:
            while not self.search.is_over and not self._is_closed:
                if self._ready:
                    trial = self._ready.popleft()
                    self._running[trial.create.request_id] = trial
                    trial.result.state = "running"
                    return trial
                if self.search.asks and not self._is_asking:
                    self._have_answered()
                    continue
                if self._is_stuck():
                    self._give_up_waiting()
                    continue
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            return None

    def _have_answered(self) -> None:
        """Have the sampler answer without the lock: it may think for long, or hang."""
        question = self.search.space, self.search.asks[:1], self.search.observations()
        self._is_asking = True
        self._changed.release()
        try:
            answer = self.answer(*question)
        finally:
            self._changed.acquire()
            self._is_asking = False
        if not self._is_closed:
            self._take_input(answer)

    def take_report(
        self, trial: SearchTrial, number: int, metrics: Mapping[str, Any], judged: Mapping[str, Any]
    ) -> NextMove:
        """Give a report to the search, wait for its decision, and return the trial's next move.

        Args:
            trial: The trial that reports.
            number: The number of the report.
            metrics: The report.
            judged: The metrics that the search judges.
        """
        with self._changed:
            given = self._input_of(trial, judged)
            if given is not None:
                self.journal.add(given, number, metrics)
            self._note_report(trial, number, dict(metrics), given)
            if given is not None:
                self._apply(given)
            return self._next_move(trial)

    def check_report(self, trial: SearchTrial, judged: Mapping[str, Any]) -> None:
        """Check the searched metric of a report.

        Raises:
            TypeError: The searched metric is no number.
            MetricMissingError: The third report of the trial lacks the metric as the others did,
                and no other trial has reported the metric.
        """
        is_due = bool(judged) and trial.result.num_reports + 1 >= _MOST_UNMEASURED
        is_missing = any(name not in judged for name in self.metrics)
        if is_due and is_missing and not self.is_single and not self._has_value():
            raise MetricMissingError(self._missing_metric(trial, judged))
        for name in self.metrics:
            value = judged.get(name, 0)
            if _metric_number(value) is None:
                raise TypeError(
                    f"The metric {name!r} must be a number, as the search goes by it, but trial"
                    f" {trial.result.number} reported {value!r}. Hint: report a float, or set"
                    " `metric` of the searcher to another name."
                )

    def check_metric(self, trial: SearchTrial) -> None:
        """Check a normally ended trial for the searched metric in its reports.

        Raises:
            MetricMissingError: No report of this trial or another had the metric.
            ValueError: None of its reports had the metric.
        """
        result = trial.result
        # A function without reports is welcome to any search that judges none.
        if result.value is not None or not (result.num_reports or self.can_extend):
            return
        problem = self._missing_metric(trial, result.metrics)
        if self.is_single:
            logger.warning(problem)
            return
        raise (ValueError if self._has_value() else MetricMissingError)(problem)

    def end(
        self, trial: SearchTrial, reason: messages.ExitReason, error: BaseException | None
    ) -> None:
        """Record the end of a trial.

        Raises:
            ValueError: Too many trials in a row have refused their hyperparameters.
        """
        with self._changed:
            trial.result.error = error
            self._running.pop(trial.create.request_id, None)
            self._exit(trial, reason)
            if isinstance(error, core.NonFiniteError):
                trial.result.state = "diverged"
            is_invalid = reason is messages.ExitReason.INVALID_HP
            if is_invalid and self._num_invalid_in_a_row >= Search.max_invalid_in_a_row:
                raise ValueError(
                    f"{self._num_invalid_in_a_row} trials in a row refused their hyperparameters"
                    " (InvalidHP). Hint: narrow the ranges of the space, or look at the condition"
                    " that raises it."
                ) from error

    def pause(self, trial: SearchTrial) -> None:
        """Record the pause of a trial after the release of its workers."""
        with self._changed:
            request_id = trial.create.request_id
            self._running.pop(request_id, None)
            trial.result.state = "paused"
            self._paused[request_id] = trial
            self._reopen(trial)
            self._changed.notify_all()

    # ---- deciding; with the lock held ----------------------------------------------------

    def _next_move(self, trial: SearchTrial) -> NextMove:
        request_id = trial.create.request_id
        while not self._is_closed:
            if trial.is_stopped or trial.exit_reason is not None:
                return NextMove.END
            if not self._is_at_target(trial):
                return NextMove.GO_ON
            if not self.can_extend:
                return NextMove.END
            # More ready trials than idle threads: this thread's workers are needed for them.
            if len(self._ready) + len(self.search.asks) > self._num_idle:
                return NextMove.PAUSE
            # Nobody needs the workers yet, so it keeps them.
            self._running.pop(request_id, None)
            self._paused[request_id] = trial
            self._holding.add(request_id)
            trial.result.state = "paused"
            if self._is_stuck():
                self._give_up_waiting()
            else:
                self._changed.notify_all()
                self._changed.wait()
            self._holding.discard(request_id)
            self._paused.pop(request_id, None)
            if trial.exit_reason is None:
                self._running[request_id] = trial
                trial.result.state = "running"
        return NextMove.PAUSE

    def _is_at_target(self, trial: SearchTrial) -> bool:
        # A method that is given no length asks for one unit, which means nothing then.
        has_target = trial.target is not None and (self.length is not None or self.can_extend)
        return has_target and trial.result.time >= (trial.target or 0)

    def _is_stuck(self) -> bool:
        """Tell whether nothing happens any more by itself: all trials wait for the search."""
        is_idle = not self._ready and not self._running and not self.search.asks
        return is_idle and bool(self._paused)

    def _give_up_waiting(self) -> None:
        """End the longest-waiting trial: no decision of the search can come any more."""
        trial = next(iter(self._paused.values()))
        del self._paused[trial.create.request_id]
        self._exit(trial, messages.ExitReason.COMPLETED)

    def _exit(self, trial: SearchTrial, reason: messages.ExitReason) -> None:
        if trial.exit_reason is None:
            self._take_input(messages.Exited(request_id=trial.create.request_id, reason=reason))

    def _reopen(self, trial: SearchTrial) -> None:
        """Requeue a paused trial if its target was raised, or end a stopped trial."""
        request_id = trial.create.request_id
        if request_id not in self._paused or request_id in self._holding:
            return
        if trial.is_stopped:
            del self._paused[request_id]
            self._exit(trial, messages.ExitReason.COMPLETED)
        elif not self._is_at_target(trial):
            del self._paused[request_id]
            trial.result.state = "waiting"
            self._ready.append(trial)

    # ---- inputs --------------------------------------------------------------------------

    def _take_input(self, given: messages.Input) -> None:
        self.journal.add(given)
        self._apply(given)

    def _replay(self, record: SearchInputTaken) -> None:
        given = messages.input_from_json(msgspec.json.encode(record.input))
        if isinstance(given, messages.Reported) and record.metrics is not None:
            trial = self.trials[given.request_id]
            self._note_report(trial, record.number, decode_value(record.metrics), given)
        self._apply(given)

    def _apply(self, given: messages.Input) -> None:
        operations = self.search.apply(given)
        if isinstance(given, messages.Reported) and given.others:
            result = self.trials[given.request_id].result
            result.values = self.search.values_of(given.request_id)
            result.value = next(iter(result.values), math.nan)
        if isinstance(given, messages.Exited):
            trial = self.trials[given.request_id]
            trial.exit_reason = given.reason
            is_invalid = given.reason is messages.ExitReason.INVALID_HP
            self._num_invalid_in_a_row = self._num_invalid_in_a_row + 1 if is_invalid else 0
            state = _STATES[given.reason]
            is_early = self.length is not None and trial.result.time < self.length
            is_stopped = trial.is_stopped and given.reason is messages.ExitReason.COMPLETED
            trial.result.state = "stopped" if is_stopped and is_early else state
            if trial in self._ready:
                self._ready.remove(trial)
        for operation in operations:
            self._carry_out(operation)
        self._changed.notify_all()

    def _carry_out(self, operation: messages.Operation) -> None:
        if isinstance(operation, messages.Create):
            number = len(self.trials) + 1
            result = self.make_result(
                number=number,
                config={**self.config, **operation.hparams},
                run_dir=self.journal.path / TRIALS_FOLDER / f"{number:04}",
            )
            trial = SearchTrial(create=operation, result=result)
            self.trials[operation.request_id] = trial
            self._ready.append(trial)
        elif isinstance(operation, messages.Train):
            trial = self.trials[operation.request_id]
            trial.target = operation.length
            self._reopen(trial)
        elif isinstance(operation, messages.Stop):
            trial = self.trials[operation.request_id]
            trial.is_stopped = True
            self._reopen(trial)
            if self._since is not None and trial in self._ready:
                # A limit stops trials that have not begun as well.
                self._ready.remove(trial)
                self._exit(trial, messages.ExitReason.COMPLETED)

    def _has_value(self) -> bool:
        return any(each.result.value is not None for each in self.trials.values())

    def front(self) -> list[TrialOutcome]:
        """Return the trials of a search of several objectives that no other trial dominates."""
        with self._changed:
            return [trial.result for trial in self._front()]

    def _front(self) -> list[SearchTrial]:
        return [self.trials[request_id] for request_id, _ in self.search.front()]

    def _missing_metric(self, trial: SearchTrial, newest: Mapping[str, Any]) -> str:
        needed = " and ".join(f"`{name}`" for name in self.metrics if name not in newest)
        needed = needed or "its metric"
        return (
            f"The search needs {needed} as a number in the reports, but no report of trial"
            f" {trial.result.number} had it (the last one had: {', '.join(newest) or 'nothing'})."
            " Hint: report it, or set `metric` of the searcher to what is reported."
        )

    def _input_of(self, trial: SearchTrial, metrics: Mapping[str, Any]) -> messages.Reported | None:
        """Return the search input for a report; None without the searched metric."""
        values = [_metric_number(metrics.get(name)) for name in self.metrics]
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            return None
        time = _metric_number(metrics.get(self.time_name))
        if time is None or not math.isfinite(time):
            # Without such a metric the reports count.
            time = float(trial.result.num_reports + 1)
        request_id, (metric, *others) = trial.create.request_id, found
        return messages.Reported(
            request_id=request_id, time=time, metric=metric, others=tuple(others)
        )

    def _note_report(
        self,
        trial: SearchTrial,
        number: int,
        metrics: dict[str, Any],
        given: messages.Reported | None,
    ) -> None:
        result = trial.result
        trial.known[number] = encode_metrics(metrics)
        result.metrics = metrics
        result.num_reports += 1
        if given is None:
            return
        result.time = given.time
        sign = 1 if self.smaller_is_better else -1
        best, new = result.value, given.metric
        is_first = best is None or not math.isfinite(best)
        if is_first or (math.isfinite(new) and sign * new < sign * (best or 0.0)):
            result.value = new


def trial_exit_reason(error: BaseException) -> messages.ExitReason:
    """Return the exit reason for the exception raised by a trial."""
    return (
        messages.ExitReason.INVALID_HP
        if isinstance(error, core.InvalidHP)
        else messages.ExitReason.ERROR
    )


def _metric_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None
