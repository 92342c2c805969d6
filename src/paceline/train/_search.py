"""Search over a train function in this process, and its results."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline import core
from paceline._base.imports import DataFrames, html_table, text_table
from paceline._training.masterless_search import TRIALS_FOLDER, SearchRun, SearchTrial, TrialOutcome
from paceline._training.masterless_search_trials import (
    SearchProgress,
    StepwiseTrial,
    begun_search,
    checked_search,
    conduct,
    search_journal,
)
from paceline._training.workers.ray.cluster import RayConnection
from paceline.core._run_opening import local_directory
from paceline.core._train_context import RunFeedback
from paceline.storage._checkpoint_errors import CheckpointNotFoundError
from paceline.train._run_protocol import Checkpoint
from paceline.train._trainer import Trainer
from paceline.train._trainer_arguments import CheckpointStrategy, check_train_function

if TYPE_CHECKING:
    from paceline.config._searcher_section import Searcher


_HEADER = ("trial", "state", "reports")


@dataclass(slots=True, kw_only=True)
class TrialResult(TrialOutcome):
    """Result of a trial in a search.

    It has `number`, `config`, `run_dir`, `state`, `value`, `metrics`, `num_reports`, `time` and
    `error`; see `TrialOutcome`.
    """

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the trial; None if there is no checkpoint."""
        try:
            return Checkpoint.from_path(self.run_dir)
        except CheckpointNotFoundError:
            return None


