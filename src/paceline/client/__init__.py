"""Python SDK: create experiments, follow them, and fetch their results.

`experiment`, `trial` and `checkpoint` return objects that talk to the master which the environment
names (`PACELINE_HOME`, or `PACELINE_MASTER` with `PACELINE_TOKEN`); `Client` names one itself.
"""

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
from paceline.client._code_and_run_uploads import (
    DEFAULT_IGNORES,
    IGNORE_FILE,
    MAX_CONTEXT_BYTES,
    ContextEntry,
    RunSync,
    SyncResult,
    list_context,
    pack_context,
)
from paceline.client._event_stream import EventStream
from paceline.client._experiment_and_trial import Experiment, Trial
from paceline.client._http_session import (
    HOME_VARIABLE,
    MASTER_VARIABLE,
    ApiError,
    ClientError,
    ContextError,
    DownloadError,
    MasterFile,
    MasterUnreachableError,
    NoCheckpointError,
    find_master,
    home_directory,
    read_master_file,
    read_token,
)

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
