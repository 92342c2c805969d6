"""Python SDK: create experiments, follow them, and fetch their results.

`experiment`, `trial` and `checkpoint` return objects that talk to the master which the environment
names (`PACELINE_HOME`, or `PACELINE_MASTER` with `PACELINE_TOKEN`); `Client` names one itself.
"""

from paceline._base.imports import show_public_errors
from paceline.client._checkpoint import Checkpoint, DownloadMode
from paceline.client._client import (
    Client,
    checkpoint,
    create_experiment,
    experiment,
    get_checkpoint,
    get_experiment,
    get_trial,
    list_experiments,
    trial,
)
from paceline.client._experiment_and_trial import Experiment, Trial
from paceline.client._http_session import (
    ApiError,
    ClientError,
    ContextError,
    DownloadError,
    MasterUnreachableError,
    NoCheckpointError,
)

__all__ = [
    "ApiError",
    "Checkpoint",
    "Client",
    "ClientError",
    "ContextError",
    "DownloadError",
    "DownloadMode",
    "Experiment",
    "MasterUnreachableError",
    "NoCheckpointError",
    "Trial",
    "checkpoint",
    "create_experiment",
    "experiment",
    "get_checkpoint",
    "get_experiment",
    "get_trial",
    "list_experiments",
    "trial",
]

show_public_errors(__name__, globals())
