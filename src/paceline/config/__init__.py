"""Experiment config: reading, checking, merging, and the meaning of its sections."""

from paceline._base.imports import show_public_errors
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._fields_and_problems import ConfigError
from paceline.config._searcher_section import Searcher
from paceline.config._validate_config import json_schema, load_config, validate_config

__all__ = [
    "ConfigError",
    "ExperimentConfig",
    "Searcher",
    "json_schema",
    "load_config",
    "validate_config",
]

show_public_errors(__name__, globals())
