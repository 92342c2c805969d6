"""Hyperparameter search without a master: it runs in the process that asks for it."""

from paceline.tuning._search_journal import SearchJournal
from paceline.tuning._search_run import SearchRun, SearchTrial
from paceline.tuning._setup import begun_search, checked_search, search_journal
from paceline.tuning._trial_outcome import TrialOutcome
from paceline.tuning._trial_threads import StepwiseTrial, conduct

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
