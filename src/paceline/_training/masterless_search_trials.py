"""Journal and setup of a search without a master, and threads that run its trials.

Progress of a search without a master: trials, their best value, time left, end.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paceline import faults
from paceline._base.journal_records import RunMetadataSet, SearchInputTaken, encode_metrics
from paceline._base.progress_display import TrainingProgress
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._training.masterless_search import (
    MetricMissingError,
    NextMove,
    SearchRun,
    SearchTrial,
    TrialOutcome,
    trial_exit_reason,
)
from paceline.config._fields_and_problems import ConfigError
from paceline.config._searcher_section import BATCHES, Searcher
from paceline.config._validate_config import validate_config
from paceline.core._arguments import Outcome
from paceline.core._attempt_journal import begin_journal, end_journal, outcome_of
from paceline.core._run_opening import RESUME_VARIABLE, OpenedRun, open_run, run_name
from paceline.core._train_context import RunFeedback, ending_of
from paceline.search import _search_messages as messages
from paceline.search._hyperparameter_space import Space, parse_space
from paceline.search._sampler_program import SamplerProgram
from paceline.search._samplers import (
    Observation,
    SamplerSpec,
    answers_to,
    check_installed,
    recalled_from,
)
from paceline.search._search import Search

if TYPE_CHECKING:
    from paceline._training.masterless_search import SearchStanding

logger = logging.getLogger(__name__)


_search_numbers = count(1)


def search_name() -> str:
    """Return the name of the script's searches; runs of the script itself have its name alone."""
    name = run_name()
    return f"{name}-{'trials' if name.endswith('search') else 'search'}"


def _search_to_resume(name: str) -> Path | None:
    """Return the directory that PACELINE_RESUME names, if it has a search of this name.

    The directory belongs to the first search of the process that has none: a later one may try
    another function.
    """
    if next(_search_numbers) > 1:
        return None
    path = Path(os.environ.get(RESUME_VARIABLE) or "auto")
    names = (name, f"{run_name()}-search")  # The second is that of 0.1.0.
    is_search = (path / "run.json").exists() and RunDirectory(path).read_info().name in names
    return path.absolute() if is_search else None


