"""The life cycle of experiments and trials: what may follow what, and what makes it happen."""

from paceline.master.experiments._attempt_exits import end_attempt
from paceline.master.experiments._best_metric import recompute_best
from paceline.master.experiments._checkpoint_files import (
    delete_files,
    delete_matching_files,
    note_deleted_files,
)
from paceline.master.experiments._commands import Commands
from paceline.master.experiments._experiment_deletion import (
    Leftovers,
    Loss,
    delete_experiment,
    loss_of,
)
from paceline.master.experiments._experiment_edits import edit_experiment, set_archived
from paceline.master.experiments._launch import Node, Place
from paceline.master.experiments._leases import DEFAULT_LEASE_S, Leases
from paceline.master.experiments._reconcile import Reconciler, holdings, waiting_trials
from paceline.master.experiments._record_ingest import RecordIngest, check_not_over, read_attempt
from paceline.master.experiments._retention_plan import Candidate, RetentionPolicy, plan_retention
from paceline.master.experiments._search_views import MAX_RUNG_ENTRIES, SearchViews, thinned
from paceline.master.experiments._searches import (
    Searches,
    load_search,
    missing_methods,
    undecided_searches,
)
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import (
    NotFoundError,
    RefusedError,
    SearchEnd,
    TransitionError,
)
from paceline.master.experiments._unmanaged import Unmanaged
from paceline.master.experiments._wanted_attempts import read_control_of

__all__ = [
    "DEFAULT_LEASE_S",
    "MAX_RUNG_ENTRIES",
    "Candidate",
    "Commands",
    "Leases",
    "Leftovers",
    "Loss",
    "Node",
    "NotFoundError",
    "Place",
    "Reconciler",
    "RecordIngest",
    "RefusedError",
    "RetentionPolicy",
    "SearchEnd",
    "SearchViews",
    "Searches",
    "StateChanges",
    "TransitionError",
    "Unmanaged",
    "check_not_over",
    "delete_experiment",
    "delete_files",
    "delete_matching_files",
    "edit_experiment",
    "end_attempt",
    "holdings",
    "load_search",
    "loss_of",
    "missing_methods",
    "note_deleted_files",
    "plan_retention",
    "read_attempt",
    "read_control_of",
    "recompute_best",
    "set_archived",
    "thinned",
    "undecided_searches",
    "waiting_trials",
]
