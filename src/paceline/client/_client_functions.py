"""The client's calls as plain functions, on the master that the environment names."""

import atexit
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client._checkpoint import Checkpoint
from paceline.client._client import Client
from paceline.client._experiment import Experiment
from paceline.client._master_location import MASTER_VARIABLE, TOKEN_VARIABLE, home_directory
from paceline.client._trial import Trial

if TYPE_CHECKING:
    from paceline.config import ExperimentConfig


def create_experiment(
    config: "ExperimentConfig | dict[str, Any] | str | Path",
    model_dir: str | Path | None = None,
    activate: bool = True,
) -> Experiment:
    """Create an experiment; see `Client.create_experiment`."""
    return _client().create_experiment(config, model_dir, activate)


def get_experiment(experiment_id: int) -> Experiment:
    """Return an experiment by its number."""
    return _client().get_experiment(experiment_id)


def experiment(experiment_id: int) -> Experiment:
    """Return an experiment by its number; short for `get_experiment`."""
    return get_experiment(experiment_id)


def list_experiments(*, state: str | None = None, limit: int | None = None) -> list[Experiment]:
    """Return experiments, the newest first; see `Client.list_experiments`."""
    return _client().list_experiments(state=state, limit=limit)


def get_trial(trial_id: int) -> Trial:
    """Return a trial by its number."""
    return _client().get_trial(trial_id)


def trial(trial_id: int) -> Trial:
    """Return a trial by its number; short for `get_trial`."""
    return get_trial(trial_id)


def get_checkpoint(uuid: str) -> Checkpoint:
    """Return a checkpoint by its UUID."""
    return _client().get_checkpoint(uuid)


def checkpoint(uuid: str) -> Checkpoint:
    """Return a checkpoint by its UUID; short for `get_checkpoint`."""
    return get_checkpoint(uuid)


def _client() -> Client:
    master, token = os.environ.get(MASTER_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    return _cached_client(home_directory(), master, token)


@lru_cache(maxsize=4)
def _cached_client(home: Path, master: str | None, token: str | None) -> Client:
    """Return one client per environment: `home` is read by the client itself."""
    client = Client(master, token)
    atexit.register(client.close)
    return client
