"""Hyperparameter search: pure methods, the space they draw from, preview and simulator.

Nothing here does I/O. `Search` takes inputs (what happened to trials) and returns operations
(what to do next); the master stores both.
"""

from __future__ import annotations

from paceline.search._adaptive_asha import AdaptiveAshaConfig, AsyncHalvingConfig, Mode
from paceline.search._hyperparameter_space import Rng, Space, SpaceError, parse_space
from paceline.search._random_and_grid import GridConfig, RandomConfig, SingleConfig
from paceline.search._search import (
    Preview,
    PreviewRow,
    Search,
    SimulationResult,
    preview,
    replay,
    simulate,
)
from paceline.search._search_method import (
    BracketPlan,
    BracketView,
    Create,
    Decision,
    Exited,
    ExitReason,
    Input,
    Operation,
    Progressed,
    Reported,
    RungEntry,
    RungView,
    SearchConfig,
    SearchMethod,
    SearchMethodError,
    Shutdown,
    Started,
    Stop,
    Train,
    TrialMaker,
    TrialView,
    input_from_json,
    message_to_json,
    method_errors,
    operation_from_json,
)

__all__ = [
    "AdaptiveAshaConfig",
    "AsyncHalvingConfig",
    "BracketPlan",
    "BracketView",
    "Create",
    "Decision",
    "ExitReason",
    "Exited",
    "GridConfig",
    "Input",
    "Mode",
    "Operation",
    "Preview",
    "PreviewRow",
    "Progressed",
    "RandomConfig",
    "Reported",
    "Rng",
    "RungEntry",
    "RungView",
    "Search",
    "SearchConfig",
    "SearchMethod",
    "SearchMethodError",
    "Shutdown",
    "SimulationResult",
    "SingleConfig",
    "Space",
    "SpaceError",
    "Started",
    "Stop",
    "Train",
    "TrialMaker",
    "TrialView",
    "input_from_json",
    "message_to_json",
    "method_errors",
    "operation_from_json",
    "parse_space",
    "preview",
    "replay",
    "simulate",
]
