"""Set-up of a search: the checked space and method, and a search that begins or goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.config import Searcher, validate_config
from paceline.masterless_search._search_journal import SearchJournal
from paceline.masterless_search._search_run import SearchRun
from paceline.masterless_search._trial_outcome import TrialOutcome
from paceline.search import Search


def checked_search(space: Mapping[str, Any], searcher: Any) -> Any:
    """Return an experiment config with the space and the search method, after its checks."""
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


def search_journal(chosen: Any, directory: Path | None, seed: int | None) -> SearchJournal:
    """Return the journal of a search, new or of earlier attempts.

    Args:
        chosen: What `checked_search` has returned.
        directory: See `SearchJournal`, as for the seed.
        seed: See there.
    """
    setup = {"searcher": chosen.searcher.model_dump(mode="json"), "space": chosen.hyperparameters}
    return SearchJournal(directory, setup, seed)


def begun_search(
    chosen: Any,
    journal: SearchJournal,
    config: Mapping[str, Any],
    make_result: Callable[..., TrialOutcome],
) -> SearchRun:
    """Return a search that has begun, or goes on where its journal ends.

    Args:
        chosen: What `checked_search` has returned.
        journal: Its journal.
        config: What each trial's config has besides its hyperparameters.
        make_result: See `SearchRun`.
    """
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
        make_result=make_result,
    )
    run.begin()
    return run
