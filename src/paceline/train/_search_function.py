"""Hyperparameter search over a train function, without a master."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline import core
from paceline.masterless_search import (
    SearchRun,
    SearchTrial,
    StepwiseTrial,
    begun_search,
    checked_search,
    conduct,
    search_journal,
)
from paceline.train._config import CheckpointStrategy
from paceline.train._search_results import SearchResults, TrialResult
from paceline.train._trainer import Trainer
from paceline.train._trainer_arguments import check_train_function
from paceline.workers import RayConnection

if TYPE_CHECKING:
    from paceline.config import Searcher


def search(
    train_func: Callable[..., Any],
    space: Mapping[str, Any],
    searcher: "Mapping[str, Any] | Searcher",
    *,
    trainer: Trainer | None = None,
    max_concurrent_trials: int | None = None,
    config: Mapping[str, Any] | None = None,
    dataset: Any = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
    directory: str | os.PathLike[str] | None = None,
    seed: int | None = None,
) -> SearchResults:
    """Search hyperparameters of a train function with one of Paceline's search methods.

    Each trial is a run of the function, on workers that stay warm from trial to trial. The function
    waits at each report until the search has judged it, so a stopped trial trains no further. What
    happens is in a journal on disk: if this process is killed, the same call with the same
    `directory` goes on, with the same decisions and from the checkpoints of the trials.

    Args:
        train_func: See `Trainer.run`. It must report the searched metric.
        space: Hyperparameters in the words of an experiment config; other values are the same for
            all trials.
        searcher: The search method in the words of an experiment config, such as
            ``{"name": "random", "metric": "loss", "max_trials": 8}``. A length counts in the metric
            that it names, or in reports if the function does not report that.
        trainer: Workers for one trial at a time. Those of further trials are made with the same
            arguments. By default each trial has one worker.
        max_concurrent_trials: How many trials run at once; as many as there are cores and GPUs for
            by default, but no more than `max_concurrent_trials` of the searcher.
        config: What each trial's config has besides; any values.
        dataset: See `Trainer.run`.
        checkpoint_strategy: Which checkpoints of a trial to keep; the newest one by default.
        directory: The directory of the search, for a new one or to go on with an earlier one. By
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
        Exception: What the function raised, if all trials have failed.
    """
    check_train_function(train_func)
    _check_can_search(max_concurrent_trials)
    if trainer is not None:
        trainer.check_can_wait()
    chosen = checked_search(space, searcher)
    strategy = checkpoint_strategy or CheckpointStrategy(num_to_keep=1)
    journal = search_journal(chosen, core.local_directory(directory, "directory"), seed)

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

    error: BaseException | None = None
    try:
        run = begun_search(chosen, journal, config or {}, TrialResult)
        with ExitStack() as stack:
            most = getattr(chosen.searcher, "max_concurrent_trials", None)
            trainers = _search_trainers(trainer, max_concurrent_trials, most, stack)
            conduct(run, [starting(each) for each in trainers])
        results = _search_results(run, chosen.searcher, journal.path)
    except BaseException as raised:
        error = raised
        raise
    finally:
        journal.close(error)
    errors = [trial.error for trial in results if trial.error is not None]
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
    """Return a trainer for each trial at a time; those that are made here end with the stack.

    Args:
        given: The trainer of the caller.
        number: How many trials the caller asks for; as many as there is room for by default.
        most: How many the search may run at once; 0 and None are no limit.
        stack: Ends what is made here.
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


def _search_results(run: SearchRun, searcher: "Searcher", directory: Path) -> SearchResults:
    return SearchResults(
        [cast(TrialResult, trial.result) for trial in run.trials.values()],
        metric=searcher.metric,
        smaller_is_better=searcher.smaller_is_better,
        directory=directory,
    )
