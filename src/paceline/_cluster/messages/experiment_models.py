"""Pydantic models: base classes, experiments, trials, attempts, checkpoints, metrics, logs."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from paceline._cluster.messages.states import (
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

Item = TypeVar("Item")


class Message(BaseModel):
    """Base of all messages: an older client ignores fields added by a newer master."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Request(Message):
    """Base of all requests to the master: unknown fields are refused, so typing errors show."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_unicode(cls, given: Any) -> Any:
        # Columns of JSON would take half of a surrogate pair, and no answer could then show it.
        waiting = [given]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                if not one.isascii() and any("\ud800" <= mark <= "\udfff" for mark in one):
                    raise ValueError("Text must be Unicode, but has a lone surrogate.")
            elif isinstance(one, dict):
                waiting += [*one, *one.values()]
            elif isinstance(one, (list, tuple)):
                waiting += one
        return given


class Page(Message, Generic[Item]):
    """Page of a list; `next_cursor` is the `cursor` of the next page, None on the last page.

    `total` is the number of items on all pages, where the list gives it.
    """

    items: list[Item]
    next_cursor: str | None = None
    total: int | None = None


class Problem(Message):
    """An error in the form `application/problem+json` (RFC 9457), with a stable `code`."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str


Number = float | dict[str, str]
"""A float, or ``{"$float": "nan" | "inf" | "-inf"}``; `journal.decode_value` reads both."""


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


class MetricName(Message):
    """Metric name within its group, for example `loss` in `validation`.

    `x_axis` is the metric of the same group along which its code wants it drawn, if it says so.
    """

    group: str
    name: str
    x_axis: str | None = None


class MetricSummary(Message):
    """Summary of a visible series; the numeric fields are None for non-numeric values.

    `x_axis` is the metric of the same group along which its code wants it drawn, if it says so.
    """

    count: int
    last: Any
    last_step: int
    min: Number | None = None
    max: Number | None = None
    mean: Number | None = None
    x_axis: str | None = None


class MetricRow(Message):
    """Metrics of an attempt for a group and step; superseded rows are not listed."""

    group: str
    steps_completed: int
    attempt: int
    time: float
    metrics: dict[str, Any]


class MediaName(Message):
    """Group, name and kind of media that a trial has reported."""

    group: str
    name: str
    kind: str


class Media(Message):
    """Media report of an attempt; `files` name files of the trial by their `path`.

    Without files, `value` is the content: a text, or `bins` (edges) and `counts`.
    """

    id: int
    group: str
    name: str
    kind: str
    steps_completed: int
    attempt: int
    time: float
    files: list[dict[str, Any]]
    value: Any = None


class RunFile(Message):
    """File of a trial: its path, its SHA-256 in hex, its size in bytes."""

    path: str
    digest: str
    size: int
    media_type: str
    created_at: float


class LinkTarget(Message):
    """What a link of another tracker's client leads to: an experiment, or all of a label."""

    experiment_id: int | None = None
    label: str | None = None


class Source(Request):
    """Git commit of the submitted code and its uncommitted changes; `diff` may be truncated."""

    commit: str = Field(max_length=200)
    branch: str | None = Field(default=None, max_length=1000)
    num_diff_bytes: int = 0
    num_untracked_files: int = 0
    diff: str | None = Field(default=None, max_length=400_000)


class CreateExperiment(Request):
    """Request for a new experiment; `context_digest` names a previously uploaded context.

    `source` is where the context was taken from. `project` None takes `Default`, or else the first
    project in which the sender is an editor. Fields that `config` leaves open are taken from
    `template`, from the templates `default`, and from what policies fix.
    """

    config: dict[str, Any]
    submitted_config: str | None = None
    context_digest: str | None = None
    activate: bool = True
    source: Source | None = None
    project: str | None = Field(default=None, max_length=64)
    template: str | None = Field(default=None, max_length=64)


