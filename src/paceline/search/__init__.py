"""Hyperparameter search: pure methods, the space they draw from, preview and simulator.

Nothing here does I/O. `Search` takes inputs (what happened to trials) and returns operations
(what to do next); the master stores both.
"""

from __future__ import annotations

from paceline.search._bracket_views import (
    BracketPlan,
    BracketView,
    Decision,
    RungEntry,
    RungView,
    TrialView,
)
from paceline.search._hyperparameter_kinds import SpaceError
from paceline.search._hyperparameter_space import Space, parse_space
from paceline.search._inputs_and_operations import (
    Create,
    Exited,
    ExitReason,
    Input,
    Operation,
    Progressed,
    Reported,
    Shutdown,
    Started,
    Stop,
    Train,
    input_from_json,
    message_to_json,
    operation_from_json,
)
from paceline.search._method_base import SearchMethod, TrialMaker
from paceline.search._method_config import SearchConfig
from paceline.search._method_errors import SearchMethodError, method_errors
from paceline.search._preview import Preview, PreviewRow, preview
from paceline.search._random_stream import Rng
from paceline.search._search import Search, replay
from paceline.search._simulate import SimulationResult, simulate
from paceline.search.methods import (
    AdaptiveAshaConfig,
    AsyncHalvingConfig,
    GridConfig,
    Mode,
    RandomConfig,
    SingleConfig,
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
