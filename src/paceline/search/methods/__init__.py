"""The search methods: one file each, with the method's configuration."""

from __future__ import annotations

from paceline.search.methods._adaptive import AdaptiveAshaConfig, AsyncHalvingConfig, Mode
from paceline.search.methods._grid import GridConfig
from paceline.search.methods._random import RandomConfig, SingleConfig

__all__ = [
    "AdaptiveAshaConfig",
    "AsyncHalvingConfig",
    "GridConfig",
    "Mode",
    "RandomConfig",
    "SingleConfig",
]