class SearchJournal:
    """Run directory of a search, with the inputs of the search as its journal.

    Args:
        directory: The directory, for a new search or to resume one; a new one below
            ``./paceline_runs`` by default.
        setup: The arguments of the search. An earlier search must have the same.
        seed: The seed of a new search; drawn by default.

    Raises:
        RuntimeError: Another process works on the search.
        ValueError: The directory has a search with another setup.
    """

    def __init__(self, directory: Path | None, setup: Mapping[str, Any], seed: int | None) -> None:
        self._lock = ExitStack()
        name = search_name()
        self._opened = opened = open_run(
            name=name,
            directory=_search_to_resume(name) if directory is None else directory,
            seed=seed,
            hparams=setup["space"],
            is_resumable=False,
            lock=self._lock,
        )
        self._run = RunDirectory(opened.path)
        try:
            self._check_same(setup)
        except BaseException:
            self._lock.close()
            raise
        self.journal = begin_journal(self._run, opened)
        self.journal.append(RunMetadataSet(time=time.time(), metadata=dict(setup)))

    @property
    def path(self) -> Path:
        """The directory."""
        return self._opened.path

    @property
    def opened(self) -> OpenedRun:
        """The run of the search."""
        return self._opened

    @property
    def seed(self) -> int:
        """The seed of the search."""
        return self._opened.seed

    def earlier(self) -> Iterator[SearchInputTaken]:
        """Yield the inputs of earlier attempts."""
        for record in self._records():
            if isinstance(record, SearchInputTaken):
                yield record

    def add(
        self, given: messages.Input, number: int = 0, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Append an input; the entry survives a kill of this process."""
        self.journal.append(
            SearchInputTaken(
                time=time.time(),
                input=msgspec.json.decode(messages.message_to_json(given)),
                number=number,
                metrics=None if metrics is None else encode_metrics(dict(metrics)),
            )
        )
        if faults.is_active():
            faults.reach("train.search.input")

    def close(self, error: BaseException | None) -> None:
        """Record the end."""
        # After Ctrl-C it can resume, as its trials can.
        is_interrupted = isinstance(error, KeyboardInterrupt)
        outcome = Outcome.PREEMPTED if is_interrupted else outcome_of(error)
        end_journal(self.journal, outcome, error)
        self._lock.close()

    def _records(self) -> Iterator[Any]:
        for attempt in range(self._opened.attempt):
            for entry in self._run.reader(JournalKey(attempt, 0, 0)):
                yield entry.decode()

    def _check_same(self, setup: Mapping[str, Any]) -> None:
        stored = next((r.metadata for r in self._records() if isinstance(r, RunMetadataSet)), None)
        if self._opened.attempt and stored is None:
            raise ValueError(
                f"`directory` must be new or that of a search, but {str(self.path)!r} has another"
                " run."
            )
        for name, value in setup.items():
            if stored is not None and stored.get(name) != value:
                raise ValueError(
                    f"A search must go on with the same `{name}`, which is {stored.get(name)!r} in"
                    f" {str(self.path)!r}, but got {value!r}. Hint: another `directory` for a new"
                    " search."
                )


_LONGEST_CONFIG = 200
_SPACE_SECTION = "hyperparameters"


class SearchProgress:
    """Display of a search, for the thread that waits for the trials.

    Args:
        feedback: The lines of the search's run.
        metric: The searched metric.
        num_at_once: How many trials run at once.
    """

    def __init__(self, feedback: RunFeedback, metric: str, num_at_once: int) -> None:
        self._feedback, self._metric = feedback, metric
        self._num_at_once = num_at_once
        self._progress = TrainingProgress(None, "trials", is_quiet=feedback.is_quiet)
        self._told: tuple[int, float | None] = (0, None)
        self._began, self._first = time.monotonic(), 0.0
        self._is_moving = False
        self._best = self._failed = ""

    def begin(self, run: "SearchRun", more: str) -> None:
        """Show where the search begins."""
        standing = run.standing()
        at_once = f", {self._num_at_once} at once" if self._num_at_once > 1 else ""
        self._feedback.begin(f"search of {standing.num_trials} trial(s){at_once}", more)
        self._told = (standing.num_ended, standing.best_value)
        self._began, self._first = time.monotonic(), standing.fraction
        self._progress.start(standing.fraction * standing.num_trials, epoch=standing.num_ended)

    def update(self, run: "SearchRun") -> None:
        """Show how far the search is."""
        self._show(run.standing())

    def end(self, run: "SearchRun", error: BaseException | None) -> None:
        """Show how the search has ended, its best trial, and how to continue."""
        self._show(run.standing())
        ending, directory = ending_of(error), str(run.directory)
        resume = f"the same call with directory={directory!r}"
        details = self._feedback.details(ending, None, None, resume)
        self._progress.end(ending, *filter(None, (self._best, self._failed)), *details)

    def _show(self, standing: "SearchStanding") -> None:
        self._progress.expect(standing.num_trials)
        done, best = standing.fraction * standing.num_trials, standing.best_value
        if not self._is_moving and standing.fraction > self._first:
            # The start of workers says nothing about the time that is left.
            self._is_moving = True
            self._progress.start(done, epoch=standing.num_ended, began=self._began)
        metrics: Mapping[str, Any] = {} if best is None else {f"best_{self._metric}": best}
        self._progress.update(done, 0, metrics, epoch=standing.num_ended)
        num_failed = len(standing.failed)
        failed = f", {num_failed} failed" if num_failed else ""
        self._progress.note(f"{standing.num_running} running{failed}")
        if num_failed:
            numbers = ", ".join(map(str, standing.failed))
            told = f"failed: {num_failed} of {standing.num_trials} trials ({numbers})"
            self._failed = told[:_LONGEST_CONFIG]
        if best is not None:
            config = ", ".join(f"{name}={value}" for name, value in standing.best_config.items())
            told = f"best trial {standing.best_number}: {config}"
            if standing.front:
                told = f"Pareto front: trials {', '.join(map(str, standing.front))}"
            self._best = told[:_LONGEST_CONFIG]
        news = (standing.num_ended, best)
        if news != self._told:
            self._told = news
            self._progress.report(metrics)


def checked_search(space: Mapping[str, Any], searcher: Any) -> Any:
    """Return an experiment config with the space and the search method, after its checks.

    Raises:
        ConfigError: They are not valid; problems of the space are named as its own.
    """
    section: Any = searcher
    if isinstance(searcher, Searcher):
        # Stand-in section: the method of a `Searcher` object need not be registered.
        section = {"name": "single", "metric": searcher.metric}
    config = {
        "entrypoint": "train_func",
        "searcher": dict(section) if isinstance(section, Mapping) else section,
        _SPACE_SECTION: dict(space) if isinstance(space, Mapping) else space,
    }
    try:
        checked = validate_config(config)
    except ConfigError as error:
        raise ConfigError(
            replace(problem, path=f"space{problem.path.removeprefix(_SPACE_SECTION)}")
            if problem.path.startswith(_SPACE_SECTION)
            else problem
            for problem in error.problems
        ) from None
    refuse_without_master(searcher if isinstance(searcher, Searcher) else checked.searcher)
    lists = [name for name, value in space.items() if isinstance(value, list)]
    if lists and not any(isinstance(value, Mapping) for value in space.values()):
        logger.warning(
            "Nothing varies in `space`: a list, such as that of %r, is one value that each trial"
            ' gets. Hint: {"type": "categorical", "vals": [...]} has trials with each of them.',
            lists[0],
        )
    if isinstance(searcher, Searcher):
        checked = checked.model_copy(update={"searcher": searcher})
    return checked


def refuse_without_master(searcher: Searcher) -> None:
    """Refuse a method, or a limit, that needs a master.

    Raises:
        ValueError: There is one.
    """
    if searcher.clones_trials:
        raise ValueError(
            f"The search method `{searcher.name}` must run under a master, which keeps the"
            " checkpoints that it copies.\nHint: `trainer.to_tune_trainable` runs population based"
            " training of Ray Tune."
        )
    if searcher.limits is not None and searcher.limits.max_slot_hours is not None:
        raise ValueError(
            "`limits.max_slot_hours` must not be given without a master, which has the slots, but"
            f" got {searcher.limits.max_slot_hours:g}.\nHint: `max_wall_time` limits the time."
        )


def search_journal(chosen: Any, directory: Path | None, seed: int | None) -> SearchJournal:
    """Return the journal of a search, new or of earlier attempts.

    Args:
        chosen: What `checked_search` has returned.
        directory: See `SearchJournal`, as for the seed.
        seed: See there.
    """
    setup = {"searcher": chosen.searcher.model_dump(mode="json"), "space": chosen.hyperparameters}
    # Journals of earlier versions lack them.
    for name in ("sampler", "points_to_evaluate", "limits", "warm_start_from"):
        if not setup["searcher"][name]:
            del setup["searcher"][name]
    return SearchJournal(directory, setup, seed)


def begun_search(
    chosen: Any,
    journal: SearchJournal,
    config: Mapping[str, Any],
    make_result: Callable[..., TrialOutcome],
    stack: ExitStack,
) -> SearchRun:
    """Return a search, started anew or replayed from its journal.

    Args:
        chosen: What `checked_search` has returned.
        journal: Its journal.
        config: The part of each trial's config besides its hyperparameters.
        make_result: See `SearchRun`.
        stack: Ends the process of the sampler.

    Raises:
        ImportError: The package of the sampler is not installed.
    """
    searcher = chosen.searcher
    wants_reports = searcher.wants_reports
    run = SearchRun(
        Search(
            chosen.search_config(),
            chosen.hyperparameters,
            journal.seed,
            is_asking=searcher.is_asking,
        ),
        journal,
        metrics=searcher.metrics,
        time_name=searcher.time_name if wants_reports else str(searcher.length_unit),
        smaller_is_better=searcher.smaller_is_better,
        length=searcher.length,
        can_extend=wants_reports,
        is_single=searcher.name == "single",
        config=config,
        make_result=make_result,
        answer=_answering(chosen, journal.seed, stack),
        first_inputs=_first_inputs(chosen),
    )
    run.begin()
    return run


def _first_inputs(chosen: Any) -> list[messages.Input]:
    searcher, space = chosen.searcher, parse_space(chosen.hyperparameters)
    given: list[messages.Input] = [
        recalled_from(str(path), space, searcher.metric) for path in searcher.warm_start_from
    ]
    return given if searcher.limits is None else [*given, searcher.limits.as_input()]


def _answering(chosen: Any, seed: int, stack: ExitStack) -> Callable[..., messages.Proposed]:
    spec: SamplerSpec = chosen.searcher.sampler_spec()
    ask: SamplerProgram | None = None
    if spec.name != "random":
        check_installed(spec, takes_places=True)
        ask = SamplerProgram(spec, chosen.hyperparameters, seed, os.getcwd())
        stack.callback(ask.close)

    points = chosen.searcher.points_to_evaluate

    def answer(
        space: Space, asks: Sequence[messages.Create], seen: list[Observation]
    ) -> messages.Proposed:
        [found] = answers_to(space, asks, seen, ask, spec.shown, points)
        if found.is_fallback:
            logger.warning("A trial is drawn at random: %s", found.why)
        return found

    return answer


# How often the main thread looks for Ctrl-C, in seconds.
_LOOK_S = 0.2


class StepwiseTrial(Protocol):
    """Running trial as an iterator of reports: the trial waits after each report.

    A report is a mapping. It has a `number` and a `step`, and `validation` says which metrics the
    search judges: all, nothing, or these metrics.
    """

    def __next__(self) -> Any:
        """Let the trial continue, and return its next report."""

    def get_results(self) -> Any:
        """Wait for the end of the trial; raise the error of a failed trial."""

    def stop(self) -> None:
        """End the trial at its present report."""


class TrialThread(threading.Thread):
    """Thread to run trials in sequence.

    Args:
        search: Hands out trials and judges their reports.
        start: Starts a trial on the workers of this thread.

    Attributes:
        failure: The error that has ended the whole search.
    """

    def __init__(self, search: SearchRun, start: Callable[[SearchTrial], StepwiseTrial]) -> None:
        super().__init__(name="paceline-search", daemon=True)
        self.failure: BaseException | None = None
        self._search = search
        self._start_trial = start

    def run(self) -> None:
        """Run trials until there are none left."""
        try:
            while (trial := self._search.next_trial()) is not None:
                self._run_trial(trial)
        except BaseException as error:
            # An error of the search itself; errors of trials are its inputs.
            self.failure = error
            self._search.close()

    def _run_trial(self, trial: SearchTrial) -> None:
        try:
            run = self._start_trial(trial)
        except Exception as error:
            self._fail(trial, error)
            return
        while True:
            try:
                report = next(run, None)
                if report is None:
                    run.get_results()
                    self._search.check_metric(trial)
                else:
                    self._search.check_report(trial, _judged_metrics(report))
            except MetricMissingError:
                # Missing metric ends the whole search: other trials would train in vain as well.
                run.stop()
                raise
            except Exception as error:
                run.stop()
                self._fail(trial, error)
                return
            move = (
                NextMove.END
                if report is None
                else self._search.take_report(trial, report.number, report, _judged_metrics(report))
            )
            if move is not NextMove.GO_ON:
                break
        run.stop()
        if move is NextMove.PAUSE:
            self._search.pause(trial)
        else:
            self._search.end(trial, messages.ExitReason.COMPLETED, None)

    def _fail(self, trial: SearchTrial, error: Exception) -> None:
        if self._search.is_closed:
            # Closed search: the workers may have ended with it, so this is no failure of the trial.
            return
        told = error.__cause__ or error
        logger.warning("Trial %d has failed: %s", trial.result.number, told)
        self._search.end(trial, trial_exit_reason(error), error)


def _judged_metrics(report: Any) -> Any:
    validation = report.validation
    judged = (report if validation else {}) if isinstance(validation, bool) else validation
    # Without a metric of that name, batches are those that were trained.
    return {BATCHES: report.step, **judged} if judged else {}


def conduct(
    run: SearchRun,
    starts: Sequence[Callable[[SearchTrial], StepwiseTrial]],
    progress: SearchProgress,
) -> None:
    """Run trials until the search is over, in a thread for each of the given start functions.

    Raises:
        Exception: The search itself has failed; failures of trials are its inputs.
    """
    threads = [TrialThread(run, start) for start in starts]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                run.spend()
                progress.update(run)
    except KeyboardInterrupt:
        run.close()
        logger.warning(
            "Ctrl-C: the search ends once its trials have come to their next reports. Ctrl-C again"
            " ends it now. Hint: directory=%r goes on with it later.",
            str(run.directory),
        )
        # Another one, at any moment from the message on, leaves this wait.
        for thread in threads:
            thread.join()
        raise
    finally:
        run.close()
    failure = next((thread.failure for thread in threads if thread.failure is not None), None)
    if failure is not None:
        raise failure