class ContinueTrial(Request):
    """Continue a trial as a new experiment: configuration overrides, as nested fields.

    With `context_digest` it has other code, uploaded before, which was taken from `source`.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    activate: bool = True
    context_digest: str | None = None
    source: Source | None = None


Limits = dict[str, int | float | None]


class SearchLimit(Message):
    """Limit of a search by its name in the config, with what is used and left.

    Of a `target`, `used` is the best value, and `left` is None. Times are as of the last minute.
    A reached limit ends the search; `max_trials` only holds further trials back.
    """

    name: str
    limit: float
    used: float | None
    left: float | None
    is_reached: bool = False


class ContinueExperiment(Request):
    """Reopen an ended experiment; `config` may override fields of a `single` search.

    With `limits` its search goes on with more trials, under these limits instead of the earlier.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    limits: Limits | None = None


class Experiment(Message):
    """An experiment; `config` is the resolved configuration.

    An unmanaged one shows a run that was made without a master, in the directory `run_dir`.
    `values` has the columns that a list was asked for; `notes`, `notes_version`, `limits` and
    `end_reason`, the limit that ended the search, are there for a single experiment only.
    `num_records_lost` is the sum of its trials' counts. `has_rungs` says whether its search has
    rungs to show. `is_unmeasured` says that its search has ended because no trial reported a finite
    value of the searched metric. `kind` is that of an interactive task, or `training`.
    """

    id: int
    name: str
    description: str
    labels: list[str]
    state: ExperimentState
    progress: float
    created_at: float
    ended_at: float | None
    kind: str = "training"
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
    is_unmeasured: bool = False
    has_rungs: bool = False
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0
    num_records_lost: int = 0
    notes: str = ""
    notes_version: str = ""
    limits: list[SearchLimit] = []
    end_reason: str | None = None
    owner: str = "admin"
    project: str = "Default"
    values: dict[str, Any] = {}

    @computed_field  # type: ignore[prop-decorator] # mypy takes no decorator above a property
    @property
    def shown_state(self) -> ShownState:
        """State shown to users, derived from the stored `state` and the running trials."""
        return shown_experiment_state(self.state, self.num_running)


class EditExperiment(Request):
    """Changes to an experiment; omitted and null fields stay unchanged.

    `max_slots` 0 removes the limit. `limits` has new limits of the search by their names in the
    config, null to remove one. With the `notes_version` that an edit of the notes began from,
    the change is refused if someone else has changed them since. `project` moves the
    experiment.
    """

    name: str | None = Field(default=None, min_length=1, max_length=1000)
    description: str | None = Field(default=None, max_length=100_000)
    labels: list[str] | None = Field(default=None, max_length=100)
    notes: str | None = Field(default=None, max_length=1_000_000)
    notes_version: str | None = Field(default=None, max_length=64)
    priority: int | None = Field(default=None, ge=1, le=99)
    weight: float | None = Field(default=None, gt=0, le=1_000_000)
    max_slots: int | None = Field(default=None, ge=0, le=2**31 - 1)
    limits: Limits | None = None
    project: str | None = Field(default=None, max_length=64)


class ForkExperiment(Request):
    """Request for a new experiment with the code of an existing experiment.

    `config` overrides fields of the existing configuration, or replaces it. With `context_digest`
    it has other code, uploaded before, which was taken from `source`.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    replaces_config: bool = False
    submitted_config: str | None = Field(default=None, max_length=1_000_000)
    activate: bool = True
    context_digest: str | None = None
    source: Source | None = None


class NotesVersion(Message):
    """Version of an experiment's notes; without a user it was there before the first edit."""

    number: int
    text: str
    user: str | None
    saved_at: float


class Relative(Message):
    """Experiment of a tree: `parent` is what it was forked from or continues, None for the root.

    `parent_trial_id` is the trial that it continues, `checkpoint` what its first trial starts from.
    """

    id: int
    name: str
    state: str
    labels: list[str]
    parent: int | None
    has_changed_code: bool
    best_metric: Number | None
    parent_trial_id: int | None = None
    checkpoint: str | None = None


