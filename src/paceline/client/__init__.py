"""The Python SDK: create experiments, follow them, and fetch what they made.

`experiment`, `trial` and `checkpoint` return objects that talk to the master which the environment
names (`PACELINE_HOME`, or `PACELINE_MASTER` with `PACELINE_TOKEN`); `Client` names one itself.
"""

from paceline.client._checkpoint import Checkpoint, DownloadMode
from paceline.client._client import Client
from paceline.client._client_functions import (
    checkpoint,
    create_experiment,
    experiment,
    get_checkpoint,
    get_experiment,
    get_trial,
    list_experiments,
    trial,
)
from paceline.client._code_context import (
    DEFAULT_IGNORES,
    IGNORE_FILE,
    MAX_CONTEXT_BYTES,
    ContextEntry,
    list_context,
    pack_context,
)
from paceline.client._errors import (
    ApiError,
    ClientError,
    ContextError,
    DownloadError,
    MasterUnreachableError,
    NoCheckpointError,
)
from paceline.client._event_stream import EventStream
from paceline.client._experiment import Experiment
from paceline.client._master_location import (
    HOME_VARIABLE,
    MASTER_VARIABLE,
    MasterFile,
    find_master,
    home_directory,
    read_master_file,
    read_token,
)
from paceline.client._sync_run import RunSync, SyncResult
from paceline.client._trial import Trial

__all__ = [
    "DEFAULT_IGNORES",
    "HOME_VARIABLE",
    "IGNORE_FILE",
    "MASTER_VARIABLE",
    "MAX_CONTEXT_BYTES",
    "ApiError",
    "Checkpoint",
    "Client",
    "ClientError",
    "ContextEntry",
    "ContextError",
    "DownloadError",
    "DownloadMode",
    "EventStream",
    "Experiment",
    "MasterFile",
    "MasterUnreachableError",
    "NoCheckpointError",
    "RunSync",
    "SyncResult",
    "Trial",
    "checkpoint",
    "create_experiment",
    "experiment",
    "find_master",
    "get_checkpoint",
    "get_experiment",
    "get_trial",
    "home_directory",
    "list_context",
    "list_experiments",
    "pack_context",
    "read_master_file",
    "read_token",
    "trial",
]
