"""Models of the REST API that people and programs use."""

from typing import Any

from pydantic import Field, computed_field

from paceline.messages.base import Message, Page, Problem, Request
from paceline.messages.sign_ins import Login, NewPassword, Session, SignInLink
from paceline.messages.states import (
    AttemptState,
    CheckpointState,
    ErrorKind,
    ExitReason,
    ExperimentState,
    ShownState,
    TrialState,
    shown_experiment_state,
    shown_trial_state,
)

Number = float | dict[str, str]
"""A float, or ``{"$float": "nan" | "inf" | "-inf"}``; `journal.decode_value` reads both."""

__all__ = [
    "Alert",
    "Attempt",
    "AttemptEnvironment",
    "AttemptExit",
    "AttemptNode",
    "Checkpoint",
    "ContinueExperiment",
    "ContinueTrial",
    "CreateExperiment",
    "Event",
    "Experiment",
    "LogLine",
    "LogPage",
    "Login",
    "MasterInfo",
    "Message",
    "MetricRow",
    "MetricSummary",
    "NewPassword",
    "Number",
    "Page",
    "Problem",
    "Request",
    "Session",
    "Shutdown",
    "SignInLink",
    "Slot",
    "Source",
    "Trial",
]


class MasterInfo(Message):
    """What the master is and how busy it is."""

    version: str
    cluster_id: str
    started_at: float
    home: str
    num_slots: int
    num_slots_used: int
    num_active_experiments: int
    has_web_ui: bool = True


# A runner that still holds on so long after it was told to kill is killed itself; a master that
# stops waits so long for them.
RUNNER_GRACE_S = 30.0


class Shutdown(Request):
    """Ask the master to stop.

    `keep_trials` leaves running trials to their runners; otherwise they are told to checkpoint and
    leave, are killed after `timeout_s` seconds, and go on when the master starts again.
    """

    keep_trials: bool = False
    timeout_s: float = Field(default=30.0, ge=0)


class Source(Request):
    """The commit of code that was submitted, and its uncommitted changes; `diff` may be cut off."""

    commit: str = Field(max_length=200)
    branch: str | None = Field(default=None, max_length=1000)
    num_diff_bytes: int = 0
    num_untracked_files: int = 0
    diff: str | None = Field(default=None, max_length=400_000)


class CreateExperiment(Request):
    """A new experiment; `context_digest` names a context that was uploaded before.

    `source` is where the context was taken from.
    """

    config: dict[str, Any]
    submitted_config: str | None = None
    context_digest: str | None = None
    activate: bool = True
    source: Source | None = None


class ContinueTrial(Request):
    """Continue a trial as a new experiment: configuration overrides, as nested fields."""

    config: dict[str, Any] = Field(default_factory=dict)
    activate: bool = True


class ContinueExperiment(Request):
    """Reopen an ended experiment; `config` may override fields of a `single` search."""

    config: dict[str, Any] = Field(default_factory=dict)


class Experiment(Message):
    """An experiment; `config` is the resolved configuration.

    An unmanaged one shows a run that was made without a master, in the directory `run_dir`.
    `values` has the columns that a list was asked for, `notes` is told for a single one only.
    `num_records_lost` is the sum of its trials' counts. `has_rungs` tells whether its search has
    rungs to show.
    """

    id: int
    name: str
    description: str
    labels: list[str]
    state: ExperimentState
    progress: float
    created_at: float
    ended_at: float | None
    searcher: str
    metric: str
    smaller_is_better: bool
    num_trials: int
    num_running: int
    best_trial_id: int | None
    best_metric: Number | None
    error: str | None
    parent_trial_id: int | None
    config: dict[str, Any]
    warnings: list[str] = []
    is_unmanaged: bool = False
    run_dir: str | None = None
    is_archived: bool = False
    forked_from: int | None = None
    has_code: bool = False
    has_rungs: bool = False
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    num_records_lost: int = 0
    notes: str = ""
    values: dict[str, Any] = {}

    @computed_field  # type: ignore[prop-decorator] # mypy takes no decorator above a property
    @property
    def shown_state(self) -> ShownState:
        """Where it stands, in the words that users see; `state` is what is stored."""
        return shown_experiment_state(self.state, self.num_running)


class AttemptExit(Message):
    """How an attempt ended; `outcome` is what the training process itself said, if it did.

    `kind` is that of the error, None if there was none.
    """

    reason: ExitReason
    kind: ErrorKind | None = None
    code: int | None = None
    signal: int | None = None
    outcome: str | None = None
    error: str | None = None
    time: float = 0.0


class AttemptNode(Message):
    """A node of an attempt: its name, and the slots that the attempt holds there."""

    name: str
    slots: list[int]


