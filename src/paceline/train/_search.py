"""Hyperparameter search over a train function, without a master."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import core
from paceline.train._arguments import check_function
from paceline.train._config import CheckpointStrategy
from paceline.train._search_journal import SearchJournal
from paceline.train._search_results import SearchResults
from paceline.train._search_run import SearchRun
from paceline.train._search_threads import TrialThread, TrialWork
from paceline.train._trainer import Trainer
from paceline.workers import RayConnection

if TYPE_CHECKING:
    from paceline.config import Searcher

# How often the main thread looks for Ctrl-C, in seconds.
_LOOK_S = 0.2


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
            by default.
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
    check_function(train_func)
    if core.get_cluster_info() is not None:
        raise RuntimeError(
            "`search` must not run in a trial of a master, which searches by itself. Hint: put the"
            " `searcher` into the experiment config."
        )
    if max_concurrent_trials is not None and max_concurrent_trials < 1:
        raise ValueError(
            f"`max_concurrent_trials` must be at least 1, but got {max_concurrent_trials!r}."
        )
    if trainer is not None:
        trainer.check_can_wait()
    chosen = _checked(space, searcher)
    strategy = checkpoint_strategy or CheckpointStrategy(num_to_keep=1)
    work = TrialWork(function=train_func, dataset=dataset, strategy=strategy)
    journal = SearchJournal(
        core.local_directory(directory, "directory"),
        {"searcher": chosen.searcher.model_dump(mode="json"), "space": chosen.hyperparameters},
        seed,
    )
    error: BaseException | None = None
    try:
        run = _begun(chosen, journal, config or {})
        with ExitStack() as stack:
            _conduct(run, _trainers(trainer, max_concurrent_trials, stack), work)
        results = _results(run, chosen.searcher, journal.path)
    except BaseException as raised:
        error = raised
        raise
    finally:
        journal.close(error)
    errors = [trial.error for trial in results if trial.error is not None]
    if errors and len(errors) == len(results):
        raise errors[0]
    return results


def _checked(space: Mapping[str, Any], searcher: Any) -> Any:
    """Return an experiment config with the space and the search method, after its checks."""
    from paceline.config import Searcher, validate_config

    section: Any = searcher
    if isinstance(searcher, Searcher):
        # Its method need not be registered.
        section = {"name": "single", "metric": searcher.metric}
    checked = validate_config(
        {
            "entrypoint": "train_func",
            "searcher": dict(section) if isinstance(section, Mapping) else section,
            "hyperparameters": dict(space) if isinstance(space, Mapping) else space,
        }
    )
    if isinstance(searcher, Searcher):
        checked = checked.model_copy(update={"searcher": searcher})
    return checked


def _begun(chosen: Any, journal: SearchJournal, config: Mapping[str, Any]) -> SearchRun:
    from paceline.search import Search

    searcher = chosen.searcher
    wants_reports = searcher.wants_reports
    run = SearchRun(
        Search(chosen.search_config(), chosen.hyperparameters, journal.seed),
        journal,
        metric=searcher.metric,
        time_name=searcher.time_name if wants_reports else str(searcher.length_unit),
        smaller_is_better=searcher.smaller_is_better,
        length=searcher.length,
        can_extend=wants_reports,
        config=config,
    )
    run.begin()
    return run


def _trainers(given: Trainer | None, number: int | None, stack: ExitStack) -> list[Trainer]:
    """Return a trainer for each trial at a time; those that are made here end with the stack."""
    first = given
    if first is None:
        first = stack.enter_context(Trainer(num_workers=1, cluster="auto"))
    if first.is_on_ray:
        # A Ray that is started here must not end between trials, nor start in a thread of one.
        stack.callback(RayConnection().close)
    number = number or first.num_concurrent()
    beside = (first.replace_beside(index) for index in range(1, number))
    return [first, *map(stack.enter_context, beside)]


def _conduct(run: SearchRun, trainers: list[Trainer], work: TrialWork) -> None:
    threads = [TrialThread(run, trainer, work) for trainer in trainers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
    finally:
        run.close()
        for thread in threads:
            thread.join()
    failure = next((thread.failure for thread in threads if thread.failure is not None), None)
    if failure is not None:
        raise failure


def _results(run: SearchRun, searcher: "Searcher", directory: Path) -> SearchResults:
    return SearchResults(
        [trial.result for trial in run.trials.values()],
        metric=searcher.metric,
        smaller_is_better=searcher.smaller_is_better,
        directory=directory,
    )
