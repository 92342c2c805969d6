"""Runs of train functions: their workers, what these are told, and how they reach the run's files.

Importing this loads no torch.
"""

from paceline.workers.runs._current_run import (
    become_pool_worker,
    current_session,
    enter_session,
    is_pool_worker,
    leave_session,
)
from paceline.workers.runs._group_settings import GroupSettings
from paceline.workers.runs._outer_launcher_run_group import make_group
from paceline.workers.runs._preemption_watch import PreemptionWatch, is_to_move, note_listener
from paceline.workers.runs._rank_outcome import RankOutcome, WorkerFacts
from paceline.workers.runs._report_gate import ReportGate, StoppedError
from paceline.workers.runs._run_access import RunAccess, storage_holding
from paceline.workers.runs._run_spec import (
    FILES_FOLDER,
    METRICS_GROUP,
    STATE_VERSION,
    TIMINGS_GROUP,
    UNSHARDED_VERSION,
    Instance,
    Job,
    RunSpec,
    StoredAt,
    checked_metadata,
    checkpoint_uuid,
)
from paceline.workers.runs._torch_and_elastic_config import ElasticConfig, TorchConfig
from paceline.workers.runs._train_group import TrainGroup

__all__ = [
    "FILES_FOLDER",
    "METRICS_GROUP",
    "STATE_VERSION",
    "TIMINGS_GROUP",
    "UNSHARDED_VERSION",
    "ElasticConfig",
    "GroupSettings",
    "Instance",
    "Job",
    "PreemptionWatch",
    "RankOutcome",
    "ReportGate",
    "RunAccess",
    "RunSpec",
    "StoppedError",
    "StoredAt",
    "TorchConfig",
    "TrainGroup",
    "WorkerFacts",
    "become_pool_worker",
    "checked_metadata",
    "checkpoint_uuid",
    "current_session",
    "enter_session",
    "is_pool_worker",
    "is_to_move",
    "leave_session",
    "make_group",
    "note_listener",
    "storage_holding",
]
