"""The life cycle of experiments and trials: what may follow what, and what makes it happen."""

from paceline.master.experiments._attempt_control import read_control_of
from paceline.master.experiments._attempt_end import end_attempt
from paceline.master.experiments._attempt_launch import Node, Place, checkpoint_root
from paceline.master.experiments._attempt_rows import check_not_over, live_attempts, read_attempt
from paceline.master.experiments._best_metric import recompute_best
from paceline.master.experiments._checkpoint_files import (
    CheckpointPlace,
    delete_files,
    delete_matching_files,
    note_deleted_files,
    place_of_checkpoint,
    place_of_experiment,
    storage_for_others,
)
from paceline.master.experiments._checkpoint_ingest import check_owner, store_checkpoint
from paceline.master.experiments._commands_on_experiments import Commands
from paceline.master.experiments._experiment_deletion import (
    Leftovers,
    Loss,
    delete_experiment,
    loss_of,
)
from paceline.master.experiments._experiment_edits import (
    edit_experiment,
    move_experiment,
    set_archived,
)
from paceline.master.experiments._failing_nodes import NUM_TRIALS, WITHIN_S
from paceline.master.experiments._multi_node_attempts import end_runner, note_begun
from paceline.master.experiments._reconciler import Reconciler
from paceline.master.experiments._record_checks import check_record
from paceline.master.experiments._record_ingest import RecordIngest
from paceline.master.experiments._retention import Retention
from paceline.master.experiments._retention_plan import Candidate, RetentionPolicy, plan_retention
from paceline.master.experiments._runner_leases import DEFAULT_LEASE_S, Leases
from paceline.master.experiments._scheduler_input import (
    Cluster,
    drained_slots,
    rank_of,
    read_cluster,
    read_pools,
    waiting_trials,
)
from paceline.master.experiments._search_operations import SearchOperations
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import (
    NotFoundError,
    RefusedError,
    SearchEnd,
    TransitionError,
)
from paceline.master.experiments._storage_calls import (
    StorageCalls,
    StoragePendingError,
    in_own_thread,
)
from paceline.master.experiments._stored_search_views import MAX_RUNG_ENTRIES, SearchViews, thinned
from paceline.master.experiments._stored_searches import (
    Searches,
    load_search,
    missing_methods,
    undecided_searches,
)
from paceline.master.experiments._unmanaged_runs import Unmanaged

__all__ = [
    "NUM_TRIALS",
    "WITHIN_S",
    "Candidate",
    "CheckpointPlace",
    "Cluster",
    "Commands",
    "DEFAULT_LEASE_S",
    "Leases",
    "Leftovers",
    "Loss",
    "MAX_RUNG_ENTRIES",
    "Node",
    "NotFoundError",
    "Place",
    "Reconciler",
    "RecordIngest",
    "RefusedError",
    "Retention",
    "RetentionPolicy",
    "SearchEnd",
    "SearchOperations",
    "SearchViews",
    "Searches",
    "StateChanges",
    "StorageCalls",
    "StoragePendingError",
    "TransitionError",
    "Unmanaged",
    "check_not_over",
    "check_owner",
    "check_record",
    "checkpoint_root",
    "delete_experiment",
    "delete_files",
    "delete_matching_files",
    "drained_slots",
    "edit_experiment",
    "end_attempt",
    "end_runner",
    "in_own_thread",
    "live_attempts",
    "load_search",
    "loss_of",
    "missing_methods",
    "move_experiment",
    "note_begun",
    "note_deleted_files",
    "place_of_checkpoint",
    "place_of_experiment",
    "plan_retention",
    "rank_of",
    "read_attempt",
    "read_cluster",
    "read_control_of",
    "read_pools",
    "recompute_best",
    "set_archived",
    "storage_for_others",
    "store_checkpoint",
    "thinned",
    "undecided_searches",
    "waiting_trials",
]