class Attempt(Message):
    """One execution of a trial on slots.

    `nodes` are those that it runs on, the one of rank 0 first; `slots` are those of that one.
    `restarts` is how often its workers were started again within it, `last_restart_cause` what
    ended them the last time. Of a run without a master, each start is an attempt; these are told
    of the start that followed.
    """

    id: int
    trial_id: int
    number: int
    state: AttemptState
    slots: list[int]
    created_at: float
    started_at: float | None
    ended_at: float | None
    resumed_from: str | None
    resumed_steps: int
    preempt_reason: str | None
    exit: AttemptExit | None
    nodes: list[AttemptNode] = Field(default_factory=list)
    restarts: int = 0
    last_restart_cause: str | None = None


class AttemptEnvironment(Message):
    """What an attempt ran in, as its chief told; None if it has not, such as one that never began.

    `source` is that of the experiment's code, or of the directory of a run without a master.
    """

    number: int
    environment: dict[str, Any] | None
    source: dict[str, Any] | None


class MetricSummary(Message):
    """Summary of one visible series; the numeric fields are None for other values."""

    count: int
    last: Any
    last_step: int
    min: Number | None = None
    max: Number | None = None
    mean: Number | None = None


class Alert(Message):
    """What a trial's code wants people to see; `level` is debug, info, warn or error."""

    time: float
    level: str
    title: str
    description: str
    rank: int


class Trial(Message):
    """A trial; `summary` maps group and metric name to a summary (details only).

    `started_at` is when its first attempt began to run, after it had waited for slots.
    `experiment_state` is the stored state of its experiment; a master of before does not tell it.
    `num_records_lost` counts what its processes reported and the master lacks: records that were
    damaged, or that could not be stored. The trial's log names them. `restarts` are those that
    `max_restarts` counts; `retries` followed transient errors. `error_kind` is the kind of `error`.
    `metadata` is what its code
    last gave to `set_metadata`, and `alerts` are the newest 20, oldest first (details only).
    """

    id: int
    experiment_id: int
    request_id: str
    state: TrialState
    experiment_state: ExperimentState = ExperimentState.ACTIVE
    is_running: bool
    hparams: dict[str, Any]
    seed: int
    restarts: int
    retries: int = 0
    num_attempts: int
    steps_completed: int
    progress: float | None
    status: str | None
    best_metric: Number | None
    best_step: int | None
    latest_metric: Number | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    stop_reason: str | None
    error: str | None
    error_kind: ErrorKind | None = None
    latest_checkpoint: str | None
    target_length: int | None
    num_records_lost: int = 0
    metadata: dict[str, Any] | None = None
    alerts: list[Alert] = []
    summary: dict[str, dict[str, MetricSummary]] = {}
    attempts: list[Attempt] = []

    @computed_field  # type: ignore[prop-decorator] # mypy takes no decorator above a property
    @property
    def shown_state(self) -> ShownState:
        """Where it stands, in the words that users see; `state` is what is stored."""
        return shown_trial_state(
            self.state, self.is_running, self.stop_reason, self.experiment_state
        )


class Checkpoint(Message):
    """A committed checkpoint; `resources` maps file paths to bytes."""

    uuid: str
    trial_id: int
    experiment_id: int
    attempt: int
    steps_completed: int
    state: CheckpointState
    metadata: dict[str, Any]
    resources: dict[str, int]
    size: int
    storage: str
    created_at: float
    metric: Number | None


class MetricRow(Message):
    """What one attempt reported for one group and step; superseded rows are not listed."""

    group: str
    steps_completed: int
    attempt: int
    time: float
    metrics: dict[str, Any]


class LogLine(Message):
    """One line of output; `id` orders the lines of a trial."""

    id: int
    trial_id: int
    attempt: int
    time: float
    rank: int | None
    stream: str
    level: str | None
    text: str


class LogPage(Message):
    """One page of a trial's output; pass `next_cursor` as `after` for the next, None at the end.

    `num_damaged` is how many lines of what was read were found damaged so far; they are left out.
    """

    items: list[LogLine]
    next_cursor: str | None = None
    num_damaged: int = 0


class Slot(Message):
    """One schedulable device and who uses it; `id` counts the slots of its node.

    A drained one gets no attempts; one that it has may still be leaving.
    """

    id: int
    node: str = "local"
    pool: str = "default"
    is_drained: bool = False
    device: str
    trial_id: int | None
    experiment_id: int | None
    attempt_id: int | None


class Event(Message):
    """A change; follow them with the cursor `id`.

    Kinds: `experiment_state`, `experiment_changed`, `experiment_deleted`, `trial_created`,
    `trial_state`, `attempt_started`, `workers_restarted`, `attempt_ended`, `metrics`, `validation`,
    `checkpoint`, `progress`, `alert`, `logs`.
    """

    id: int
    time: float
    experiment_id: int
    trial_id: int | None
    kind: str
    data: dict[str, Any]
