"""Hyperparameter search: pure methods, the space they draw from, preview and simulator.

Nothing here does I/O. `Search` takes inputs (events of trials) and returns operations
(the next steps); the master stores both.
"""

from __future__ import annotations

from paceline._base.imports import show_public_errors
from paceline.search._adaptive_asha import Mode
from paceline.search._hyperparameter_space import Space, SpaceError, parse_space
from paceline.search._search import SimulationResult, simulate
from paceline.search._search_method import (
    BracketPlan,
    BracketView,
    Create,
    Exited,
    ExitReason,
    Input,
    Operation,
    Progressed,
    Reported,
    RungView,
    SearchConfig,
    SearchMethod,
    SearchMethodError,
    Shutdown,
    Started,
    Stop,
    Train,
    TrialMaker,
)

__all__ = [
    "BracketPlan",
    "BracketView",
    "Create",
    "ExitReason",
    "Exited",
    "Input",
    "Mode",
    "Operation",
    "Progressed",
    "Reported",
    "RungView",
    "SearchConfig",
    "SearchMethod",
    "SearchMethodError",
    "Shutdown",
    "SimulationResult",
    "Space",
    "SpaceError",
    "Started",
    "Stop",
    "Train",
    "TrialMaker",
    "parse_space",
    "simulate",
]

show_public_errors(__name__, globals())