class SearchResults(DataFrames, Sequence[TrialResult]):
    """The trials of a search, in the order of their creation.

    Args:
        trials: The trials.
        metric: The metric that was searched for.
        smaller_is_better: Whether smaller values are better.
        directory: The directory of the search.
        metrics: The metrics of several objectives, `metric` first.
        front: The trials that no other dominates, with several objectives.
    """

    def __init__(
        self,
        trials: Sequence[TrialResult],
        *,
        metric: str,
        smaller_is_better: bool,
        directory: Path,
        metrics: Sequence[str] = (),
        front: Sequence[TrialResult] = (),
    ) -> None:
        self._metrics, self._front = list(metrics) or [metric], list(front)
        self._trials = list(trials)
        self.metric = metric
        self.smaller_is_better = smaller_is_better
        self.directory = directory

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, index: Any) -> Any:
        return self._trials[index]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self._trials)

    @property
    def best_trial(self) -> TrialResult | None:
        """The trial with the best value of the metric; None without a finite value.

        Raises:
            RuntimeError: The search has several objectives, and so `best_trials`.
        """
        if len(self._metrics) > 1:
            raise RuntimeError(
                "A search must have one objective to have a best trial, but this one has"
                f" {len(self._metrics)}.\nHint: `best_trials` is its Pareto front."
            )
        best = next(iter(self.ranked()), None)
        has_value = best is not None and best.value is not None and math.isfinite(best.value)
        return best if has_value else None

    @property
    def best_trials(self) -> list[TrialResult]:
        """The best trial; with several objectives all that no other trial dominates."""
        if len(self._metrics) > 1:
            return list(self._front)
        best = self.best_trial
        return [] if best is None else [best]

    @property
    def best_config(self) -> dict[str, Any] | None:
        """The config of the best trial."""
        best = self.best_trial
        return None if best is None else best.config

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the best trial."""
        best = self.best_trial
        return None if best is None else best.checkpoint

    def ranked(self) -> list[TrialResult]:
        """Return the trials, the best first, and those without a finite value last.

        With several objectives, those of the Pareto front are the best, then the first one counts.
        """

        front = {trial.number for trial in self._front}

        def key(trial: TrialResult) -> tuple[bool, bool, float, int]:
            value = math.nan if trial.value is None else trial.value
            value = value if self.smaller_is_better else -value
            # Values that are not finite come last, whichever way is better.
            is_bad = not math.isfinite(value)
            return trial.number not in front, is_bad, 0.0 if is_bad else value, trial.number

        return sorted(self._trials, key=key)

    def rows(self) -> list[dict[str, Any]]:
        """Return a plain dictionary for each trial, as rows of a data frame."""
        return [
            {
                "trial": trial.number,
                "state": trial.state,
                "reports": trial.num_reports,
                **self._values_of(trial),
                **{f"config.{name}": value for name, value in trial.config.items()},
            }
            for trial in self._trials
        ]

    def _values_of(self, trial: TrialResult) -> dict[str, float | None]:
        several = len(self._metrics) > 1
        values = trial.values or [None] * len(self._metrics) if several else [trial.value]
        return dict(zip(self._metrics, values, strict=True))

    def __repr__(self) -> str:
        told = "no value yet"
        if len(self._metrics) > 1:
            numbers = ", ".join(str(trial.number) for trial in self._front)
            told = f"Pareto front of {', '.join(self._metrics)}: {numbers or 'none yet'}"
        elif (best := self.best_trial) is not None:
            told = f"best {self.metric} {best.value:.6g} by trial {best.number}"
        return f"SearchResults({len(self)} trial(s), {told})"

    def __str__(self) -> str:
        """Return a table of the trials, the best first."""
        header, rows = self._cells()
        return f"{self!r}\n{text_table([header, *rows])}"

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        return html_table(repr(self), *self._cells())

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        # Columns only for differing values: a value common to all trials says nothing.
        names = [
            name
            for name in dict.fromkeys(name for trial in self._trials for name in trial.config)
            if len({repr(trial.config.get(name)) for trial in self._trials}) > 1
        ]
        header = [*_HEADER, *self._metrics, *names]
        rows = [
            [
                str(trial.number),
                trial.state,
                str(trial.num_reports),
                *("-" if v is None else f"{v:.6g}" for v in self._values_of(trial).values()),
                *(_short(trial.config.get(name)) for name in names),
            ]
            for trial in self.ranked()
        ]
        return header, rows


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def search(
    train_func: Callable[..., Any],
    space: Mapping[str, Any],
    searcher: Mapping[str, Any] | Searcher,
    *,
    trainer: Trainer | None = None,
    max_concurrent_trials: int | None = None,
    config: Mapping[str, Any] | None = None,
    dataset: Any = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int | None = None,
) -> SearchResults:
    """Search hyperparameters of a train function with a search method of Paceline.

    Each trial is a run of the function, on workers that stay warm from trial to trial. The function
    waits at each report until the search has judged it, so a stopped trial trains no further. What
    happens is in a journal on disk: if this process is killed, the same call with the same
    `directory` continues, with the same decisions and from the checkpoints of the trials.

    Args:
        train_func: See `Trainer.run`. It must report the searched metric.
        space: Hyperparameters in the words of an experiment config; other values are the same for
            all trials.
        searcher: The search method in the words of an experiment config, such as
            ``{"name": "random", "metric": "loss", "max_trials": 8}``. A length counts in the metric
            that it names, or in reports if the function does not report that.
        trainer: Workers for one trial at a time. Workers of further trials are made with the same
            arguments. By default each trial has one worker.
        max_concurrent_trials: How many trials run at once; as many as there are cores and GPUs for
            by default, but no more than `max_concurrent_trials` of the searcher.
        config: The further part of each trial's config; any values.
        dataset: See `Trainer.run`.
        checkpoint_strategy: Which checkpoints of a trial to keep; the newest one by default.
        directory: The directory of the search, for a new one or to resume an earlier one. By
            default a new one below ``./paceline_runs``.
        seed: The seed of a new search; drawn by default.

    Returns:
        The trials, with `best_trial`, `best_config`, `best_checkpoint` and a table.

    Raises:
        ConfigError: The space or the search method is not valid; a ValueError.
        RuntimeError: Another process works on the search, or this one runs under a master.
        SearchMethodError: The search method has failed.
        ValueError: A value is out of range, the trainer has no workers of its own, or `directory`
            has another search.
        Exception: The function's error, if all trials have failed.
    """
    check_train_function(train_func)
    _check_can_search(max_concurrent_trials)
    if trainer is not None:
        trainer.check_can_wait()
    chosen = checked_search(space, searcher)
    strategy = checkpoint_strategy or CheckpointStrategy(num_to_keep=1)
    journal = search_journal(chosen, local_directory(directory, "directory"), seed)

    def starting(trainer: Trainer) -> Callable[[SearchTrial], StepwiseTrial]:
        return lambda trial: trainer.run_stepwise(
            train_func,
            dict(trial.result.config),
            dataset,
            checkpoint_strategy=strategy,
            known=trial.known,
            run_dir=trial.result.run_dir,
            seed=trial.create.trial_seed,
        )

    feedback = RunFeedback(journal.path, journal.opened.info, trials=journal.path / TRIALS_FOLDER)
    error: BaseException | None = None
    try:
        with ExitStack() as stack:
            run = begun_search(chosen, journal, config or {}, TrialResult, stack)
            most = getattr(chosen.searcher, "max_concurrent_trials", None)
            trainers = _search_trainers(trainer, max_concurrent_trials, most, stack)
            progress = SearchProgress(feedback, chosen.searcher.metric, len(trainers))
            progress.begin(run, "resumes" if journal.opened.attempt else "")
            stack.push(lambda kind, error, traceback: progress.end(run, error))
            conduct(run, [starting(each) for each in trainers], progress)
        results = _search_results(run, chosen.searcher, journal.path)
    except BaseException as raised:
        error = raised
        raise
    finally:
        journal.close(error)
    errors = [trial.error for trial in results if trial.error is not None]
    # Failures are results like others if any trial has completed.
    if errors and len(errors) == len(results):
        raise errors[0]
    return results


def _check_can_search(max_concurrent_trials: int | None) -> None:
    if core.get_cluster_info() is not None:
        raise RuntimeError(
            "`search` must not run in a trial of a master, which searches by itself. Hint: put the"
            " `searcher` into the experiment config."
        )
    if max_concurrent_trials is not None and max_concurrent_trials < 1:
        raise ValueError(
            f"`max_concurrent_trials` must be at least 1, but got {max_concurrent_trials!r}."
        )


def _search_trainers(
    given: Trainer | None, number: int | None, most: int | None, stack: ExitStack
) -> list[Trainer]:
    """Return a trainer per concurrent trial; trainers made here are closed with the stack.

    Args:
        given: The trainer of the caller.
        number: How many trials the caller asks for; as many as there is room for by default.
        most: How many the search may run at once; 0 and None are no limit.
        stack: Ends the workers made here.
    """
    first = given
    if first is None:
        first = stack.enter_context(Trainer(num_workers=1, cluster="auto"))
    if first.is_on_ray:
        # A Ray that is started here must not end between trials, nor start in a thread of one.
        stack.callback(RayConnection().close)
    number = number or first.num_concurrent()
    number = min(number, most or number)
    beside = (first.replace_beside(index) for index in range(1, number))
    return [first, *map(stack.enter_context, beside)]


def _search_results(run: SearchRun, searcher: Searcher, directory: Path) -> SearchResults:
    return SearchResults(
        [cast(TrialResult, trial.result) for trial in run.trials.values()],
        metric=searcher.metric,
        smaller_is_better=searcher.smaller_is_better,
        directory=directory,
        metrics=searcher.metrics,
        front=cast(list[TrialResult], run.front()),
    )