class FileDiff(Message):
    """File that differs; `diff` is None for one that is no text, or is too large."""

    path: str
    change: Literal["added", "removed", "changed"]
    diff: str | None


class CodeDiff(Message):
    """Differences between the code of an experiment and of another, which came before."""

    since: int
    files: list[FileDiff]


class Loss(Message):
    """Consequences of deleting an experiment; `obstacle` is the reason if deletion is refused."""

    num_trials: int
    num_checkpoints: int
    checkpoint_bytes: int
    num_metric_points: int
    obstacle: str | None


class Deletion(Message):
    """Result of a deletion: `left_behind` lists directories the master failed to remove."""

    left_behind: list[str] = []


BulkWord = Literal[
    "pause", "activate", "cancel", "kill", "archive", "unarchive", "delete", "move", "label"
]
Labels = Annotated[list[str], Field(max_length=100)]


class BulkAction(Request):
    """Request to apply an action to several experiments.

    `move` puts them into the project `to`, `label` adds and removes labels.
    """

    action: BulkWord
    experiment_ids: list[int] = Field(min_length=1, max_length=1000)
    to: str | None = Field(default=None, max_length=64)
    add_labels: Labels = []
    remove_labels: Labels = []

    @model_validator(mode="after")
    def _check_arguments(self) -> "BulkAction":
        check_bulk_arguments(self.action, self.to, self.add_labels, self.remove_labels)
        return self


def check_bulk_arguments(
    action: BulkWord, to: str | None, add_labels: list[str], remove_labels: list[str]
) -> None:
    """Check the arguments of an action: its own, and no others.

    Raises:
        ValueError: It has not.
    """
    if (to is not None) != (action == "move"):
        raise ValueError(f"`to` must name a project for `move` alone, but got {to!r} for {action}.")
    if bool(add_labels or remove_labels) != (action == "label"):
        raise ValueError(
            f"Labels must be given for `label` alone, but {action} got"
            f" {len(add_labels) + len(remove_labels)} of them."
        )


class BulkRefusal(Message):
    """Reason why experiments stay as they are, how many, and the newest ten of them."""

    reason: str
    number: int
    experiment_ids: list[int]


class BulkPreview(Message):
    """Preview of an action on matching experiments; counts are of the changed ones.

    `experiment_ids` are all of these, newest first, `names` those of the first 50. `num_unchanged`
    are as the action would have them already. `file_bytes` are those of media and other files.
    """

    num_matching: int
    experiment_ids: list[int]
    names: list[str]
    num_trials: int
    num_checkpoints: int
    checkpoint_bytes: int
    num_unchanged: int
    refused: list[BulkRefusal]
    file_bytes: int = 0


class CheckpointPreview(Message):
    """Preview of a deletion of checkpoints; `uuids` are the newest first.

    `num_kept` are the best or latest of their trials. Ids of `refused` are those of experiments.
    """

    num_matching: int
    uuids: list[str]
    num_bytes: int
    num_trials: int
    num_kept: int
    refused: list[BulkRefusal]


class BulkResult(Message):
    """Result of a bulk action for an experiment; `error` is None on success."""

    experiment_id: int
    error: str | None = None


class ModelVersion(Message):
    """Version of a registered model: its source as registered, and the location of its files.

    A checkpoint is `checkpoint:/UUID`.
    """

    version: int
    source: str
    location: str
    notes: str
    aliases: list[str]
    owner: str
    run_id: str | None
    created_at: float


class RegisteredModel(Message):
    """Name for models, with its versions, the newest first; lists leave them out."""

    name: str
    notes: str
    aliases: dict[str, int]
    newest_version: int | None
    changed_at: float
    versions: list[ModelVersion]


class ColumnNames(Message):
    """Metrics and hyperparameters available as columns of the experiment list."""

    metrics: list[MetricName]
    hparams: list[str]


class AttemptExit(Message):
    """End of an attempt; `outcome` is reported by the training process, None without a report.

    `kind` is the kind of the error, None if there was none.
    """

    reason: ExitReason
    kind: ErrorKind | None = None
    code: int | None = None
    signal: int | None = None
    outcome: str | None = None
    error: str | None = None
    time: float = 0.0


