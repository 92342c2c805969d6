"""The experiment config: reading, checking, merging, and what it means."""

from paceline.config._config_problems import MISSING, ConfigError, Problem
from paceline.config._config_secrets import (
    HIDDEN,
    hide_in_text,
    hide_secrets,
    hide_values,
    is_secret,
    reveal_secrets,
    without_secrets,
)
from paceline.config._entrypoint_command import build_command, fill_entrypoint
from paceline.config._environment_section import Environment
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._lengths_and_periods import split_length
from paceline.config._merge_configs import merge_configs
from paceline.config._method_registry import searcher_section
from paceline.config._older_configs import Optimizations
from paceline.config._overrides import apply_overrides
from paceline.config._read_yaml import compose_yaml, parse_yaml, read_yaml_file
from paceline.config._reproducibility_and_profiling_sections import Profiling, Reproducibility
from paceline.config._resources_section import Resources, SlotRange
from paceline.config._schema import json_schema
from paceline.config._searcher_section import (
    BATCHES,
    AdaptiveAshaSearcher,
    AsyncHalvingSearcher,
    GridSearcher,
    MissingSearcher,
    RandomSearcher,
    Searcher,
    SingleSearcher,
)
from paceline.config._section_base import Section
from paceline.config._storage_section import (
    CheckpointStorage,
    DirectoryStorage,
    S3Storage,
    SharedFsStorage,
    UrlStorage,
)
from paceline.config._validate_config import load_config, read_stored_config, validate_config

__all__ = [
    "BATCHES",
    "HIDDEN",
    "MISSING",
    "AdaptiveAshaSearcher",
    "AsyncHalvingSearcher",
    "CheckpointStorage",
    "ConfigError",
    "DirectoryStorage",
    "Environment",
    "ExperimentConfig",
    "GridSearcher",
    "MissingSearcher",
    "Optimizations",
    "Problem",
    "Profiling",
    "RandomSearcher",
    "Reproducibility",
    "Resources",
    "S3Storage",
    "Searcher",
    "Section",
    "SharedFsStorage",
    "SingleSearcher",
    "SlotRange",
    "UrlStorage",
    "apply_overrides",
    "build_command",
    "compose_yaml",
    "fill_entrypoint",
    "hide_in_text",
    "hide_secrets",
    "hide_values",
    "is_secret",
    "json_schema",
    "load_config",
    "merge_configs",
    "parse_yaml",
    "read_stored_config",
    "read_yaml_file",
    "reveal_secrets",
    "searcher_section",
    "split_length",
    "validate_config",
    "without_secrets",
]
