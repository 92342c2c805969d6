"""Set-up of a search: the checked space and method, and a search that begins or goes on."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import ConfigError, Searcher, validate_config
from paceline.masterless_search._search_journal import SearchJournal
from paceline.masterless_search._search_run import SearchRun
from paceline.masterless_search._trial_outcome import TrialOutcome
from paceline.search import Search

logger = logging.getLogger(__name__)

_SPACE_SECTION = "hyperparameters"


def checked_search(space: Mapping[str, Any], searcher: Any) -> Any:
    """Return an experiment config with the space and the search method, after its checks.

    Raises:
        ConfigError: They are not valid; problems of the space are named as its own.
    """
    section: Any = searcher
    if isinstance(searcher, Searcher):
        # Its method need not be registered.
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
        is_single=searcher.name == "single",
        config=config,
        make_result=make_result,
    )
    run.begin()
    return run