class AttemptNode(Message):
    """Node of an attempt: its name and the slots held by the attempt on this node."""

    name: str
    slots: list[int]


class Attempt(Message):
    """Execution of a trial on slots.

    `nodes` are its nodes, the node of rank 0 first; `slots` are its slots on that node.
    `restarts` counts the restarts of its workers within it, `last_restart_cause` is the reason of
    the last one. In a run without a master, each start is an attempt, and these fields belong to
    the start that followed. An attempt with `is_filler` overtook a trial that was too large for the
    free slots, and makes room once that one fits.
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
    is_filler: bool = False


class AttemptEnvironment(Message):
    """Environment of an attempt as reported by its chief; None if the chief has not reported.

    `source` describes the experiment's code, or the directory of a run without a master.
    """

    number: int
    environment: dict[str, Any] | None
    source: dict[str, Any] | None


class Alert(Message):
    """Alert raised by a trial's code for users; `level` is debug, info, warn or error."""

    time: float
    level: str
    title: str
    description: str
    rank: int


class Trial(Message):
    """A trial; `summary` maps group and metric name to a summary (details only).

    Of a trial with more than 1,000 names it has the first ones; `has_more_metrics` is true then.

    `started_at` is when its first attempt began to run, after it had waited for slots.
    `experiment_state` is the stored state of its experiment.
    `num_records_lost` counts records that the master lacks: those that were
    damaged, or that could not be stored. The trial's log names them. `restarts` are those that
    `max_restarts` counts; `retries` followed transient errors. `error_kind` is the kind of `error`.
    `metadata` is its code's last
    `set_metadata`, and `alerts` are the newest 20, oldest first (details only).
    """

    id: int
    experiment_id: int
    request_id: str
    state: TrialState
    experiment_state: ExperimentState
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
        """State shown to users, derived from the trial's stored `state` and its experiment."""
        return shown_trial_state(
            self.state, self.is_running, self.stop_reason, self.experiment_state
        )


class QueryCompletions(Message):
    """What the last word of a query may become; the word begins at `place`."""

    place: int
    texts: list[str]


class TrialSet(Message):
    """Trials of several experiments, newest first, and their experiments.

    `total` counts all that match. The configs of the experiments are empty.
    """

    items: list[Trial]
    total: int
    experiments: list[Experiment]


class TrialTime(Message):
    """Time of a trial up to `until`, in seconds by activity; the shares add up to `total_s`.

    `training_s` is training whose result was kept. `data_wait_s`: the devices were idle, as they
    waited for data. `checkpoint_s`: training stood still for checkpoints. `lost_s`: work after the
    last checkpoint before a stop. `start_s`: from the launch of a process to its first step,
    restarts included. `other_s`: time of scripts between and after trainings. `undivided_s`:
    attempts that report no activity. `waiting_s`: there was no process. `goodput` is `training_s`
    as a fraction of all but `waiting_s`; None if that is not known.
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


class CodeFile(Message):
    """A file of an experiment's code; `size` is in bytes."""

    path: str
    size: int


class LogLine(Message):
    """Line of output; `id` orders the lines of a trial.

    `colors` are the places in `text`, in characters, at which terminals change colours, each with
    the parameters of the ANSI sequence (SGR). `found` is where the pattern that was asked for is.
    """

    id: int
    trial_id: int
    attempt: int
    time: float
    rank: int | None
    stream: str
    level: str | None
    text: str
    colors: list[tuple[int, str]] | None = None
    found: tuple[int, int] | None = None


class LogPage(Message):
    """Page of a trial's output; `next_cursor` is the `after` of the next page, None on the last.

    `num_damaged` counts the damaged lines found so far; they are left out. `num_lines` counts all
    lines of the trial, whatever was asked for; None for an experiment.
    """

    items: list[LogLine]
    next_cursor: str | None = None
    num_damaged: int = 0
    num_lines: int | None = None
