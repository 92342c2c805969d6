"""Models of the REST API on experiments."""

from typing import Any, Literal

from pydantic import Field, computed_field

from paceline.messages.base import Message, Number, Request
from paceline.messages.metrics import MetricName
from paceline.messages.states import ExperimentState, ShownState, shown_experiment_state


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
    rungs to show. `is_unmeasured` tells that its search has ended because no trial reported a
    finite value of the searched metric.
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
    is_unmeasured: bool = False
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


class EditExperiment(Request):
    """What to change of an experiment; what is left out or null stays.

    `max_slots` 0 removes the limit.
    """

    name: str | None = Field(default=None, min_length=1, max_length=1000)
    description: str | None = Field(default=None, max_length=100_000)
    labels: list[str] | None = Field(default=None, max_length=100)
    notes: str | None = Field(default=None, max_length=1_000_000)
    priority: int | None = Field(default=None, ge=1, le=99)
    weight: float | None = Field(default=None, gt=0, le=1_000_000)
    max_slots: int | None = Field(default=None, ge=0, le=2**31 - 1)


class ForkExperiment(Request):
    """A new experiment with the code of an existing one.

    `config` overrides fields of the existing configuration, or replaces all of it.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    replaces_config: bool = False
    submitted_config: str | None = Field(default=None, max_length=1_000_000)
    activate: bool = True


class Loss(Message):
    """What deleting an experiment will take away; `obstacle` tells why it cannot be deleted."""

    num_trials: int
    num_checkpoints: int
    checkpoint_bytes: int
    num_metric_points: int
    obstacle: str | None


class Deletion(Message):
    """What was not deleted though it should have been: directories that cannot be removed."""

    left_behind: list[str] = []


class BulkAction(Request):
    """One action on several experiments."""

    action: Literal["pause", "activate", "cancel", "kill", "archive", "unarchive", "delete"]
    experiment_ids: list[int] = Field(min_length=1, max_length=1000)


class BulkResult(Message):
    """How an action on one of several experiments went; `error` None is success."""

    experiment_id: int
    error: str | None = None


class ColumnNames(Message):
    """What can be a column of the experiment list beside an experiment's own fields."""

    metrics: list[MetricName]
    hparams: list[str]
