"""Models of the REST API on trials and their attempts."""

from typing import Any

from pydantic import Field, computed_field

from paceline.messages.base import Message, Number
from paceline.messages.metrics import MetricSummary
from paceline.messages.states import (
    AttemptState,
    ErrorKind,
    ExitReason,
    ExperimentState,
    ShownState,
    TrialState,
    shown_trial_state,
)


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


class Alert(Message):
    """What a trial's code wants people to see; `level` is debug, info, warn or error."""

    time: float
    level: str
    title: str
    description: str
    rank: int


class Trial(Message):
    """A trial; `summary` maps group and metric name to a summary (details only).

    Of a trial with more than 1,000 names it has the first ones; `has_more_metrics` is true then.

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
    has_more_metrics: bool = False
    attempts: list[Attempt] = []

    @computed_field  # type: ignore[prop-decorator] # mypy takes no decorator above a property
    @property
    def shown_state(self) -> ShownState:
        """Where it stands, in the words that users see; `state` is what is stored."""
        return shown_trial_state(
            self.state, self.is_running, self.stop_reason, self.experiment_state
        )


class TrialTime(Message):
    """What a trial's time went to until `until`, in seconds; the shares add up to `total_s`.

    `training_s` is what was trained and kept. `data_wait_s`: the devices were idle, as they waited
    for data. `checkpoint_s`: training stood still for checkpoints. `lost_s`: work after the last
    checkpoint before a stop. `start_s`: from the launch of a process to its first step, restarts
    included. `other_s`: what scripts do between and after trainings. `undivided_s`: attempts that
    do not tell what they do. `waiting_s`: there was no process. `goodput` is `training_s` as a
    fraction of all but `waiting_s`; None if that is not known.
    """

    training_s: float
    data_wait_s: float
    validation_s: float
    checkpoint_s: float
    lost_s: float
    start_s: float
    other_s: float
    undivided_s: float
    waiting_s: float
    total_s: float
    goodput: float | None
    until: float
