"""Hyperparameter search: pure methods, the space they draw from, preview and simulator.

Methods and `Search` do no I/O: `Search` takes inputs (events of trials, proposals of samplers) and
returns operations (the next steps); the master stores both. Samplers that need more than NumPy run
in a process of their own.
"""

from __future__ import annotations

from paceline._base.imports import show_public_errors
from paceline.search._adaptive_asha import Mode
from paceline.search._hyperparameter_kinds import Parameter, SpaceError
from paceline.search._hyperparameter_space import Space, parse_space
from paceline.search._preview_and_simulation import SimulationResult, simulate
from paceline.search._samplers import Observation, Proposal, Sampler
from paceline.search._search_messages import (
    Create,
    Exited,
    ExitReason,
    Input,
    Operation,
    Progressed,
    Proposed,
    Reported,
    Shutdown,
    Started,
    Stop,
    Train,
)
from paceline.search._search_method import (
    BracketPlan,
    BracketView,
    RungView,
    SearchConfig,
    SearchMethod,
    SearchMethodError,
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
    "Observation",
    "Operation",
    "Parameter",
    "Progressed",
    "Proposal",
    "Proposed",
    "Reported",
    "RungView",
    "Sampler",
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
