"""Configs of experiments that are continued, and which overrides they take."""

from typing import Any

from sqlalchemy import Row

from paceline.config import ExperimentConfig, merge_configs, validate_config
from paceline.master.experiments._attempt_launch import checkpoint_root
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import config_of


def config_of_continued_trial(
    parent: Row[Any], trial: Row[Any], overrides: dict[str, Any]
) -> ExperimentConfig:
    """Return the config of a `single` experiment that goes on with a trial.

    Args:
        parent: The experiment of the trial.
        trial: The trial.
        overrides: Fields of the config that change.

    Raises:
        paceline.config.ConfigError: The overrides do not fit.
    """
    old = config_of(parent)
    config = parent.config | {
        "name": f"{parent.name} (trial {trial.id} continued)",
        "searcher": {
            "name": "single",
            "metric": old.searcher.metric,
            "smaller_is_better": old.searcher.smaller_is_better,
            "source_trial_id": trial.id,
        },
        "hyperparameters": _as_constants(old.hyperparameters, trial.hparams),
    }
    return validate_config(merge_configs(config, overrides))


def overridden_config(experiment: Row[Any], overrides: dict[str, Any]) -> ExperimentConfig:
    """Return the config of an experiment that is continued with overrides.

    Raises:
        RefusedError: The overrides change what a continued experiment keeps.
        paceline.config.ConfigError: The overrides do not fit.
    """
    if config_of(experiment).searcher.name != "single":
        raise RefusedError(
            "override_refused",
            "Only a single search takes a changed configuration when it is continued.",
        )
    merged = validate_config(merge_configs(experiment.config, overrides))
    if merged.searcher.name != "single":
        raise RefusedError("override_refused", "The continued search must remain single.")
    if "hyperparameters" in overrides:
        raise RefusedError(
            "override_refused",
            "A trial keeps its hyperparameters when its experiment is continued. Hint:"
            " `paceline trial continue` begins another trial, with others if you like.",
        )
    if checkpoint_root(merged) != checkpoint_root(config_of(experiment)):
        raise RefusedError(
            "override_refused",
            "A continued experiment keeps its checkpoint storage: its checkpoints are there.",
        )
    return merged


def _as_constants(space: dict[str, Any], hparams: dict[str, Any]) -> dict[str, Any]:
    """Return the space with every hyperparameter fixed at a trial's value."""
    fixed: dict[str, Any] = {}
    for name, value in hparams.items():
        entry = space.get(name)
        if isinstance(value, dict) and isinstance(entry, dict) and "type" not in entry:
            fixed[name] = _as_constants(entry, value)
        else:
            fixed[name] = {"type": "const", "val": value}
    return fixed
