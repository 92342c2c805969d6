"""Hyperparameter search without a master: it runs in the process that asks for it."""

from paceline.masterless_search._search_journal import SearchJournal
from paceline.masterless_search._search_run import SearchRun, SearchTrial
from paceline.masterless_search._setup import begun_search, checked_search, search_journal
from paceline.masterless_search._trial_outcome import TrialOutcome
from paceline.masterless_search._trial_threads import StepwiseTrial, conduct

__all__ = [
    "SearchJournal",
    "SearchRun",
    "SearchTrial",
    "StepwiseTrial",
    "TrialOutcome",
    "begun_search",
    "checked_search",
    "conduct",
    "search_journal",
]
