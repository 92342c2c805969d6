"""The configurations of experiments, as objects."""

from typing import Any

from sqlalchemy import Row

from paceline.config import ExperimentConfig, read_stored_config

_MAX_CACHED = 500
_cache: dict[int, tuple[dict[str, Any], ExperimentConfig]] = {}


def config_of(experiment: Row[Any]) -> ExperimentConfig:
    """Return the configuration of an experiment's row.

    Raises:
        paceline.config.ConfigError: It was not valid when it was stored.
    """
    stored: dict[str, Any] = experiment.config
    known = _cache.get(experiment.id)
    # Rows are read for each report; comparing takes a fraction of what checking takes.
    if known is not None and known[0] == stored:
        return known[1]
    config = read_stored_config(stored)
    if len(_cache) >= _MAX_CACHED:
        _cache.clear()
    _cache[experiment.id] = (stored, config)
    return config
